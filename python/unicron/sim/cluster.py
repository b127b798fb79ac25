"""The simulated world: one coordinator, nodes, connections, one task or several; and a log that is its history."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from unicron.agent.events import CoordinatorConnected, CoordinatorDisconnected
from unicron.agent.machine import AgentMachine
from unicron.coordinator.deciding import facts_of, is_due
from unicron.coordinator.events import AgentDisconnected, AgentProbed, TaskSubmitted
from unicron.coordinator.state import State, TaskState
from unicron.coordinator.transitions import TERMINAL, NodePhase, TaskPhase
from unicron.messages import Reply
from unicron.sim.agent_host import AgentHost
from unicron.sim.checkers import Checkers
from unicron.sim.clocks import Clock
from unicron.sim.coordinator_host import CoordinatorHost
from unicron.sim.groups import Group, Store, Waiter
from unicron.sim.network import Connection, Link
from unicron.sim.options import TASK, Options, TaskOptions
from unicron.sim.scheduler import Scheduler, Streams
from unicron.sim.worker import SimWorker
from unicron.types import Rank

TRANSPORT_SILENCE_MS = (2_000.0, 2_600.0)  # runtime/coordinator_link.py: ZeroMQ's heartbeats


class Cluster:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.scheduler = Scheduler()
        self.streams = Streams(options.seed)
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, Reply] = {}
        self.lines: list[str] = []
        self.coverage: set[tuple[Any, ...]] = set()  # what was seen: (machine, phase, event), (machine, from, to)
        self._phases: dict[tuple[str, str], Any] = {}
        self._clocks: Counter[str] = Counter()
        self.links: dict[str, Link] = {}
        self._digest = hashlib.sha256()
        self.checkers = Checkers(self)
        self.coordinator = CoordinatorHost(self)
        self.hosts: dict[str, AgentHost] = {}
        self.partitioned: dict[str, float] = {}  # node -> until
        self.parts: dict[tuple[str, int, int], set[Rank]] = {}  # (task, epoch, iteration) -> whose part is saved
        self._groups: dict[tuple[str, tuple[Rank, ...]], Group] = {}
        self._rng = self.streams("network")

    # ------------------------------------------------------------ history

    def log(self, who: str, what: str) -> None:
        line = f"{self.scheduler.now_ms:11.3f}  {who:<12} {what}"
        self._digest.update(line.encode())
        if self.options.keep_log:
            self.lines.append(line)

    def digest(self) -> str:
        return self._digest.hexdigest()

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def violate(self, what: str) -> None:
        self.log("VIOLATION", what)
        self.violations.append(f"at {self.scheduler.now_ms:.3f} ms: {what}")

    def cover(self, what: tuple[Any, ...]) -> None:
        self.coverage.add(what)

    def cover_coordinator(self, state: State, event: Any) -> None:
        message = getattr(event, "message", event)
        kind = type(getattr(message, "body", message))
        for task in state.tasks.values():
            self._moved("task", task.name, task.phase, kind)
        for node in state.nodes.values():
            self._moved("node", node.name, node.phase, kind)

    def cover_agent(self, machine: AgentMachine, event: Any) -> None:
        for worker in machine.state.workers.values():
            self._moved("worker", worker.name, worker.phase, type(event))

    def _moved(self, what: str, name: str, phase: Any, event: type) -> None:
        before = self._phases.get((what, name))
        if before is not phase:
            self._phases[what, name] = phase
            if before is not None:
                self.coverage.add((what, before, phase))
        self.coverage.add((what, phase, event))

    # ------------------------------------------------------------ start

    def start(self) -> None:
        self.coordinator.start()
        for index in range(self.options.num_nodes):
            self.start_node(f"n{index}", 1)
        for task in self.options.tasks:
            self.scheduler.after(task.at_ms, partial(self._submit, task))

    def _submit(self, task: TaskOptions) -> None:
        request = f"submit {task.name}"
        if self.coordinator.alive and task.name in self.coordinator.machine.state.tasks:
            return  # it was admitted, and the coordinator crashed before it could say so
        if self.coordinator.alive:
            self.coordinator.feed(TaskSubmitted(request, task.job(self.options.stopped_grace_ms)))
        answer = self.answers.get(request)
        if answer is None or not answer.ok:  # its nodes have not all said hello, or nobody listens
            self.scheduler.after(20.0, partial(self._submit, task))

    def start_node(self, node: str, incarnation: int) -> None:
        self.log(node, f"agent starts, incarnation {incarnation}")
        self.hosts[node] = AgentHost(self, node, incarnation)
        self._connect_later(self.hosts[node], 1.0)

    # ------------------------------------------------------------ network

    def _connect_later(self, host: AgentHost, delay_ms: float) -> None:
        self.scheduler.after(delay_ms, lambda: self._connect(host))

    def _connect(self, host: AgentHost) -> None:
        if not host.alive or host.connection is not None:
            return
        if host.frozen is not None:
            host.frozen.append(lambda: self._connect_later(host, 1.0))
            return
        if not self.coordinator.alive or self.is_partitioned(host.node):
            self._connect_later(host, self._rng.uniform(20.0, 80.0))
            return
        options = self.options
        host.connection = Connection(self.scheduler, self._rng, self.link(host.node), options.delay_ms, options.twice)
        host.feed(CoordinatorConnected())

    def watch(self, node: str) -> None:
        """The transport's own heartbeats: a connection that carries nothing one way for so long is ended, unless only
        the agent's loop stands still: its transport answers."""
        host = self.hosts[node]
        suspected = host.connection

        def look() -> None:
            is_silent = self.link(node).is_blocked(self.scheduler.now_ms) or host.is_paused
            if is_silent and host.alive and suspected is not None and host.connection is suspected:
                self.disconnect(node)

        self.scheduler.after(self._rng.uniform(*TRANSPORT_SILENCE_MS), look)

    def is_partitioned(self, node: str) -> bool:
        now_ms = self.scheduler.now_ms
        return self.partitioned.get(node, -1.0) > now_ms or self.link(node).is_blocked(now_ms)

    def link(self, node: str) -> Link:
        return self.links.setdefault(node, Link())

    def new_clock(self, whose: str) -> Clock:
        """Of one life of a daemon: it begins anywhere."""
        self._clocks[whose] += 1
        rng = self.streams(f"clock/{whose}/{self._clocks[whose]}")
        drift = self.options.drift
        return Clock(self.scheduler, rng.uniform(0.0, 1e7), 1.0 + rng.uniform(-drift, drift))

    def disconnect(self, node: str) -> None:
        """The connection ends; both ends learn of it, each in its own time."""
        host = self.hosts[node]
        if host.connection is None:
            return
        ended = host.connection
        ended.end()

        def agent_learns() -> None:
            if host.connection is ended:
                host.connection = None
                host.feed(CoordinatorDisconnected())
                self._connect_later(host, self._rng.uniform(1.0, 60.0))

        self.scheduler.after(self._rng.uniform(0.2, 20.0), lambda: host.gate(agent_learns))
        self.scheduler.after(self._rng.uniform(0.2, 20.0), lambda: self._tell_ended(host, ended))

    def _tell_ended(self, host: AgentHost, ended: Connection) -> None:
        """Not when a newer connection of the node is there already: the transport knows them apart."""
        now = self.hosts[host.node].connection
        if now is None or now is ended:
            self.coordinator.feed(AgentDisconnected(host.node))

    def coordinator_died(self) -> None:
        for host in self.hosts.values():
            ended = host.connection
            if ended is not None:
                ended.end()
                host.connection = None
                self.scheduler.after(self._rng.uniform(0.2, 5.0), self._learner(host))

    def _learner(self, host: AgentHost) -> Callable[[], None]:
        def learn() -> None:
            host.feed(CoordinatorDisconnected())
            self._connect_later(host, self._rng.uniform(1.0, 60.0))

        return learn

    def probe(self, node: str) -> None:
        if self.is_partitioned(node) or self.hosts[node].is_paused:
            self.scheduler.after(200.0, lambda: self.coordinator.feed(AgentProbed(node, "unknown")))
            return
        answer: Literal["alive", "gone"] = "alive" if self.hosts[node].alive else "gone"
        delay_ms = self._rng.uniform(0.3, 2.0)
        self.scheduler.after(delay_ms, lambda: self.coordinator.feed(AgentProbed(node, answer)))

    def store_at(self, endpoint: str) -> Store:
        node = endpoint.removeprefix("tcp://").partition(":")[0]
        return self.hosts[node].store

    def group(self, name: str, members: dict[Rank, Waiter]) -> Group:
        """The same object for all who built it from the same members."""
        key = (name, tuple(sorted(members)))
        if key not in self._groups:
            self._groups[key] = Group(self.scheduler, self._rng, name, dict(members))
        return self._groups[key]

    # ------------------------------------------------------------ nodes

    def kill_node(self, node: str, back_ms: float) -> None:
        host = self.hosts[node]
        if not host.alive:
            return
        self.log(node, "agent and all its workers die")
        host.die()
        if host.connection is not None:
            ended, host.connection = host.connection, None
            ended.end()
            delay_ms = self._rng.uniform(0.3, 5.0)
            self.scheduler.after(delay_ms, lambda: self._tell_ended(host, ended))
        incarnation = host.incarnation + 1
        self.scheduler.after(back_ms, lambda: self.start_node(node, incarnation))

    # ------------------------------------------------------------ views

    def task(self) -> TaskState | None:
        return self.coordinator.machine.state.tasks.get(TASK)

    def worker(self, name: str) -> SimWorker | None:
        node = name.partition(".")[0]
        return self.hosts[node].workers.get(name)

    def tasks(self) -> list[TaskState]:
        return list(self.coordinator.machine.state.tasks.values())

    def members(self) -> list[SimWorker]:
        """Live holders of roles in the coordinator's plans."""
        return [worker for task in self.tasks() for worker in self.members_of(task)]

    def members_of(self, task: TaskState) -> list[SimWorker]:
        found = [self.worker(m.worker) for m in task.plan.members] if task.plan else []
        return [w for w in found if w is not None and w.alive]

    def is_whole(self) -> bool:
        """Every task is what was decided, nobody is missing, nothing is open."""
        state = self.coordinator.machine.state
        return (
            self.coordinator.alive
            and len(state.tasks) == len(self.options.tasks)
            and not is_due(state, facts_of(state))
            and all(n.phase is NodePhase.UP for n in state.nodes.values())
            and all(self._is_settled(task) for task in state.tasks.values())
        )

    def _is_settled(self, task: TaskState) -> bool:
        target = self.coordinator.machine.state.target(task.name)
        if task.phase in (*TERMINAL, TaskPhase.WAITING, TaskPhase.SUSPENDED):
            return not target
        if task.phase is not TaskPhase.RUNNING or task.plan is None:
            return False
        placed = {m.rank: m.node for m in task.plan.members}
        is_open = task.lost or task.reports or task.leaving
        return placed == target and not is_open and len(self.members_of(task)) == len(placed)
