"""A coordinator's process: the real machine, its journal, and crashes and standstills between any two actions.

Alone its journal is on a disk (disk.py); one of several decides as long as it leads, and journals to etcd (leading.py).
A step is: decide, journal, and when that is durable, send. While it waits for etcd, or stands still, messages wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unicron.agent.events import CoordinatorMessage
from unicron.coordinator import actions as ask
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.journal import JournalUnreadable, decode_entry, encode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.coordinator.nodes import turned_away
from unicron.messages import AgentHeartbeat, AgentHello
from unicron.sim import plants
from unicron.sim.clocks import Timers
from unicron.sim.disk import Disk, DiskFull
from unicron.sim.network import Connection

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster
    from unicron.sim.leading import Leading

CONFIG = CoordinatorConfig(
    join_ms_max=20_000.0,
    ready_ms_max=5_000.0,
    joiner_ms_max=5_000.0,
    heal_ms_max=6_000.0,
    understudy_delay_ms=300.0,
    plans_kept_max=4,
    finish_ms_max=5_000.0,
    silence_ms_max=5_000.0,
    return_ms_max=5_000.0,
    layout_ms_max=8_000.0,
)


class CoordinatorHost:
    def __init__(self, world: Cluster, name: str = "coordinator") -> None:
        self.world, self.name = world, name
        self.rng = world.streams(name)
        self.plant = world.options.plant
        self.disk = Disk(world.streams(f"{name}/disk"), reads_torn=self.plant == "read-torn")
        self.bounds = CONFIG
        self.config = plants.coordinator_config(self.plant, CONFIG)
        self.leading: Leading | None = None
        self.crash_rate = 0.0  # per action
        self.crash_in_write_ms = 0.0  # it dies in its next write, and is down for so long
        self.freeze_in_step_ms = 0.0  # it stands still before the next action it carries out, for so long
        self.num_crashes = 0
        self.lives = 0  # each reads the journal, and begins a term
        self._new_life()
        self.alive = False  # it decides

    def _new_life(self) -> None:
        self.lives += 1
        self.clock = self.world.new_clock(self.name)
        self.timers = Timers(self.world.scheduler, self.clock, lambda name: self._take(on.TimerFired(name)), self.gate)
        self.machine = CoordinatorMachine(self.config, self.world.options.seed)
        self.lines: dict[str, Connection] = {}  # node -> the connection whose hello was heard last
        self.inbox: deque[Callable[[], None]] = deque()
        self.stalled: list[Callable[[], None]] = []  # answers of etcd that came while it stood still
        self.is_busy = False  # waits for its journal
        self.frozen = False

    @property
    def life(self) -> tuple[str, int]:
        return self.name, self.lives

    @property
    def is_ready(self) -> bool:
        return self.alive and not self.is_busy and not self.frozen

    @property
    def journal(self) -> list[bytes]:
        return self.leading.etcd.entries if self.leading else self.disk.entries

    @property
    def is_newest(self) -> bool:
        """What is durable is its own history: nobody followed it."""
        return self.world.checkers.term_life == self.life

    # ------------------------------------------------------------ life

    def begin(self) -> None:
        """Its process starts: it decides at once, or waits to lead."""
        if self.leading is not None:
            self.leading.begin()
        else:
            self.start()

    def start(self) -> None:
        """Nobody else decides: with what is journaled."""
        self._new_life()
        now_ms = self.clock.now_ms
        self.alive = True
        self.world.log(self.name, f"starts with {len(self.journal)} journal entries")
        try:
            for data in plants.read_back(self.plant, self.journal):
                self.machine.step(on.Replayed(decode_entry(data)), now_ms)
        except JournalUnreadable as error:
            self.world.violate(f"the journal cannot be read: {error}")
            return
        self.world.checkers.replayed(self)
        self.feed(on.Started())

    def crash(self, down_ms: float, why: str) -> None:
        """Its process dies, whether it decides or waits."""
        if not (self.alive if self.leading is None else self.leading.is_up):
            return
        self.num_crashes += 1
        self.world.log(self.name, f"crashes: {why}")
        self._crash_disk()
        self.end_life()
        if self.leading is not None:
            self.leading.die()
        self.world.scheduler.after(down_ms, self.begin)

    def _crash_disk(self) -> None:
        survived, lost = self.disk.crash()
        try:
            for data in survived:  # whole on the disk, and nobody was told
                self.world.checkers.journaled(decode_entry(data), self)
        except JournalUnreadable as error:
            self.world.violate(f"the journal cannot be read: {error}")
        if survived or lost:
            self.world.log(self.name, f"{lost} journal entries were not synced and are lost, {len(survived)} are not")

    def end_life(self) -> None:
        """It decides no more; its lines end."""
        self.alive = self.is_busy = self.frozen = False
        self.crash_in_write_ms = self.freeze_in_step_ms = 0.0
        self.timers.cancel_all()
        self.inbox.clear()
        self.stalled.clear()
        self.lines.clear()
        self.world.coordinator_ended(self)

    def freeze(self, lasts_ms: float) -> None:
        """The whole process stands still: no answer, nothing said, nothing forgotten."""
        if self.frozen:
            return
        self.frozen = True
        self.world.log(self.name, f"stands still for {lasts_ms:.0f} ms")
        self.world.watch_coordinator(self)
        life = self.lives
        self.world.scheduler.after(lasts_ms, lambda: self._thaw(life))

    def _thaw(self, life: int) -> None:
        if self.frozen and life == self.lives:
            self.frozen = False
            self.world.log(self.name, "goes on")
            stalled, self.stalled = self.stalled, []
            for call in stalled:
                call()
            self.drain()

    def gate(self, call: Callable[[], None]) -> None:
        """What happens in this process: later when it stands still or waits for its journal."""
        if self.frozen or self.is_busy or self.inbox:
            self.inbox.append(call)
        else:
            call()

    def drain(self) -> None:
        while self.inbox and not self.frozen and not self.is_busy:
            self.inbox.popleft()()

    # ------------------------------------------------------------ machine

    def hear(self, connection: Connection, node: str, message: Any) -> None:
        self.gate(partial(self._heard, connection, node, message))

    def _heard(self, connection: Connection, node: str, message: Any) -> None:
        """runtime/peers.py: a node's line is the one whose hello came last; an older life of a node gets none."""
        known = self.machine.state.nodes.get(node)
        if isinstance(message, AgentHello):
            if known is None or message.incarnation >= known.incarnation or self.plant == "old-line":
                self.lines[node] = connection
            else:
                self._turn_away(connection, message)
        elif self.lines.get(node) is not connection:
            if isinstance(message, AgentHeartbeat):
                self._turn_away(connection, message)
            return
        self._take(on.AgentMessage(node, message))

    def _turn_away(self, connection: Connection, message: AgentHello | AgentHeartbeat) -> None:
        """runtime/coordinator_process.py"""
        term, life = self.machine.state.term, self.life
        for order in turned_away(self.machine.state, message):
            self.world.count("turned_away")
            connection.send("down", lambda m: connection.agent.hear_order(CoordinatorMessage(m), term, life), order)

    def line_ended(self, node: str, connection: Connection) -> None:
        def learn() -> None:
            if self.lines.get(node) is connection:
                del self.lines[node]
                self._take(on.AgentDisconnected(node))

        if self.alive:
            self.gate(learn)

    def feed(self, event: on.Event) -> None:
        if self.alive:
            self.gate(lambda: self._take(event))

    def _take(self, event: on.Event) -> None:
        if not self.alive or not self._may_act():
            return
        try:
            actions = self.machine.step(event, self.clock.now_ms)
        except Exception as error:  # the production host crashes and replays
            self.world.violate(f"coordinator: {type(event).__name__}: {error!r}")
            return
        self.world.cover_coordinator(self.machine.state, event)
        plants.tamper(self.plant, self.machine.state)
        first, then = plants.ordered(self.plant, actions)
        for action in first:
            self._do(action)
        entries = [
            encode_entry(a.entry) for a in actions
            if isinstance(a, ask.WriteJournal) and not plants.forgets(self.plant, a.entry)
        ]  # fmt: skip
        self._journal_then(entries, partial(self._carry_out, deque(then)))

    def _may_act(self) -> bool:
        """Before anything is done: its lease may have run out."""
        return self.leading is None or self.leading.require()

    def _journal_then(self, entries: list[bytes], then: Callable[[], None]) -> None:
        """runtime/coordinator_process.py: one transaction a step, durable before anything of the step goes out."""
        if self.leading is not None and entries:
            self.leading.append(entries, then)
            return
        try:
            for number, data in enumerate(entries, 1):
                is_last = number == len(entries)
                self.disk.write(data, self.world.scheduler.now_ms, commits=is_last)
                planned_ms = self.crash_in_write_ms if is_last or self.rng.random() < 0.5 else 0.0
                if self._dies_now(f"in writing entry {number} of {len(entries)}", planned_ms):
                    return
        except DiskFull:
            self.crash(self.rng.uniform(50.0, 1_000.0), "its disk is full (exit code 74)")
            return
        if self.disk.open and not plants.is_unsynced(self.plant, self.rng):
            durable = list(self.disk.open)
            self.disk.sync()
            for data in durable:
                self.world.checkers.journaled(decode_entry(data), self)
        then()

    def _dies_now(self, why: str, planned_ms: float = 0.0) -> bool:
        if planned_ms:
            self.crash(planned_ms, why)
            return True
        if self.crash_rate and self.rng.random() < self.crash_rate:
            self.crash(self.rng.uniform(50.0, 2_000.0), why)
            return True
        return False

    def _carry_out(self, actions: deque[ask.Action], *, is_sure: bool = False) -> None:
        """is_sure: it looked whether it may act, and then stood still."""
        while actions:
            goes_out = isinstance(actions[0], (ask.SendAgent, ask.Answer))
            if goes_out and not is_sure and not self._may_act():
                return
            if goes_out and self.freeze_in_step_ms:
                self.inbox.appendleft(partial(self._carry_out, actions, is_sure=True))
                lasts_ms, self.freeze_in_step_ms = self.freeze_in_step_ms, 0.0
                self.freeze(lasts_ms)
                return
            is_sure = False
            if self._dies_now(f"before {type(actions[0]).__name__}"):
                return
            self._do(actions.popleft())
        self.world.checkers.coordinator_stepped(self)

    def _do(self, action: ask.Action) -> None:
        match action:
            case ask.SendAgent():
                self._send(action)
            case ask.SetTimer():
                self.timers.set(action.name, action.at_ms)
            case ask.CancelTimer():
                self.timers.cancel(action.name)
            case ask.ProbeAgent():
                self.world.probe(self, action.node)
            case ask.RecordIncident():
                if self.is_newest:  # one that stood still after its write tells it late, which is in nobody's journal
                    self.world.checkers.incident(action.incident)
            case ask.Refused():
                self.world.count(f"refused:{action.name}")
                self.world.log(self.name, f"refused {action.name}: {action.reason}")
            case ask.Answer():
                self.world.answers[action.request_id] = action.reply
            case ask.WriteJournal():
                pass

    def _send(self, action: ask.SendAgent) -> None:
        line = self.lines.get(action.node)
        if line is None or plants.is_lost(self.plant, action):
            return
        self.world.checkers.sent(action.message, self, line)
        self.world.log(self.name, f"-> {action.node} {_short(action.message)}: {action.reason}")
        term, life = self.machine.state.term, self.life
        line.send("down", lambda m: line.agent.hear_order(CoordinatorMessage(m), term, life), action.message)


def _short(message: Any) -> str:
    name = type(message).__name__
    if name == "PublishEpoch":
        plan = message.plan
        touched = list(plan.touched)
        return f"epoch {plan.epoch} {plan.kind} replicas {list(plan.replicas)} touched {touched}"
    if name == "EndWorker":
        return f"EndWorker {message.worker}"
    if name == "StartWorkers":
        return f"StartWorkers {[(w[0], w[2], w[3]) for w in message.workers]}"
    return name
