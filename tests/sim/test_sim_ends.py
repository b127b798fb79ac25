"""A command that is told to end takes what runs beside it along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unicron.runtime import processes
from unicron.sim import side_by_side
from unicron.sim.record import Record

pytestmark = pytest.mark.timeout(60)


def members(group: int) -> list[int]:
    """Processes of a process group that are not dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def test_sigterm_ends_the_chunks_beside_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unicron.sim", "--seeds", "5000", "--jobs", "2", "--record", str(tmp_path / "r")]
    simulator = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while len(members(simulator.pid)) < 3:
            assert time.monotonic() < deadline and simulator.poll() is None
            time.sleep(0.05)
        simulator.send_signal(signal.SIGTERM)
        assert simulator.wait(30) == 143
        assert members(simulator.pid) == []
    finally:
        if members(simulator.pid):
            os.killpg(simulator.pid, signal.SIGKILL)


def test_one_that_nobody_holds_yet_is_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal can come between the start of a process and the moment when that is written down."""
    started: list[subprocess.Popen[bytes]] = []

    def interrupted(first: int, count: int, path: Path, extra: list[str]) -> subprocess.Popen[bytes]:
        started.append(start(first, count, path, extra))
        raise SystemExit(143)

    start = side_by_side._start
    monkeypatch.setattr(side_by_side, "_start", interrupted)
    with pytest.raises(SystemExit):
        side_by_side.run_chunks(Record(tmp_path / "r"), list(range(5000)), 2, [], lambda: True, lambda done: None)
    assert not processes.is_alive(started[0].pid)
    started[0].wait(10)
