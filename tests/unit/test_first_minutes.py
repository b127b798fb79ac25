"""What a newcomer meets in the first minutes: an agent that cannot be says so at once, and megatron-core is quiet."""

from __future__ import annotations

import re
import socket
import subprocess
import warnings
from pathlib import Path

import msgspec
import pytest

from unicron.agent.interfaces import Interface
from unicron.runtime import agent_daemon, doctor, keys, template
from unicron.runtime.agent_process import AgentSettings
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.exposition import ExpositionProblem
from unicron.runtime.files import FileProblem
from unicron.runtime.framing import listen
from unicron.runtime.job_file import load_job
from unicron.types import Layout

ROOT = Path(__file__).resolve().parents[2]


def settings_of(folder: Path, metrics: str = "") -> AgentSettings:
    return AgentSettings("vm", "127.0.0.1:9", str(folder / "keys"), 1, 0, str(folder / "vm"), metrics=metrics)


def test_an_agent_that_cannot_be_is_told_before_the_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def imports(*_: object, **__: object) -> None:
        raise AssertionError("imports")

    monkeypatch.setattr(subprocess, "Popen", imports)
    with pytest.raises(keys.KeyProblem, match="unicron keys"):
        agent_daemon.run_with_template(settings_of(tmp_path), "torch")
    keys.make_directory(tmp_path / "keys")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ExpositionProblem, match=f"cannot serve metrics at {address}: .*in use.*: give another"):
            agent_daemon.run_with_template(settings_of(tmp_path, address), "torch")
    with listen(tmp_path / "vm" / "agent.sock"), pytest.raises(FileProblem) as said:
        agent_daemon.run_with_template(settings_of(tmp_path), "torch")
    folder = tmp_path / "vm"
    assert str(said.value) == (
        f"an agent named vm runs here already ({folder}): stop it, or give this one another --node (and --metrics)"
    )
    with pytest.raises(AssertionError, match="imports"):  # what nobody listens on is no agent
        agent_daemon.run_with_template(settings_of(tmp_path), "torch")


def test_kernels_for_gpus_are_missed_where_there_are_gpus_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "DEVICES", tmp_path)
    text = f"{template.WITHOUT_GPUS}. Falling back to Torch optimizers."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        template.expect_no_gpus()
        warnings.warn(text, stacklevel=1)
        warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
    assert len(seen) == 1
    (tmp_path / "nvidia0").touch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        template.expect_no_gpus()
        warnings.warn(text, stacklevel=1)
    assert len(seen) == 1


def test_doctor_is_short_about_what_is_not_there() -> None:
    known = "no CUDA driver: libcuda.so.1: cannot open shared object file: No such file or directory; /x: and so on"
    assert doctor._without_driver(known) == "no CUDA driver here (libcuda.so.1)"
    assert doctor._without_driver("cuInit says 999") == "cuInit says 999"
    down = doctor._interface(Interface("eth1", is_up=False, addresses=(), rated_mbit=0))
    assert (down.state, down.value, down.meaning) == ("note", "no address, down", "")


def test_the_manual_has_every_field_of_the_coordinators_file_with_its_default() -> None:
    manual = (ROOT / "docs" / "OPERATION.md").read_text()
    table = manual.partition("All fields of the coordinator's file")[2].partition("\n\nWhere")[0]
    told = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", table, re.MULTILINE))
    fields = msgspec.structs.fields(CoordinatorSettings)
    assert list(told) == [field.name for field in fields]
    for field in fields:
        if isinstance(field.default, str | int):
            assert told[field.name].strip("`").strip('"') == str(field.default), field.name


def test_the_example_of_a_job_is_its_scripts() -> None:
    """It must begin with a few slots, and do an iteration in seconds."""
    job = load_job(ROOT / "examples" / "job.yaml")
    layout = msgspec.convert(job["layout"], Layout)
    assert job["replicas_min"] == 2 and layout.num_micro_batches * layout.micro_batch == 16
    names = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".yaml")}
    manual = (ROOT / "examples" / "README.md").read_text()
    assert not [name for name in names if f"`{name}`" not in manual]
