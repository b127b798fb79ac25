"""What a newcomer meets in the first minutes: an agent that cannot be says so at once, and megatron-core is quiet."""

from __future__ import annotations

import socket
import subprocess
import warnings
from pathlib import Path

import pytest

from unicron.agent.interfaces import Interface
from unicron.runtime import agent_daemon, doctor, keys, template
from unicron.runtime.agent_process import AgentSettings
from unicron.runtime.exposition import ExpositionProblem
from unicron.runtime.files import FileProblem
from unicron.runtime.framing import listen


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
