"""A command that is told to end takes what runs beside it along."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
