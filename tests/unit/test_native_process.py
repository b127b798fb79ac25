"""Facts about processes from /proc: state letters, and when nothing of a process can write any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from native_workers import WAIT_S_MAX, wait_until
from unicron import _core

# Three threads that write without pause, and one that sleeps.
BUSY = """
import threading, time
def spin():
    while True: pass
for _ in range(3): threading.Thread(target=spin, daemon=True).start()
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


def test_a_living_process_is_not_gone(busy: subprocess.Popen[bytes]) -> None:
    assert not _core.owner_gone(busy.pid)
    assert not _core.owner_gone(os.getpid())
    assert not _core.wait_owner_gone(busy.pid, 20)


def test_a_killed_process_is_gone_before_it_is_reaped(busy: subprocess.Popen[bytes]) -> None:
    busy.kill()
    assert _core.wait_owner_gone(busy.pid, 20_000)
    wait_until(lambda: _core.process_state(busy.pid) == "Z", "it waits to be reaped")
    assert _core.owner_gone(busy.pid)
    busy.wait(WAIT_S_MAX)
    assert _core.owner_gone(busy.pid)
    assert _core.process_state(busy.pid) == ""


def test_a_stopped_process_is_neither_gone_nor_running(busy: subprocess.Popen[bytes]) -> None:
    busy.send_signal(signal.SIGSTOP)
    wait_until(lambda: _core.process_state(busy.pid) == "T", "state letter T")
    assert not _core.owner_gone(busy.pid)
    busy.send_signal(signal.SIGCONT)
    wait_until(lambda: _core.process_state(busy.pid) in ("R", "S"), "it goes on")


@pytest.mark.parametrize("pid", [0, -1])
def test_a_senseless_pid_is_refused(pid: int) -> None:
    for ask in (_core.owner_gone, _core.process_state):
        with pytest.raises(_core.UnicronError, match="pid is"):
            ask(pid)


def test_a_wait_can_be_interrupted(busy: subprocess.Popen[bytes]) -> None:
    class Rung(Exception):
        pass

    def ring(number: int, stack: object) -> None:
        raise Rung

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Rung):
            _core.wait_owner_gone(busy.pid, 30_000)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_the_clock_is_the_machines() -> None:
    before = time.monotonic_ns()
    assert before <= _core.monotonic_ns() <= time.monotonic_ns()


def test_activity_tells_a_busy_process_from_one_that_sleeps(busy: subprocess.Popen[bytes]) -> None:
    before = _core.process_activity(busy.pid)
    assert before is not None
    wait_until(lambda: (_core.process_activity(busy.pid) or before)[0] - before[0] > 100_000_000, "it ran for 100 ms")
    os.kill(busy.pid, signal.SIGSTOP)
    wait_until(lambda: _core.process_state(busy.pid) == "T", "it is stopped")
    stopped = _core.process_activity(busy.pid)
    time.sleep(0.1)
    assert _core.process_activity(busy.pid) == stopped
    busy.kill()
    busy.wait(WAIT_S_MAX)
    assert _core.process_activity(busy.pid) is None
