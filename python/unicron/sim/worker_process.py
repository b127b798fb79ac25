"""A simulated worker's process: its life, its pulse, and how its loop waits for others.

What happens in it goes through `gate`: nothing when it is dead, later when it or its whole node stands still.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicron.agent.events import Activity, Pulse
from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.messages import ChangeLayout, ExceptionRaised, MoveRoles
from unicron.sim.groups import Group
from unicron.sim.memory import Memory, Sum
from unicron.types import EpochPlan, Layout, Rank, Stage

if TYPE_CHECKING:
    from unicron.sim.agent_host import AgentHost

SLICE_MS = 250.0  # of a wait in a group
INSIDE = (do.Compute, do.Tie, do.Confirm, do.Settle, do.RebuildInside)


@dataclasses.dataclass
class Late:
    """A collective that was begun, and is waited for elsewhere."""

    token: object
    iteration: int
    results: dict[Rank, Any] | None = None
    broke: str = ""


class WorkerProcess:
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
        self.lanes: Group | None = None  # of all replicas, where there are several in each
        self.mates: Group | None = None  # of its instance of the optimizer, where there are several
        self.everybody: Group | None = None
        self.action: do.AnyAction | None = None
        self.token: object = None
        self._waits_since_ms = 0.0
        self.then: Callable[[Any], None] | None = None
        self.in_store = False  # waits in a store: a newer epoch interrupts it
        self.is_waiting_role = False
        self.is_told_to_hold = False
        self.move: MoveRoles | None = None  # the newest order to move roles, until a newer epoch
        self.change: ChangeLayout | None = None  # the newest order to go over to another layout, until a newer epoch
        self.holds: int | None = None  # iteration at which it saved and waits
        self.late: Late | None = None  # a gather that the next forward waits for
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
        if self.alive and (self.is_stopped or self.host.is_paused):
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
        self.is_waiting = self.is_waiting or self._waits_long()
        self.is_stopped = True
        self.host.child_stopped(self, "stopped", 19)

    def go_on(self) -> None:
        if self.alive and self.is_stopped:
            self.is_stopped = False
            self.host.child_stopped(self, "continued", 18)
            self.catch_up()

    def catch_up(self) -> None:
        """Whatever waited while it stood still."""
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
                f"{kind}: injected", f"train.py:{kind}", self.host.now_ns,
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
            waiting=self.is_waiting or self._waits_long(),
        )

    def sampled(self) -> Pulse:
        """The page with what is read from it once. Its process never runs: simulated work takes no processor."""
        intervals, self.intervals = tuple(self.intervals), []
        return dataclasses.replace(self.pulse(), intervals=intervals, activity=Activity(0.0, 0.0))

    def _advance(self, stage: Stage, micro_batch: int = -1, *, waiting: bool = False) -> None:
        took_ms = self.host.clock.now_ms - self.since_ms
        self.intervals.append((int(self.stage), self.memory.iteration, took_ms))
        self.stage, self.micro_batch, self.is_waiting = stage, micro_batch, waiting
        self.progress += 1
        self.since_ms = self.host.clock.now_ms

    def run(self, event: on.AnyEvent) -> None:
        """The healing machine's next step."""
        raise NotImplementedError

    def _done(self, _: Any = None) -> None:
        self.run(on.Done())

    # ------------------------------------------------------------ waits

    def _within(
        self, group: Group | None, tag: Any, payload: Any, then: Callable[[dict[Rank, Any]], None],
        participants: tuple[Rank, ...] | None = None,
    ) -> None:  # fmt: skip
        """A collective in a group; alone when there is none."""
        self.then = then
        token = self.token = object()
        self._waits_since_ms = self.world.scheduler.now_ms
        if group is None:
            self._loop(0.1, lambda: self.completed(token, {self.rank: payload}))
            return
        try:
            group.enter(self.rank, tag, payload, token, participants)
        except AssertionError as error:
            self.world.violate(f"{self.name}: {error}")

    def _waits_long(self) -> bool:
        """training/watched_group.py: who waits longer than a slice says so in its pulse. Asked when the pulse is read,
        because an event for every wait would be a fifth of all events."""
        stands_still = self.is_deadlocked or self.is_stopped or self.host.is_paused
        if self.token is None or self.in_store or stands_still:
            return False
        return self.world.scheduler.now_ms - self._waits_since_ms >= SLICE_MS

    def completed(self, token: object, results: dict[Rank, Any]) -> None:
        if self.late is not None and token is self.late.token and token is not self.token:
            self.late.results = results
            return

        def go_on() -> None:
            if token is self.token and self.then is not None:
                then, self.token, self.then, self.in_store = self.then, None, None, False
                then(results)

        self._loop(0.0, go_on)

    def _all_leave(self, action: do.AwaitOthers, proposal: str) -> bool:
        """As training/ending.py: the first proposal of an epoch, "leave" or "meet", counts for all its members."""
        plan = action.plan
        leaves = self.world.ends.setdefault((self.task, plan.epoch), proposal) == "leave"
        if leaves:
            self.world.left[self.task] = (plan.epoch, plan.store)
        return leaves

    def broke(self, token: object, text: str) -> None:
        is_late = self.late is not None and token is self.late.token
        if self.late is not None and is_late:
            self.late.broke = text

        def go_on() -> None:
            if token is None or token is not self.token:
                return
            inside = isinstance(self.action, INSIDE)
            if is_late:  # training/engine.py: members of this replica may wait for it
                inside = isinstance(self.action, do.Compute) and self.layout.replica_size > 1
            if self.in_store:
                assert self.machine is not None and self.newest is not None
                is_old = self.newest.epoch <= self.machine._newest()
                if isinstance(self.action, do.AwaitOthers) and (is_old or self._all_leave(self.action, "meet")):
                    self._done()  # where no newer plan broke the wait its store is gone, and nobody is waited for
                    return
                inside = inside and is_old
            reduced = self.memory.reduced if isinstance(self.action, do.Reduce) else -1
            self.run(on.Broken(inside, text, reduced, is_late))

        self._loop(0.0, go_on)
