"""The pulse page: what the worker writes is what the agent reads; faults are taken once, exactly there."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import pytest

from native_workers import Worker, wait_until
from unicron import _core


@pytest.fixture
def pages() -> Iterator[int]:
    fd = _core.create_pulse_pages(3)
    yield fd
    os.close(fd)


def test_fresh_page(pages: int) -> None:
    page = _core.PulsePage(pages, 1)
    assert os.fstat(pages).st_size == 3 * _core.PULSE_PAGE_BYTES
    assert (page.stage, page.iteration, page.micro_batch, page.progress, page.since_ns) == (0, 0, 0, 0, 0)
    assert (page.committed_iteration, page.committed_ns, page.loss) == (-1, 0, 0.0)
    assert (page.owner_pid, page.beat_ns, page.fault_ns, page.waiting) == (0, 0, 0, False)


def test_worker_writes_agent_reads(pages: int) -> None:
    worker, agent, other = _core.PulsePage(pages, 1), _core.PulsePage(pages, 1), _core.PulsePage(pages, 2)
    before = _core.monotonic_ns()
    worker.advance(2, 17, 3)
    worker.advance(4, 17, 0)
    worker.set_waiting(True)
    worker.committed(16, 3.25)
    assert (agent.stage, agent.iteration, agent.micro_batch, agent.progress) == (4, 17, 0, 2)
    assert (agent.committed_iteration, agent.loss, agent.waiting) == (16, 3.25, True)
    assert before <= agent.since_ns <= agent.committed_ns <= _core.monotonic_ns()
    worker.set_waiting(False)
    assert not agent.waiting
    assert other.progress == 0


def test_a_fault_is_taken_once_and_exactly_there(pages: int) -> None:
    worker, agent = _core.PulsePage(pages, 0), _core.PulsePage(pages, 0)
    assert worker.take_fault(2, 5, 1) == 0
    agent.arm_fault(7, 2, 5, 1)
    for elsewhere in ((3, 5, 1), (2, 4, 1), (2, 5, 0)):
        assert worker.take_fault(*elsewhere) == 0
    assert agent.fault_ns == 0
    assert worker.take_fault(2, 5, 1) == 7
    assert agent.fault_ns > 0
    assert worker.take_fault(2, 5, 1) == 0


@pytest.mark.parametrize(
    ("armed", "passes", "takes"),
    [
        ((0, 5, 1), (9, 5, 1), True),
        ((2, -1, 1), (2, 99, 1), True),
        ((2, 5, -1), (2, 5, 99), True),
        ((0, -1, -1), (1, 2, 3), True),
        ((0, 5, -1), (1, 6, 3), False),
    ],
)
def test_a_fault_armed_for_any(
    pages: int, armed: tuple[int, int, int], passes: tuple[int, int, int], takes: bool
) -> None:
    page = _core.PulsePage(pages, 0)
    page.arm_fault(3, *armed)
    assert page.take_fault(*passes) == (3 if takes else 0)


def test_mark_fault(pages: int) -> None:
    page = _core.PulsePage(pages, 0)
    page.mark_fault()
    assert 0 < page.fault_ns <= _core.monotonic_ns()


def test_reset_zeroes_the_page(pages: int) -> None:
    page = _core.PulsePage(pages, 0)
    page.advance(2, 17, 3)
    page.committed(16, 1.0)
    page.arm_fault(1, 0, -1, -1)
    page.reset()
    assert (page.stage, page.progress, page.committed_iteration, page.owner_pid) == (0, 0, -1, 0)
    assert page.take_fault(0, 0, 0) == 0


def test_reset_is_refused_while_the_owner_lives(pages: int) -> None:
    with Worker(pages, 0, "time.sleep(60)") as worker:
        worker.wait_ready()
        with pytest.raises(_core.UnicronError, match=f"held by living process {worker.pid}"):
            worker.pulse.reset()
        worker.kill()
        wait_until(lambda: _core.owner_gone(worker.pid), "the killed worker is gone")
        worker.pulse.reset()
        assert worker.pulse.owner_pid == 0


def test_a_stopped_worker_no_longer_beats(pages: int) -> None:
    with Worker(pages, 0, "time.sleep(60)") as worker:
        worker.wait_ready()
        first = worker.pulse.beat_ns
        wait_until(lambda: worker.pulse.beat_ns > first, "a beat")
        worker.kill(signal.SIGSTOP)
        wait_until(lambda: _core.process_state(worker.pid) == "T", "the worker is stopped")
        last = worker.pulse.beat_ns
        wait_until(lambda: _core.monotonic_ns() - last > 200_000_000, "four beats' time has passed")
        assert worker.pulse.beat_ns == last
        worker.kill(signal.SIGCONT)
        wait_until(lambda: worker.pulse.beat_ns > last, "it beats again")


def test_only_one_worker_per_slot(pages: int) -> None:
    with Worker(pages, 0, "time.sleep(60)") as first:
        first.wait_ready()
        with Worker(pages, 0, "") as second:
            assert second.exit_code() == 1
            assert f"slot 0 is held by process {first.pid}" in second.stderr()


@pytest.mark.parametrize("slot", [-1, 3, 1 << 40])
def test_a_slot_outside_the_file_is_refused(pages: int, slot: int) -> None:
    with pytest.raises(_core.UnicronError, match="outside this file of 3 pulse pages"):
        _core.PulsePage(pages, slot)


@pytest.mark.parametrize("num_slots", [0, -1, 1 << 40])
def test_a_senseless_number_of_slots_is_refused(num_slots: int) -> None:
    with pytest.raises(_core.UnicronError, match="num_slots"):
        _core.create_pulse_pages(num_slots)


def test_a_file_that_holds_no_pulse_pages_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, mmap.PAGESIZE)
    try:
        with pytest.raises(_core.UnicronError, match="no pulse page"):
            _core.PulsePage(fd, 0)
    finally:
        os.close(fd)


def test_the_files_size_cannot_be_changed(pages: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(pages, 0)
