"""The coordinator's process: the real machine, its journal, and crashes between journal, send and apply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unicron.agent.events import CoordinatorMessage
from unicron.coordinator import actions as ask
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.journal import decode_entry, encode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.sim.scheduler import Timers

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster

CONFIG = CoordinatorConfig(
    join_ms_max=20_000.0,
    ready_ms_max=5_000.0,
    joiner_ms_max=5_000.0,
    heal_ms_max=6_000.0,
    understudy_delay_ms=300.0,
    finish_ms_max=5_000.0,
    silence_ms_max=5_000.0,
    return_ms_max=5_000.0,
)


class CoordinatorHost:
    def __init__(self, world: Cluster) -> None:
        self.world = world
        self.rng = world.streams("coordinator")
        self.journal: list[bytes] = []  # the disk
        self.timers = Timers(world.scheduler, lambda name: self.feed(on.TimerFired(name)))
        self.alive = False
        self.crash_rate = 0.0  # per action
        self.num_crashes = 0
        self.machine = CoordinatorMachine(CONFIG, world.options.seed)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        self.machine = CoordinatorMachine(CONFIG, self.world.options.seed)
        now_ms = self.world.scheduler.now_ms
        for data in self.journal:
            self.machine.step(on.Replayed(decode_entry(data)), now_ms)
        self.world.checkers.replayed(self.machine, self.journal)
        self.alive = True
        self.world.log("coordinator", f"starts with {len(self.journal)} journal entries")
        self.feed(on.Started())

    def crash(self, down_ms: float, why: str) -> None:
        if not self.alive:
            return
        self.alive = False
        self.num_crashes += 1
        self.world.log("coordinator", f"crashes: {why}")
        self.timers.cancel_all()
        self.world.coordinator_died()
        self.world.scheduler.after(down_ms, self.start)

    # ------------------------------------------------------------ machine

    def hear(self, node: str, message: Any) -> None:
        self.feed(on.AgentMessage(node, message))

    def feed(self, event: on.Event) -> None:
        if not self.alive:
            return
        try:
            actions = self.machine.step(event, self.world.scheduler.now_ms)
        except AssertionError as error:
            self.world.violate(f"coordinator: {type(event).__name__}: {error}")
            return
        for action in actions:
            if self.crash_rate and self.rng.random() < self.crash_rate:
                self.crash(self.rng.uniform(50.0, 2_000.0), f"before {type(action).__name__}")
                return
            self._do(action)
        self.world.checkers.coordinator_stepped(self.machine)

    def _do(self, action: ask.Action) -> None:
        match action:
            case ask.WriteJournal():
                self.journal.append(encode_entry(action.entry))
                self.world.checkers.journaled(action.entry)
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
