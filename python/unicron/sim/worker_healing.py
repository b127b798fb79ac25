"""What a simulated worker does about a failure: exchange records, make groups again, fetch state, report."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.buddies import Copy
from unicron.messages import CollectiveFailed
from unicron.sim.groups import Group
from unicron.sim.worker_training import WorkerTraining
from unicron.types import EpochPlan, PlanKind, Rank, Stage

LOOK_MS = 1_000.0  # as in training/meeting.py
CAN_REDUCE_EAGERLY = "all the same"  # nothing begins early here; checkers.py looks who would


class WorkerHealing(WorkerTraining):
    def _gather(self, action: Any, ranks: tuple[Rank, ...], where: tuple[str, int]) -> None:
        """Exchanges and rebuilds both go through the epoch's store; a newer epoch interrupts the wait."""
        self._advance(Stage.HEAL, waiting=True)
        plan: EpochPlan = action.plan
        self.world.checkers.of(self.task).role_used(plan, self.rank, self.name)
        kind = type(action).__name__
        assert self.machine is not None

        def gathered(results: dict[Rank, Any]) -> None:
            if isinstance(action, do.AwaitOthers):
                self._all_seen(action, where)
            elif isinstance(action, (do.ExchangeInside, do.ExchangeWorld)):
                if isinstance(action, do.ExchangeWorld):
                    self.world.met[self.task] = max(plan.epoch, self.world.met.get(self.task, 0))
                    self.agree_on_copies(results[r] for r in ranks)
                self.run(on.RecordsGathered([results[r] for r in ranks]))
            else:
                self._build(action, results)
                self._done()

        self.then = gathered
        token = self.token = object()
        self.in_store = True
        if self.newest is not None and self.newest.epoch > plan.epoch:
            self.broke(token, "a newer epoch")
            return
        value: Any = self
        if kind.startswith("Exchange"):
            assert self.machine is not None
            if plan.kind in (PlanKind.START, PlanKind.RESTORE):
                self.world.met[self.task] = plan.epoch
            elif (self.machine.plan is None or self.machine.is_ending) and self._have_left(plan):
                self._loop(0.1, lambda: self._others_left(token))
                return
            else:
                self._later(LOOK_MS, lambda: self._look(plan, token))
            self.abandon_copies()
            own, copies, kept = self.machine.record, tuple(self.memory.copies), tuple(self.memory.kept)
            value = msgspec.structs.replace(
                own, copies=copies, kept=kept, eager=CAN_REDUCE_EAGERLY, late=self._can_gather_late()
            )
        store = self.world.store_at(plan.store)
        store.gather((self.task, plan.epoch, kind, where), self, value, ranks, token)

    def _can_gather_late(self) -> bool:
        """As training/gathering.py; and of the scripts two in three ask for it."""
        layout, asks = self.layout, zlib.crc32(self.task.encode()) + self.world.options.seed
        return layout.sharded and not layout.buddy and layout.ep == 1 and asks % 3 > 0

    def _have_left(self, plan: EpochPlan) -> bool:
        """As training/ending.py: all left their loops, and nobody met afterwards."""
        epoch, store = self.world.left.get(self.task, (-1, ""))
        is_known = store == plan.store and self.world.store_at(store).is_alive
        return is_known and self.world.met.get(self.task, 0) <= epoch

    def _look(self, plan: EpochPlan, token: object) -> None:
        if token is self.token and self.in_store and not self.is_deadlocked:
            if self._have_left(plan):
                self._others_left(token)
            else:
                self._later(LOOK_MS, lambda: self._look(plan, token))

    def _others_left(self, token: object) -> None:
        if token is self.token:
            self.world.count("alone")
            self.run(on.OthersLeft())

    def _all_seen(self, action: do.AwaitOthers, where: tuple[str, int]) -> None:
        """As training/ending.py: all have come, then all say that they saw so."""
        if where == ("over", 0):
            self._gather(action, action.plan.ranks, ("over", 1))
        elif self._all_leave(action, "leave"):
            self._done()
        else:
            token = self.token = object()
            self.in_store = True
            if self.newest is not None and self.newest.epoch > action.plan.epoch:
                self.broke(token, "a newer epoch")

    def _waited(self, action: do.AwaitOthers) -> None:
        """For longer than anybody does: all leave, whoever is missing."""
        if self.action is action and self.in_store and self._all_leave(action, "leave"):
            self._done()

    def _build(self, action: do.RebuildInside | do.RebuildCross, members: dict[Rank, Any]) -> None:
        epoch = action.plan.epoch
        if isinstance(action, do.RebuildInside):
            self.memory.is_tied = self.memory.is_tied or action.is_first
            if self.inside is None or action.touched is None or action.touched:
                self._forget(self.inside)
                self.inside = self.world.group(f"{self.task}/inside/{epoch}", members)
                self.groups.append((self.inside, False))
            return
        self.late = None
        keep = self.world.options.plant == "keep-healthy-cross-group"
        touched = set(action.plan.touched)
        same = self.layout.peers(self.rank)
        peers = {r: w for r, w in members.items() if r in same}
        if not (keep and self.data is not None and not touched & set(self.data.members)):
            self._forget(self.data)
            self.data = self.world.group(f"{self.task}/data/{epoch}", peers) if len(peers) > 1 else None
            if self.data is not None:
                self.groups.append((self.data, True))
        if self.layout.ep > 1:
            self._forget(self.lanes)
            lanes = {r: w for r, w in members.items() if r in self.layout.dense_peers(self.rank)}
            self.lanes = self.world.group(f"{self.task}/lanes/{epoch}", lanes) if len(lanes) > 1 else None
            if self.lanes is not None:
                self.groups.append((self.lanes, self.layout.num_replicas > 1))
        if self.layout.instances > 1:
            self._forget(self.mates)
            mates = {r: w for r, w in members.items() if r in self.layout.shard_mates(self.rank)}
            self.mates = self.world.group(f"{self.task}/mates/{epoch}", mates) if len(mates) > 1 else None
            if self.mates is not None:
                self.groups.append((self.mates, True))
        self._forget(self.everybody)
        self.everybody = self.world.group(f"{self.task}/world/{epoch}", members) if len(members) > 1 else None
        if self.everybody is not None:
            self.groups.append((self.everybody, True))

    def _forget(self, group: Group | None) -> None:
        self.groups = [(g, c) for g, c in self.groups if g is not group]

    def _fetch(self, action: do.FetchState) -> None:
        self._advance(Stage.HEAL, waiting=True)
        fetch = action.fetch
        both = (fetch.source, *fetch.targets)
        if self.rank not in both:
            self._loop(0.1, self._done)
            return

        if fetch.copy:
            self._fetch_copy(action)
            return

        def fetched(results: dict[Rank, int]) -> None:
            if results[fetch.source] != action.iteration:
                self.world.violate(f"{self.name} took iteration {results[fetch.source]}, not {action.iteration}")
            if self.rank in fetch.targets:
                self.world.count("fetch of a shard" if self.layout.sharded else "fetch")
                self.memory.end_step(action.iteration, gathered=not self.layout.sharded)
            self._done()

        tag = ("fetch", action.plan.epoch, fetch.shard)
        self._within(self.data, tag, self.memory.iteration, fetched, tuple(sorted(both)))

    def _fetch_copy(self, action: do.FetchState) -> None:
        """A shard from its buddy; one step behind it takes the gradient too, and does the step."""
        fetch, target = action.fetch, action.fetch.targets[0]

        def fetched(results: dict[Rank, int | None]) -> None:
            if results[fetch.source] != fetch.iteration or fetch.iteration + fetch.steps != action.iteration:
                self.world.violate(f"{self.name} took a copy of {results[fetch.source]} for {action.iteration}")
            if self.rank == target:
                self.world.count("buddy of before" if self.layout.buddy_every else "buddy")
                self.memory.forget(after=action.iteration)
                if self.layout.buddy_every:
                    self.memory.kept.append(fetch.iteration)
                self.memory.end_step(action.iteration, gathered=False)
                self.memory.commit, self.memory.branch = action.commit, action.branch
            self._done()

        known = next((copy.iteration for copy in self.memory.copies if copy.rank == target), None)
        if Copy(target, fetch.iteration) in self.memory.copies:
            known = fetch.iteration
        tag = ("copy", action.plan.epoch, target)
        self._within(self.data, tag, known, fetched, tuple(sorted((fetch.source, target))))

    def _loaded(self, path: str) -> None:
        iteration = int(path.rpartition("/")[2])
        self.memory.end_step(iteration)
        self.memory.forget(after=-1)
        self.run(on.CheckpointLoaded(iteration))

    def _report(self, text: str, *, inside: bool, late: bool = False) -> None:
        assert self.machine is not None
        self.say(
            CollectiveFailed(
                self.name, self.rank, self.machine._newest(), self.memory.iteration, self.stage,
                inside, text, late,
            )
        )  # fmt: skip

    def _plan_came(self) -> None:
        action, machine = self.action, self.machine
        assert machine is not None
        if isinstance(action, do.AwaitPlan):
            after = action.after_epoch
        elif isinstance(action, do.ReportStateLost):
            after = machine._newest()
        else:
            return
        if self.newest is not None and self.newest.epoch > after:
            self.run(on.Done())
