"""A simulated worker's copies of another's shard, and of its own: training/buddies.py without bytes.

A copy that travels beside the training is a *journey*: it arrives when it is waited for, after the next step, or is
given up at a meeting, where it may or may not have come whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from unicron.healing.buddies import Copy, common_version, ward_of
from unicron.healing.record import Record
from unicron.sim.worker_process import WorkerProcess


class WorkerCopies(WorkerProcess):
    journey: Copy | None = None  # the ward's, on its way here
    copied_epoch = copied_at = -1  # of the newest journey
    common_at = -1  # the newest iteration that everybody can go back to

    def renew_copies(self, then: Callable[[], None]) -> None:
        """What is due when all shards are gathered."""
        assert self.machine is not None and self.machine.plan is not None
        plan, iteration, every = self.machine.plan, self.memory.iteration, self.layout.buddy_every
        if not every:
            self.memory.keep(Copy(ward_of(plan, self.rank), iteration))
            then()
            return

        def finished() -> None:
            if plan.epoch != self.copied_epoch:
                self._begin_journey()
                self._end_journey(then)
                return
            if iteration - self.copied_at >= every:
                self.common_at = self.copied_at
                self._begin_journey()
            then()

        self._end_journey(finished)

    def _begin_journey(self) -> None:
        assert self.machine is not None and self.machine.plan is not None
        plan, iteration = self.machine.plan, self.memory.iteration
        self.memory.make_room(iteration, self.common_at)
        self.memory.kept.append(iteration)
        self.journey = Copy(ward_of(plan, self.rank), iteration)
        self.copied_epoch, self.copied_at = plan.epoch, iteration

    def _end_journey(self, then: Callable[[], None]) -> None:
        if self.journey is None:
            then()
            return

        def came(results: dict[int, int]) -> None:
            if set(results.values()) != {self.copied_at}:
                self.world.violate(f"{self.name} waits for the copy of {self.copied_at}: {results}")
            self._arrived()
            then()

        self._within(self.data, ("buddies", self.copied_at), self.copied_at, came)

    def _arrived(self) -> None:
        journey, self.journey = self.journey, None
        assert journey is not None
        self.memory.copies.append(journey)

    def abandon_copies(self) -> None:
        """Before the groups are made anew. It came only where its sender had begun."""
        journey = self.journey
        if journey is None:
            return
        sender: Any = self.data.members.get(journey.rank) if self.data is not None else None
        if sender is not None and journey.iteration in sender.memory.kept and self.rng.random() < 0.5:
            self._arrived()
        self.journey = None

    def agree_on_copies(self, records: Iterable[Record]) -> None:
        found = common_version(records)
        self.common_at = -1 if found is None else found[0]

    def go_back(self, iteration: int, branch: int, then: Callable[[], None]) -> None:
        """To what is kept of an earlier iteration."""
        self.memory.is_torn = True

        def back() -> None:
            if iteration not in self.memory.kept:
                self.world.violate(f"{self.name} goes back to {iteration}, and has {self.memory.kept}")
            self.world.count("gone back")
            self.memory.forget(after=iteration)
            self.memory.end_step(iteration, gathered=False)
            self.memory.branch = branch
            self.world.checkers.of(self.task).went_back(iteration)
            then()

        self._loop(self.rng.uniform(1.0, 4.0), back)
