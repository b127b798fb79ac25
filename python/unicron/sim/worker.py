"""A simulated worker: the real healing machine, carried out with blocking collectives instead of torch.

The counterpart of training/engine.py and session.py, action by action. Its native monitor is a part of its own: it
hears the agent's frames and shuts sockets even while the loop is blocked, and stands still only when the process is
stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicron.agent.events import Activity, Pulse
from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record, hold_vote
from unicron.messages import (
    ArenaRequest,
    CollectiveFailed,
    ExceptionRaised,
    Finished,
    Healed,
    SaveAndHold,
    Saved,
    StateLost,
    WorkerReady,
    WorkerWelcome,
)
from unicron.sim.groups import Group
from unicron.sim.memory import NUM_SEGMENTS, Memory, Sum, add
from unicron.sim.plants import machine_for
from unicron.types import EpochPlan, Layout, PlanKind, Rank, Stage

if TYPE_CHECKING:
    from unicron.sim.agent_host import AgentHost

SLICE_MS = 250.0  # of a wait in a group
INSIDE = (do.Compute, do.Tie, do.Confirm, do.Settle, do.RebuildInside)


class SimWorker:
    def __init__(self, host: AgentHost, name: str, task: str, incarnation: int, pid: int) -> None:
        self.host, self.world = host, host.world
        self.name, self.task, self.incarnation, self.pid = name, task, incarnation, pid
        self.rng = host.world.streams(f"worker/{name}")
        self.rank: Rank = -1
        self.layout = Layout()
        self.alive = True
        self.is_stopped = False
        self.is_deadlocked = False
        self.faults: list[str] = []  # what was done to it: evidence for a kill
        self.kill_on: str = ""  # name of the action in which it dies
        self.frozen: list[Callable[[], None]] = []
        self.exception: str = ""
        # monitor
        self.newest: EpochPlan | None = None
        self.unread: list[EpochPlan] = []
        self.groups: list[tuple[Group, bool]] = []
        # loop
        self.machine: HealingMachine | None = None
        self.memory = Memory()
        self.inside: Group | None = None
        self.data: Group | None = None
        self.everybody: Group | None = None
        self.action: do.AnyAction | None = None
        self.token: object = None
        self.then: Callable[[Any], None] | None = None
        self.in_store = False  # waits in a store: a newer epoch interrupts it
        self.is_waiting_role = False
        self.is_told_to_hold = False
        self.holds: int | None = None  # iteration at which it saved and waits
        self._own = 0  # segments reduced before the present Reduce
        self._reduced_before = 0  # ... before the present Compute
        self._fresh: Sum = ()  # what the present Compute has added up
        self.recomputed: set[tuple[int, int]] = set()
        self.interrupted = -1
        self.progress, self.since_ms, self.is_waiting = 0, 0.0, False
        self.stage, self.micro_batch = Stage.STARTING, -1
        self.intervals: list[tuple[int, int, float]] = []  # of the loop, since the last sample
        self._later(self.rng.uniform(100.0, 300.0), lambda: host.heard_hello(self))

    # ------------------------------------------------------------ process

    def _later(self, delay_ms: float, call: Callable[[], None]) -> None:
        self.world.scheduler.after(delay_ms, lambda: self.gate(call))

    def gate(self, call: Callable[[], None]) -> None:
        """What happens in this process: not when it is dead, and later when it is stopped."""
        if self.alive and self.is_stopped:
            self.frozen.append(call)
        elif self.alive:
            call()

    def _loop(self, delay_ms: float, call: Callable[[], None]) -> None:
        """Goes on in the loop's thread."""
        self._later(delay_ms, lambda: None if self.is_deadlocked else call())

    def die(self, kind: str, status: int) -> None:
        if not self.alive:
            return
        self.alive = False
        for group, _ in self.groups:
            group.died(self.rank)
        self.host.child_died(self, kind, status)

    def stop(self) -> None:
        self.is_stopped = True
        self.host.child_stopped(self, "stopped", 19)

    def go_on(self) -> None:
        if self.alive and self.is_stopped:
            self.is_stopped = False
            self.host.child_stopped(self, "continued", 18)
            calls, self.frozen = self.frozen, []
            for call in calls:
                self.gate(call)

    def raise_exception(self, kind: str) -> None:
        """An exception in the script: last words, then the process leaves."""
        if not self.alive or self.machine is None or self.is_stopped:
            return
        self.faults.append("exception")
        epoch = self.newest.epoch if self.newest else 0
        self.say(
            ExceptionRaised(
                self.name, self.rank, epoch, self.memory.iteration, self.micro_batch, self.stage, kind,
                f"{kind}: injected", f"train.py:{kind}", int(self.world.scheduler.now_ms * 1e6),
            )
        )  # fmt: skip
        self.is_deadlocked = True  # it computes no more
        self._later(self.rng.uniform(0.5, 30.0), lambda: self.die("exited", 1))

    def say(self, message: Any) -> None:
        self.host.hear(self, message)

    def pulse(self) -> Pulse:
        return Pulse(
            stage=self.stage,
            iteration=self.memory.iteration,
            micro_batch=self.micro_batch,
            since_ns=int(self.since_ms * 1e6),
            progress=self.progress,
            waiting=self.is_waiting,
        )

    def sampled(self) -> Pulse:
        """The page with what is read from it once. Its process never runs: simulated work takes no processor."""
        intervals, self.intervals = tuple(self.intervals), []
        return dataclasses.replace(self.pulse(), intervals=intervals, activity=Activity(0.0, 0.0))

    def _advance(self, stage: Stage, micro_batch: int = -1, *, waiting: bool = False) -> None:
        took_ms = self.world.scheduler.now_ms - self.since_ms
        self.intervals.append((int(self.stage), self.memory.iteration, took_ms))
        self.stage, self.micro_batch, self.is_waiting = stage, micro_batch, waiting
        self.progress += 1
        self.since_ms = self.world.scheduler.now_ms

    # ------------------------------------------------------------ monitor

    def on_frame(self, plan: EpochPlan) -> None:
        """The native thread: announce the epoch, then shut what must be rebuilt."""
        if self.newest is not None and plan.epoch <= self.newest.epoch:
            return
        self.newest = plan
        self.is_told_to_hold = False  # who still must is told again in the new epoch
        self.unread.append(plan)
        touched = set(plan.touched)
        keep_healthy = self.world.options.plant == "keep-healthy-cross-group"
        for group, is_cross in self.groups:
            if touched & set(group.members) or (is_cross and not keep_healthy):
                group.shut(self.rank)
        if self.is_waiting_role:
            self._loop(0.0, self._maybe_take_role)
        elif self.in_store:
            token = self.token
            self._loop(0.5, lambda: self.broke(token, "a newer epoch"))
        elif self.holds is not None:
            self._loop(0.0, self._go_on)
        elif isinstance(self.action, (do.AwaitPlan, do.ReportStateLost)):
            self._loop(0.0, self._plan_came)

    def on_hold(self, message: SaveAndHold) -> None:
        self.is_told_to_hold = True

    def on_finish(self) -> None:
        if self.is_waiting_role:
            self._later(1.0, lambda: self.die("exited", 0))

    # ------------------------------------------------------------ build, wait, adopt

    def on_welcome(self, welcome: WorkerWelcome) -> None:
        self.rank, self.layout = welcome.rank, welcome.layout

        def built() -> None:
            self._advance(Stage.WAITING)
            self.say(WorkerReady(self.name, self.rank, welcome.waiting))
            self.is_waiting_role = True
            self._maybe_take_role()

        self._loop(self.rng.uniform(20.0, 60.0), built)

    def _maybe_take_role(self) -> None:
        plan = self.newest
        member = None if plan is None else next((m for m in plan.members if m.worker == self.name), None)
        if not self.is_waiting_role or member is None:
            return
        if member.rank != self.rank:  # built for another role: built again
            self.rank = member.rank
            self._loop(self.rng.uniform(20.0, 60.0), self._maybe_take_role)
            return
        assert plan is not None
        self.is_waiting_role = False
        self._advance(Stage.HEAL)
        adopt = plan.kind is PlanKind.REPLACE
        request = ArenaRequest(self.task, self.name, self.rank, 1, "digest", adopt)
        self._asked_for = plan
        self.host.ask_arena(self, request)

    def on_arena(self, memory: Memory, adopted: bool) -> None:
        plan = self._asked_for
        self.memory = memory
        if adopted:
            self._finish_open_step()
            record = memory.read(self.rank)
        else:
            fresh = plan.kind is PlanKind.START
            record = Record(self.rank, 0, Stage.STARTING, has_state=fresh, num_segments=NUM_SEGMENTS)
        self.machine = machine_for(self.world.options.plant, self.rank, self.layout)
        self.run(on.Joined(plan, record))

    def _finish_open_step(self) -> None:
        """A sharded step has an undo area: the heir of a process that died in it goes on where it stood."""
        memory = self.memory
        commit = memory.commit
        if self.layout.sharded and memory.is_torn and commit is not None and commit.iteration == memory.iteration:
            self.world.count("undone")
            memory.end_step(memory.iteration + 1, gathered=False)

    # ------------------------------------------------------------ the loop

    def run(self, event: on.AnyEvent) -> None:
        machine = self.machine
        assert machine is not None
        self.token, self.then, self.in_store = None, None, False
        try:
            for plan in self.unread:
                self._note_interruption(plan)
                machine.step(on.PlanArrived(plan))
            self.unread = []
            (self.action,) = machine.step(event)
        except AssertionError as error:
            self.world.violate(f"{self.name} (rank {self.rank}): healing machine: {error}")
            return
        self.memory.write(machine.record)
        if type(self.action).__name__ == self.kill_on:
            self.kill_on = ""
            self.faults.append("kill")
            self._later(self.rng.uniform(0.0, 3.0), lambda: self.die("signaled", 9))
        self._act(self.action)

    def _note_interruption(self, plan: EpochPlan) -> None:
        if plan.kind is not PlanKind.START and self.interrupted < 0:
            self.interrupted = self.memory.iteration

    def _act(self, action: do.AnyAction) -> None:
        match action:
            case do.Compute():
                self._compute(action)
            case do.Tie():
                self._advance(Stage.TIE)
                self._within(self.inside, ("tie", self.memory.iteration), None, self._done)
            case do.Reduce():
                self._reduce(action, 0)
            case do.Commit():
                self._commit()
            case do.Confirm():
                self._advance(Stage.COMMIT, waiting=True)
                if action.report:
                    self._report(action.report, inside=False)
                tag = ("confirm", self.memory.iteration)
                self._within(self.inside, tag, action.result, self._confirmed)
            case do.Step():
                self._step(action.commit)
            case do.Gather():
                self._gather_shards()
            case do.Settle(ok=ok):
                self._advance(Stage.GATHER, waiting=True)
                tag = ("settle", self.memory.iteration)
                self._within(self.inside, tag, ok, lambda results: self.run(on.Settled(all(results.values()))))
            case do.ExchangeInside() | do.RebuildInside():
                replica = self.layout.replica_of(self.rank)
                self._gather(action, self.layout.replica_ranks(replica), ("inside", replica))
            case do.ExchangeWorld() | do.RebuildCross():
                self._gather(action, action.plan.ranks, ("world", 0))
            case do.FetchState():
                self._fetch(action)
            case do.LoadCheckpoint():
                self._advance(Stage.SAVE)
                self._loop(self.rng.uniform(20.0, 60.0), lambda: self._loaded(action.path))
            case _:
                self._act_alone(action)

    def _act_alone(self, action: do.AnyAction) -> None:
        match action:
            case do.AwaitPlan():
                self._advance(Stage.HEAL, waiting=True)
                if action.report:
                    self._report(action.report, inside=action.inside)
                self._loop(0.1, self._plan_came)
            case do.ReportStateLost():
                self._advance(Stage.HEAL, waiting=True)
                assert self.machine is not None
                epoch = self.machine._newest()
                self.say(StateLost(self.name, self.rank, epoch, action.iteration, action.positions))
            case do.Ready():
                self._advance(Stage.IDLE)
                self._begin(action.iteration)
            case do.EndIteration():
                self._advance(Stage.IDLE)
                self._ended(action)
            case do.Leave():
                self._later(1.0, lambda: self.die("exited", 0))
            case _:
                raise AssertionError(f"no way to act {type(action).__name__}")

    def _done(self, _: Any = None) -> None:
        self.run(on.Done())

    # waiting for others

    def _within(
        self, group: Group | None, tag: Any, payload: Any, then: Callable[[dict[Rank, Any]], None],
        participants: tuple[Rank, ...] | None = None,
    ) -> None:  # fmt: skip
        """A collective in a group; alone when there is none."""
        self.then = then
        token = self.token = object()
        self._later(SLICE_MS, lambda: self._say_waiting(token))
        if group is None:
            self._loop(0.1, lambda: self.completed(token, {self.rank: payload}))
            return
        try:
            group.enter(self.rank, tag, payload, token, participants)
        except AssertionError as error:
            self.world.violate(f"{self.name}: {error}")

    def _say_waiting(self, token: object) -> None:
        """training/watched_group.py: who waits longer than a slice says so in its pulse."""
        if token is self.token and not self.is_deadlocked:
            self.is_waiting = True

    def completed(self, token: object, results: dict[Rank, Any]) -> None:
        def go_on() -> None:
            if token is self.token and self.then is not None:
                then, self.token, self.then, self.in_store = self.then, None, None, False
                then(results)

        self._loop(0.0, go_on)

    def broke(self, token: object, text: str) -> None:
        def go_on() -> None:
            if token is None or token is not self.token:
                return
            inside = isinstance(self.action, INSIDE)
            if self.in_store:
                assert self.machine is not None and self.newest is not None
                inside = inside and self.newest.epoch <= self.machine._newest()
            reduced = self.memory.reduced if isinstance(self.action, do.Reduce) else -1
            self.run(on.Broken(inside, text, reduced))

        self._loop(0.0, go_on)

    # the undisturbed iteration

    def _begin(self, iteration: int) -> None:
        if iteration >= self.world.options.of(self.task).iterations:
            self._advance(Stage.DONE)
            self.say(Finished(self.name, self.rank))
            self._later(self.rng.uniform(1.0, 10.0), lambda: self.die("exited", 0))
            return
        self._loop(self.rng.uniform(0.1, 1.0), lambda: self.run(on.IterationBegun(iteration)))

    def _compute(self, action: do.Compute) -> None:
        if not self.memory.gathered:
            self.world.violate(f"{self.name} computes iteration {action.iteration} without the others' shards")
        self._reduced_before = self.memory.reduced
        if not action.extra:
            self.memory.segments = [()] * NUM_SEGMENTS
            self.memory.reduced = 0
        self._fresh = ()
        self._compute_next(action, 0)

    def _compute_next(self, action: do.Compute, index: int) -> None:
        if index == len(action.micro_batches):
            self._computed(action)
            return
        micro_batch = action.micro_batches[index]
        assert self.machine is not None
        if micro_batch in self.memory.begun or (self.machine.healing and action.extra):
            self.recomputed.add((action.iteration, micro_batch))
        self.memory.begun.add(micro_batch)
        self._advance(Stage.COMPUTE, micro_batch)

        def added(_: Any) -> None:
            self._fresh = add(self._fresh, (micro_batch,))
            self._compute_next(action, index + 1)

        tag = ("forward", action.iteration, micro_batch)
        self._loop(self.rng.uniform(4.0, 8.0), lambda: self._within(self.inside, tag, None, added))

    def _computed(self, action: do.Compute) -> None:
        first = self._reduced_before if action.extra else 0
        for number in range(first, NUM_SEGMENTS):
            self.memory.segments[number] = add(self.memory.segments[number], self._fresh)
        assert self.machine is not None
        self.memory.begun = set(self.machine.record.done)
        self._done()

    def _reduce(self, action: do.Reduce, number: int) -> None:
        if number == NUM_SEGMENTS:
            self._done()
            return
        if number == 0:
            self._own = self.memory.reduced
        own = self._own
        self._advance(Stage.REDUCE, number, waiting=True)

        def reduced(results: dict[Rank, Sum]) -> None:
            if number < len(action.shared):
                value = results[action.shared[number]]
            else:
                value = add(*results.values())
            if number >= own or number >= len(action.shared):
                self.memory.segments[number] = value
                self.memory.reduced = number + 1
            self._reduce(action, number + 1)

        tag = ("reduce", self.memory.iteration, number, number < len(action.shared))
        self._within(self.data, tag, self.memory.segments[number], reduced)

    def _commit(self) -> None:
        self._advance(Stage.COMMIT, waiting=True)
        iteration = self.memory.iteration
        assert self.machine is not None and self.machine.plan is not None
        epoch = self.machine.plan.epoch

        def committed(results: dict[Rank, tuple[int, int, float]]) -> None:
            if {result[:2] for result in results.values()} != {(epoch, iteration)}:
                self.world.violate(f"{self.name}: commit of {results}")
            hold = sum(vote for _, _, vote in results.values())
            self.run(on.CommitDone(CommitResult(iteration, 1.0, 1.0, 0.0, 1.0, hold)))

        vote = hold_vote(told=self.is_told_to_hold, may_hold=self.machine.may_hold)
        mine = (epoch, iteration, vote)
        self._within(self.everybody, ("commit", iteration), mine, committed)

    def _confirmed(self, results: dict[Rank, CommitResult | None]) -> None:
        self.run(on.Confirmed(next((r for r in results.values() if r is not None), None)))

    def _step(self, commit: CommitResult) -> None:
        self._advance(Stage.STEP)
        self.memory.is_torn = True

        def stepped() -> None:
            self.world.checkers.of(self.task).stepped(self, commit)
            self.memory.end_step(commit.iteration + 1, gathered=not self.layout.sharded)
            self._done()

        self._loop(self.rng.uniform(1.0, 4.0), stepped)

    def _gather_shards(self) -> None:
        """Every replica's shard must be of the same version, and there must be one of each replica."""
        self._advance(Stage.GATHER, waiting=True)
        replica, iteration = self.layout.replica_of(self.rank), self.memory.iteration

        def gathered(results: dict[Rank, tuple[int, int]]) -> None:
            if set(results.values()) != {(r, iteration) for r in range(self.layout.dp)}:
                self.world.violate(f"{self.name} at {iteration} gathers shards {sorted(results.values())}")
            self.memory.gathered = True
            self._done()

        self._within(self.data, ("gather", iteration), (replica, iteration), gathered)

    def _ended(self, action: do.EndIteration) -> None:
        iteration = action.commit.iteration
        if action.healed:
            self._say_healed(iteration)
        every = self.world.options.of(self.task).checkpoint_every
        assert self.machine is not None and self.machine.plan is not None
        if action.commit.hold > 0 and not action.healed and self._is_current():
            self._hold(iteration + 1)
            return
        if every and (iteration + 1) % every == 0 and self.rank == min(self.machine.plan.ranks):
            saved = Saved(self.name, self.rank, iteration + 1, f"ckpt/{iteration + 1}")
            self._later(self.rng.uniform(10.0, 60.0), lambda: self.say(saved))
        self._begin(iteration + 1)

    def _hold(self, iteration: int) -> None:
        """Save, and wait for the end or a newer epoch. Parts meet on the disk; the lowest rank says when all did."""
        self.holds = iteration
        assert self.machine is not None and self.machine.plan is not None
        plan = self.machine.plan
        self._advance(Stage.SAVE)

        def written() -> None:
            parts = self.world.parts.setdefault((self.task, plan.epoch, iteration), set())
            parts.add(self.rank)
            if self.rank == min(plan.ranks):
                look()

        def look() -> None:
            if self.holds != iteration or not self._is_current():
                return
            if self.world.parts[self.task, plan.epoch, iteration] >= set(plan.ranks):
                path = f"ckpt/{iteration}"
                self.say(Saved(self.name, self.rank, iteration, path, plan.epoch, final=True))
            else:
                self._later(10.0, look)

        self._later(self.rng.uniform(10.0, 60.0), written)

    def _is_current(self) -> bool:
        """No newer epoch than the one its groups are of."""
        assert self.machine is not None and self.machine.plan is not None
        return self.newest is None or self.newest.epoch == self.machine.plan.epoch

    def _go_on(self) -> None:
        if self.holds is not None:
            iteration, self.holds = self.holds, None
            self._begin(iteration)

    def _say_healed(self, iteration: int) -> None:
        assert self.machine is not None and self.machine.plan is not None
        self.say(
            Healed(
                self.name, self.rank, self.machine.plan.epoch, iteration, max(self.interrupted, 0),
                50.0, 40.0, int(self.world.scheduler.now_ms * 1e6), tuple(sorted(self.recomputed)),
                0.0, 0, 1, "none_needed", 0, {},
            )
        )  # fmt: skip
        self.recomputed, self.interrupted = set(), -1

    # healing

    def _gather(self, action: Any, ranks: tuple[Rank, ...], where: tuple[str, int]) -> None:
        """Exchanges and rebuilds both go through the epoch's store; a newer epoch interrupts the wait."""
        self._advance(Stage.HEAL, waiting=True)
        plan: EpochPlan = action.plan
        self.world.checkers.of(self.task).role_used(plan, self.rank, self.name)
        kind = type(action).__name__
        assert self.machine is not None

        def gathered(results: dict[Rank, Any]) -> None:
            if isinstance(action, (do.ExchangeInside, do.ExchangeWorld)):
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
        value = self.machine.record if kind.startswith("Exchange") else self
        store = self.world.store_at(plan.store)
        store.gather((self.task, plan.epoch, kind, where), self, value, ranks, token)

    def _build(self, action: do.RebuildInside | do.RebuildCross, members: dict[Rank, Any]) -> None:
        epoch = action.plan.epoch
        if isinstance(action, do.RebuildInside):
            if self.inside is None or action.touched is None or action.touched:
                self._forget(self.inside)
                self.inside = self.world.group(f"{self.task}/inside/{epoch}", members)
                self.groups.append((self.inside, False))
            return
        keep = self.world.options.plant == "keep-healthy-cross-group"
        touched = set(action.plan.touched)
        mine = self.layout.coords(self.rank)
        peers = {r: w for r, w in members.items() if _same_position(self.layout, r, mine)}
        if not (keep and self.data is not None and not touched & set(self.data.members)):
            self._forget(self.data)
            self.data = self.world.group(f"{self.task}/data/{epoch}", peers) if len(peers) > 1 else None
            if self.data is not None:
                self.groups.append((self.data, True))
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

        def fetched(results: dict[Rank, int]) -> None:
            if results[fetch.source] != action.iteration:
                self.world.violate(f"{self.name} took iteration {results[fetch.source]}, not {action.iteration}")
            if self.rank in fetch.targets:
                self.memory.end_step(action.iteration)
            self._done()

        tag = ("fetch", action.plan.epoch)
        self._within(self.data, tag, self.memory.iteration, fetched, tuple(sorted(both)))

    def _loaded(self, path: str) -> None:
        iteration = int(path.rpartition("/")[2])
        self.memory.end_step(iteration)
        self.run(on.CheckpointLoaded(iteration))

    def _report(self, text: str, *, inside: bool) -> None:
        assert self.machine is not None
        self.say(
            CollectiveFailed(
                self.name, self.rank, self.machine._newest(), self.memory.iteration, self.stage,
                inside, text,
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


def _same_position(layout: Layout, rank: Rank, coords: tuple[int, int, int]) -> bool:
    tp, _, pp = layout.coords(rank)
    return (tp, pp) == (coords[0], coords[2])
