"""Which cluster a command takes when none is named: the only one here, unless it belongs to somebody's run."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron.runtime import client, keys
from unicron.runtime.client import ADDRESS_FILE, LOCAL_PREFIX, OWNER_FILE, CoordinatorSilent, from_environment

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where local clusters would lie; nothing in the environment names one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("UNICRON_COORDINATOR", "UNICRON_KEYS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"tcp://127.0.0.1:{server.getsockname()[1]}"


def cluster(folder: Path, name: str, address: str, owner: str) -> Path:
    directory = folder / f"{LOCAL_PREFIX}{name}"
    directory.mkdir()
    keys.make_directory(directory / "keys")
    (directory / ADDRESS_FILE).write_text(address)
    (directory / OWNER_FILE).write_text(owner)
    return directory


def test_the_only_one_is_taken(folder: Path, listener: str) -> None:
    cluster(folder, "a", listener, "unicron demo")
    with from_environment() as found:
        assert found.address == listener


def test_no_task_goes_into_somebodys_run_unless_it_is_named(folder: Path, listener: str) -> None:
    directory = cluster(folder, "a", listener, "unicron demo")
    with pytest.raises(CoordinatorSilent, match="belongs to `unicron demo`") as refused:
        from_environment(adds_tasks=True)
    flags = str(refused.value).rpartition(": ")[2].split()
    assert flags == ["--coordinator", listener.removeprefix("tcp://"), "--keys", f"{directory}/keys"]
    with from_environment(flags[1], flags[3], adds_tasks=True) as found:
        assert found.address == flags[1]


def test_of_several_each_is_told_with_its_owner(folder: Path, listener: str) -> None:
    for name, owner in (("a", "unicron run minimal"), ("b", "unicron demo")):
        cluster(folder, name, listener, owner)
    with pytest.raises(CoordinatorSilent, match="several clusters") as refused:
        from_environment()
    lines = str(refused.value).splitlines()[1:]
    assert [line.rpartition("# ")[2].rpartition(", ")[0] for line in lines] == ["unicron run minimal", "unicron demo"]
    assert all("--coordinator 127.0.0.1:" in line and "--keys " in line for line in lines)


def test_one_without_a_name_is_told_by_its_tasks_and_age(
    folder: Path, listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nameless = cluster(folder, "a", listener, "")
    os.utime(nameless / OWNER_FILE, (time.time() - 600,) * 2)
    cluster(folder, "b", listener, "unicron demo")
    monkeypatch.setattr(client, "LABEL_MS_MAX", 50)
    for tasks, words in (([], "no name and no tasks"), (["gpt", "small"], "trains gpt, small")):
        if tasks:
            monkeypatch.setattr(client, "_tasks", lambda _path, tasks=tasks: tasks)
        with pytest.raises(CoordinatorSilent) as refused:
            from_environment()
        line = str(refused.value).splitlines()[1]
        assert f"# {words}" in line and line.endswith(", 10 min old")


def test_a_run_that_has_ended_is_told_as_such(folder: Path, listener: str) -> None:
    """Not: make new keys."""
    directory = cluster(folder, "a", listener, "unicron run minimal")
    shutil.rmtree(directory)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(CoordinatorSilent, match=r"no cluster is at .* any more"):
        from_environment(gone, str(directory / "keys"))
    assert client._listens(listener)
