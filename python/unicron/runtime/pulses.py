"""The pulse pages of one node: one memfd, one page a slot, and the native supervisor that sees
their owners die.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from unicron import _core
from unicron.agent.events import Activity, IterationSums, Pulse
from unicron.runtime.holding import why_held
from unicron.types import Stage


@dataclass
class _Seen:
    num_intervals: int = 0
    num_iterations: int = 0
    progress: int = -1


def _activity(pid: int) -> Activity | None:
    found = _core.process_activity(pid) if pid > 0 else None
    return None if found is None else Activity(found[0] / 1e6, found[1] / 1e6)


class Pulses:
    """Poll ``fileno``; ``take_deaths`` when readable."""

    def __init__(self, num_slots: int) -> None:
        self.fd = _core.create_pulse_pages(num_slots)
        self._supervisor = _core.Supervisor()
        self._pages: dict[int, _core.PulsePage] = {}
        self._watched: dict[str, int] = {}  # worker -> slot
        self._workers: dict[int, str] = {}
        self._seen: dict[int, _Seen] = {}  # slot -> what was read of its page

    def fileno(self) -> int:
        return self._supervisor.fileno()

    @property
    def num_watched(self) -> int:
        return len(self._watched)

    def prepare(self, slot: int) -> None:
        """For a new worker."""
        self._page(slot).reset()
        self._seen[slot] = _Seen()

    def watch(self, worker: str, slot: int) -> None:
        self._watched[worker] = slot
        self._workers[slot] = worker
        self._supervisor.watch(self._page(slot), slot)

    def release(self, worker: str, slot: int) -> None:
        if self._watched.pop(worker, None) is not None:
            self._supervisor.unwatch(slot)
            self._workers.pop(slot, None)

    def take_deaths(self) -> list[tuple[str, int, Pulse]]:
        deaths = self._supervisor.take_deaths()
        return [(self._workers[slot], seen_ns, self._read(slot)) for slot, seen_ns in deaths if slot in self._workers]

    def read(self, worker: str) -> Pulse | None:
        slot = self._watched.get(worker)
        return None if slot is None else self._read(slot)

    def sample(self) -> tuple[tuple[str, Pulse], ...]:
        """All pages, with what is read from them once."""
        return tuple((worker, self._sample(slot)) for worker, slot in self._watched.items())

    def _sample(self, slot: int) -> Pulse:
        page, seen = self._page(slot), self._seen.setdefault(slot, _Seen())
        seen.num_intervals, intervals = page.intervals(seen.num_intervals)
        seen.num_iterations, iterations = page.iterations(seen.num_iterations)
        pulse = self._read(slot)
        stands, seen.progress = pulse.progress == seen.progress, pulse.progress
        stands = stands and pulse.stage not in (Stage.WAITING, Stage.DONE)
        activity = _activity(page.owner_pid) if stands else None
        held = why_held(page.owner_pid) if stands and page.owner_pid > 0 else ""
        sums = tuple(IterationSums(number, ran, done, tuple(waits)) for number, _, ran, done, waits in iterations)
        return replace(pulse, intervals=tuple(intervals), iterations=sums, activity=activity, held=held)

    def arm(self, slot: int, kind: int, point: int, iteration: int, micro_batch: int) -> None:
        self._page(slot).arm_fault(kind, point, iteration, micro_batch)

    def mark_fault(self, slot: int) -> None:
        self._page(slot).mark_fault()

    def _page(self, slot: int) -> _core.PulsePage:
        page = self._pages.get(slot)
        if page is None:
            page = self._pages[slot] = _core.PulsePage(self.fd, slot)
        return page

    def _read(self, slot: int) -> Pulse:
        page = self._page(slot)
        return Pulse(
            stage=Stage(page.stage),
            iteration=page.iteration,
            micro_batch=page.micro_batch,
            since_ns=page.since_ns,
            progress=page.progress,
            waiting=page.waiting,
            fault_ns=page.fault_ns,
            committed_iteration=page.committed_iteration,
            loss=page.loss,
            declared_ms=page.declared_ms,
            last_words=page.last_words,
        )

    def close(self) -> None:
        self._supervisor.close()
        os.close(self.fd)
