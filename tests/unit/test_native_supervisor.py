"""Deaths are seen by the kernel's mark on a robust mutex, with futex_waitv and with one thread per worker."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from native_workers import WAIT_S_MAX, Worker, wait_until
from unicron import _core

SLEEP = "time.sleep(60)"


@pytest.fixture(params=["waitv", "threads"])
def supervisor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[_core.Supervisor]:
    monkeypatch.setenv("UNICRON_NO_FUTEX_WAITV", "1" if request.param == "threads" else "0")
    result = _core.Supervisor()
    yield result
    result.close()


@pytest.fixture
def pages() -> Iterator[int]:
    fd = _core.create_pulse_pages(140)
    yield fd
    os.close(fd)


def wait_deaths(supervisor: _core.Supervisor) -> list[tuple[int, int]]:
    readable, _, _ = select.select([supervisor.fileno()], [], [], WAIT_S_MAX)
    assert readable, "no death was reported"
    return supervisor.take_deaths()


def test_deaths_of_eight_workers(supervisor: _core.Supervisor, pages: int) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(pages, slot, SLEEP)) for slot in range(8)]
        for worker in workers:
            supervisor.watch(worker.wait_ready().pulse, worker.slot)
        for slot in (3, 0, 7, 1, 5, 2, 6, 4):
            killed_ns = _core.monotonic_ns()
            workers[slot].kill()
            ((dead, seen_ns),) = wait_deaths(supervisor)
            assert dead == slot
            assert killed_ns < seen_ns < killed_ns + 5_000_000_000
        assert supervisor.take_deaths() == []


def test_all_at_once(supervisor: _core.Supervisor, pages: int) -> None:
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(pages, slot, SLEEP)) for slot in range(4)]
        for worker in workers:
            supervisor.watch(worker.wait_ready().pulse, worker.slot)
        for worker in workers:
            worker.kill()
        dead: list[int] = []
        while len(dead) < 4:
            dead += [slot for slot, _ in wait_deaths(supervisor)]
        assert sorted(dead) == [0, 1, 2, 3]


@pytest.mark.parametrize("code", ["sys.exit(0)", "os._exit(3)", "os.abort()", "raise SystemError"])
def test_every_end_is_a_death(supervisor: _core.Supervisor, pages: int, code: str) -> None:
    with Worker(pages, 5, f"sys.stdin.read(); {code}") as worker:
        supervisor.watch(worker.pulse, 5)
        assert [slot for slot, _ in wait_deaths(supervisor)] == [5]


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGSEGV)", "ctypes.string_at(8)", "os.abort()"])
def test_a_fatal_signal_is_a_death_before_the_process_has_ended(
    supervisor: _core.Supervisor, pages: int, end: str
) -> None:
    """faulthandler writes its stacks to a pipe that nobody reads: it does not get to the end."""
    code = f"""
import ctypes, faulthandler
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while True:
        os.write(writer, bytes(65536))
except BlockingIOError:
    os.set_blocking(writer, True)
faulthandler.enable(writer)
_core.announce_fatal_signals()
{end}
"""
    with Worker(pages, 5, code) as worker:
        supervisor.watch(worker.pulse, 5)
        assert [slot for slot, _ in wait_deaths(supervisor)] == [5]
        assert worker.process.poll() is None, "it is still writing"


def until_says(worker: Worker, words: str) -> None:
    assert worker.process.stderr is not None
    while words not in worker.process.stderr.readline():
        assert worker.process.poll() is None


def test_what_a_forked_child_dies_of_is_no_death(supervisor: _core.Supervisor, pages: int) -> None:
    """A data loader's process has its parent's page, and its handlers."""
    code = """
_core.announce_fatal_signals()
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSEGV)
assert os.waitpid(child, 0)[1] == signal.SIGSEGV
print("child is gone", file=sys.stderr, flush=True)
time.sleep(60)
"""
    with Worker(pages, 5, code) as worker:
        supervisor.watch(worker.pulse, 5)
        until_says(worker, "child is gone")
        assert not select.select([supervisor.fileno()], [], [], 0.3)[0]


def test_a_handler_that_came_later_decides(supervisor: _core.Supervisor, pages: int) -> None:
    """As a Java machine's, which lives on faults of its own."""
    code = """
_core.announce_fatal_signals()
signal.signal(signal.SIGSEGV, lambda *_: print("handled", file=sys.stderr, flush=True))
os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(60)
"""
    with Worker(pages, 5, code) as worker:
        supervisor.watch(worker.pulse, 5)
        until_says(worker, "handled")
        assert not select.select([supervisor.fileno()], [], [], 0.3)[0]


def test_watched_before_the_worker_exists(supervisor: _core.Supervisor, pages: int) -> None:
    """The mutex has no owner yet: no death, no busy loop, and the owner that comes is noticed."""
    for slot in range(4):
        supervisor.watch(_core.PulsePage(pages, slot), slot)
    cpu_before = time.process_time()
    assert select.select([supervisor.fileno()], [], [], 0.6)[0] == []
    assert time.process_time() - cpu_before < 0.3
    with Worker(pages, 2, SLEEP) as worker:
        worker.wait_ready()
        assert supervisor.take_deaths() == []
        worker.kill()
        assert [slot for slot, _ in wait_deaths(supervisor)] == [2]


def test_watched_after_its_death(supervisor: _core.Supervisor, pages: int) -> None:
    with Worker(pages, 0, SLEEP) as worker:
        worker.wait_ready().kill()
        worker.exit_code()
        supervisor.watch(worker.pulse, 0)
        assert [slot for slot, _ in wait_deaths(supervisor)] == [0]


def test_a_stopped_worker_is_not_dead(supervisor: _core.Supervisor, pages: int) -> None:
    with Worker(pages, 0, SLEEP) as worker:
        supervisor.watch(worker.wait_ready().pulse, 0)
        worker.kill(signal.SIGSTOP)
        assert select.select([supervisor.fileno()], [], [], 0.6)[0] == []
        worker.kill()
        assert [slot for slot, _ in wait_deaths(supervisor)] == [0]


def test_a_slot_lives_many_lives(supervisor: _core.Supervisor, pages: int) -> None:
    page = _core.PulsePage(pages, 0)
    for _ in range(3):
        page.reset()
        supervisor.watch(page, 0)
        with Worker(pages, 0, SLEEP) as worker:
            worker.wait_ready().kill()
            assert [slot for slot, _ in wait_deaths(supervisor)] == [0]
            assert _core.wait_owner_gone(worker.pid, 20_000)


def test_unwatched_slots_are_silent(supervisor: _core.Supervisor, pages: int) -> None:
    with Worker(pages, 0, SLEEP) as first, Worker(pages, 1, SLEEP) as second:
        supervisor.watch(first.wait_ready().pulse, 0)
        supervisor.watch(second.wait_ready().pulse, 1)
        supervisor.unwatch(0)
        supervisor.unwatch(77)  # never watched: no error
        first.kill()
        first.exit_code()
        second.kill()
        assert [slot for slot, _ in wait_deaths(supervisor)] == [1]


def test_unwatch_drops_a_death_that_was_not_taken(supervisor: _core.Supervisor, pages: int) -> None:
    with Worker(pages, 0, SLEEP) as worker:
        supervisor.watch(worker.wait_ready().pulse, 0)
        worker.kill()
        assert select.select([supervisor.fileno()], [], [], WAIT_S_MAX)[0]
        supervisor.unwatch(0)
        assert supervisor.take_deaths() == []


def test_more_workers_than_one_futex_waitv_holds(supervisor: _core.Supervisor, pages: int) -> None:
    for slot in range(140):
        supervisor.watch(_core.PulsePage(pages, slot), slot)
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker(pages, slot, SLEEP)) for slot in (0, 126, 127, 139)]
        for worker in workers:
            worker.wait_ready().kill()
            assert [slot for slot, _ in wait_deaths(supervisor)] == [worker.slot]


def test_a_word_that_was_overwritten_hides_no_death(supervisor: _core.Supervisor, pages: int) -> None:
    with Worker(pages, 0, SLEEP) as worker, mmap.mmap(pages, 4096) as raw:
        supervisor.watch(worker.wait_ready().pulse, 0)
        raw[0:4] = (0x3FFFFFFF).to_bytes(4, "little")
        worker.kill()
        worker.exit_code()
        assert [slot for slot, _ in wait_deaths(supervisor)] == [0]


def test_misuse_is_refused(supervisor: _core.Supervisor, pages: int) -> None:
    page = _core.PulsePage(pages, 0)
    supervisor.watch(page, 0)
    with pytest.raises(_core.UnicronError, match="slot 0 is watched already"):
        supervisor.watch(_core.PulsePage(pages, 0), 0)
    with pytest.raises(_core.UnicronError, match="slot 1 is not this pulse page's slot 0"):
        supervisor.watch(page, 1)
    supervisor.close()
    supervisor.close()
    assert supervisor.take_deaths() == []
    with pytest.raises(_core.UnicronError, match="closed"):
        supervisor.watch(page, 0)


def test_a_forked_child_of_the_agent_ends(supervisor: _core.Supervisor, pages: int) -> None:
    """The watcher's thread does not exist in the child; the object's destruction must not wait for it."""
    code = (
        "import os, sys; from unicron import _core\n"
        "fd = _core.create_pulse_pages(1); s = _core.Supervisor(); s.watch(_core.PulsePage(fd, 0), 0)\n"
        "pid = os.fork()\n"
        "if pid: sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "del s; sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S_MAX, check=False).returncode == 7


def test_wait_until_helper_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("native_workers.WAIT_S_MAX", 0.0)
    with pytest.raises(AssertionError, match="never"):
        wait_until(lambda: False, "never")
