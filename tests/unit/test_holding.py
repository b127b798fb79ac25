"""Who holds a process on purpose: a real debugger's attach, a real frozen group where one can be made, files else."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from native_workers import wait_until
from unicron.runtime.holding import why_held

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_nobody(sleeper: subprocess.Popen[bytes]) -> None:
    assert why_held(sleeper.pid) == ""
    os.kill(sleeper.pid, signal.SIGSTOP)
    assert why_held(sleeper.pid) == "", "a signal is no debugger"
    assert why_held(2**22 + 1) == ""


def test_a_debugger(sleeper: subprocess.Popen[bytes]) -> None:
    if libc.ptrace(PTRACE_ATTACH, sleeper.pid, None, None) != 0:
        pytest.skip(f"this machine lets nobody attach: {os.strerror(ctypes.get_errno())}")
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert why_held(sleeper.pid) == f"a debugger (pid {os.getpid()}) is attached"
    assert libc.ptrace(PTRACE_DETACH, sleeper.pid, None, None) == 0
    assert why_held(sleeper.pid) == ""


def test_a_frozen_group(sleeper: subprocess.Popen[bytes]) -> None:
    group = Path(f"/sys/fs/cgroup/freezer/unicron-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer can be made here: {error}")
    try:
        (group / "cgroup.procs").write_text(str(sleeper.pid))
        assert why_held(sleeper.pid) == ""
        (group / "freezer.state").write_text("FROZEN")
        assert why_held(sleeper.pid) == f"its control group /{group.name} is frozen"
        (group / "freezer.state").write_text("THAWED")
        assert why_held(sleeper.pid) == ""
    finally:
        (group / "freezer.state").write_text("THAWED")
        sleeper.kill()
        sleeper.wait(10)
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group is empty")
        group.rmdir()


@pytest.mark.parametrize("state", ["0", "1"])
def test_version_2_files(tmp_path: Path, state: str) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("0::/job/a\n")
    events = tmp_path / "cgroups" / "job" / "a" / "cgroup.events"
    events.parent.mkdir(parents=True)
    events.write_text(f"populated 1\nfrozen {state}\n")
    expected = "its control group /job/a is frozen" if state == "1" else ""
    assert why_held(7, tmp_path / "proc", tmp_path / "cgroups") == expected
