"""The coordinator's process: the real machine, its journal, and crashes between journal, send and apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unicron.agent.events import CoordinatorMessage
from unicron.coordinator import actions as ask
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.journal import decode_entry, encode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.sim import plants
from unicron.sim.clocks import Timers
from unicron.sim.disk import Disk, DiskFull

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster

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
)


class CoordinatorHost:
    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.rng = world.streams("coordinator")
        self.disk = Disk()
        self.clock = world.new_clock("coordinator")
        self.timers = Timers(world.scheduler, self.clock, lambda name: self.feed(on.TimerFired(name)))
        self.alive = False
        self.crash_rate = 0.0  # per action
        self.num_crashes = 0
        self.bounds = CONFIG
        self.config = plants.coordinator_config(world.options.plant, CONFIG)
        self.machine = CoordinatorMachine(self.config, world.options.seed)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self.clock = self.world.new_clock("coordinator")
        self.timers = Timers(self.world.scheduler, self.clock, lambda name: self.feed(on.TimerFired(name)))
        self.machine = CoordinatorMachine(self.config, self.world.options.seed)
        now_ms = self.clock.now_ms
        for data in plants.read_back(self.world.options.plant, self.journal):
            self.machine.step(on.Replayed(decode_entry(data)), now_ms)
        self.world.checkers.replayed(self.machine)
        self.alive = True
        self.world.log("coordinator", f"starts with {len(self.journal)} journal entries")
        self.feed(on.Started())

    @property
    def journal(self) -> list[bytes]:
        return self.disk.entries

    def crash(self, down_ms: float, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self.num_crashes += 1
        self.world.log("coordinator", f"crashes: {why}")
        self.timers.cancel_all()
        if lost := self.disk.crash():
            self.world.log("coordinator", f"{lost} journal entries were not synced")
        self.world.coordinator_died()
        self.world.scheduler.after(down_ms, self.start)

    # ------------------------------------------------------------ machine

    def hear(self, node: str, message: Any) -> None:
        self.feed(on.AgentMessage(node, message))

    def feed(self, event: on.Event) -> None:
        if not self.alive:
            return
        try:
            actions = self.machine.step(event, self.clock.now_ms)
        except AssertionError as error:
            self.world.violate(f"coordinator: {type(event).__name__}: {error}")
            return
        self.world.cover_coordinator(self.machine.state, event)
        plants.tamper(self.world.options.plant, self.machine.state)
        for action in plants.ordered(self.world.options.plant, actions):
            if self.crash_rate and self.rng.random() < self.crash_rate:
                self.crash(self.rng.uniform(50.0, 2_000.0), f"before {type(action).__name__}")
                return
            try:
                self._durable_before(action)
                self._do(action)
            except DiskFull:
                self.crash(self.rng.uniform(50.0, 1_000.0), "its disk is full (exit code 74)")
                return
        self._sync()
        self.world.checkers.coordinator_stepped(self.machine)

    def _durable_before(self, action: ask.Action) -> None:
        """One transaction a step: what it wrote is synced before anything of the step goes out."""
        if not isinstance(action, ask.WriteJournal):
            self._sync()

    def _sync(self) -> None:
        if self.disk.open and not plants.is_unsynced(self.world.options.plant, self.rng):
            entries = [decode_entry(data) for data in self.disk.open]
            self.disk.sync()
            for entry in entries:
                self.world.checkers.journaled(entry)

    def _do(self, action: ask.Action) -> None:
        match action:
            case ask.WriteJournal():
                if not plants.forgets(self.world.options.plant, action.entry):
                    self.disk.write(encode_entry(action.entry), self.world.scheduler.now_ms)
            case ask.SendAgent():
                self._send(action)
            case ask.SetTimer():
                self.timers.set(action.name, action.at_ms)
            case ask.CancelTimer():
                self.timers.cancel(action.name)
            case ask.ProbeAgent():
                self.world.probe(action.node)
            case ask.RecordIncident():
                self.world.checkers.incident(action.incident)
            case ask.Refused():
                self.world.count(f"refused:{action.name}")
                self.world.log("coordinator", f"refused {action.name}: {action.reason}")
            case ask.Answer():
                self.world.answers[action.request_id] = action.reply

    def _send(self, action: ask.SendAgent) -> None:
        host = self.world.hosts.get(action.node)
        if plants.is_lost(self.world.options.plant, action):
            return
        self.world.checkers.sent(action.message)
        self.world.log("coordinator", f"-> {action.node} {_short(action.message)}: {action.reason}")
        if host is not None and host.connection is not None:
            host.connection.send("down", lambda m: host.feed(CoordinatorMessage(m)), action.message)


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
