"""The simulated world: one coordinator or several, nodes, connections, tasks; and a log that is its history."""

from __future__ import annotations

import hashlib
from collections import Counter
from functools import partial
from typing import Any, Literal

from unicron.agent.events import CoordinatorConnected, CoordinatorDisconnected
from unicron.agent.machine import AgentMachine
from unicron.coordinator.deciding import facts_of, is_due
from unicron.coordinator.events import AgentProbed, TaskSubmitted
from unicron.coordinator.state import State, TaskState
from unicron.coordinator.transitions import TERMINAL, NodePhase, TaskPhase
from unicron.messages import Reply
from unicron.sim.agent_host import AgentHost
from unicron.sim.checkers import Checkers
from unicron.sim.clocks import Clock
from unicron.sim.coordinator_host import CoordinatorHost
from unicron.sim.etcd import Etcd, Line
from unicron.sim.groups import Group, Store, Waiter
from unicron.sim.leading import LEASE_MS, Leading
from unicron.sim.network import Connection, Link
from unicron.sim.options import TASK, Options, TaskOptions
from unicron.sim.scheduler import Scheduler, Streams
from unicron.sim.worker import SimWorker
from unicron.types import Member, Rank

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
        self.links: dict[tuple[str, str], Link] = {}
        self._digest = hashlib.sha256()
        self.checkers = Checkers(self)
        self.etcd = Etcd(self, LEASE_MS)
        self.coordinators = self._make_coordinators()
        self._decider = self.coordinators[0]
        self.hosts: dict[str, AgentHost] = {}
        self.ghosts: list[AgentHost] = []  # older lives of nodes that stood still while newer ones began
        self.partitioned: dict[str, float] = {}  # node -> until
        self.ends: dict[tuple[str, int], str] = {}  # (task, epoch) -> what all do who are through with the loop
        self.left: dict[str, tuple[int, str]] = {}  # task -> epoch in which all left their loops, store that knows it
        self.met: dict[str, int] = {}  # task -> newest epoch in which all met
        self.parts: dict[tuple[str, int, int], set[Rank]] = {}  # (task, epoch, iteration) -> whose part is saved
        # Who came to a change of layout, and with which iteration: (task, epoch, members) -> worker -> iteration.
        self.layouts: dict[tuple[str, int, int, tuple[Member, ...]], dict[str, int]] = {}
        self._groups: dict[tuple[str, tuple[Rank, ...]], Group] = {}
        self._rng = self.streams("network")

    def _make_coordinators(self) -> list[CoordinatorHost]:
        if self.options.coordinators == 1:
            return [CoordinatorHost(self)]
        hosts = [CoordinatorHost(self, f"c{number}") for number in range(self.options.coordinators)]
        for host in hosts:
            host.leading = Leading(host, self.etcd, Line(self, host.name, self.options.delay_ms))
        return hosts

    @property
    def coordinator(self) -> CoordinatorHost:
        """Who decides: of several that believe so the one of the newest term; else who did last."""
        deciding = [c for c in self.coordinators if c.alive and c.machine.state.is_started]
        if deciding:
            self._decider = max(deciding, key=lambda c: c.machine.state.term)
        return self._decider

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
        for coordinator in self.coordinators:
            coordinator.begin()
        for index in range(self.options.num_nodes):
            self.start_node(f"n{index}", 1)
        for task in self.options.tasks:
            self.scheduler.after(task.at_ms, partial(self._submit, task))

    def _submit(self, task: TaskOptions) -> None:
        request = f"submit {task.name}"
        if task.name in self.checkers.admitted:
            return  # and the coordinator crashed, perhaps, before it could say so
        if self.coordinator.is_ready:
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
        heard_by = [c for c in self.coordinators if c.alive and not c.frozen and not self.is_partitioned(host.node, c)]
        if not heard_by:
            self._connect_later(host, self._rng.uniform(20.0, 80.0))
            return
        options = self.options
        peer = heard_by[0] if len(heard_by) == 1 else self._rng.choice(heard_by)
        link = self.link(host.node, peer)
        host.connection = Connection(
            self.scheduler, self._rng, link, options.delay_ms, options.twice, host, peer
        )  # fmt: skip
        host.feed(CoordinatorConnected())

    def watch(self, host: AgentHost) -> None:
        """The transport's own heartbeats: a connection that carries nothing one way for so long is ended, unless only
        the agent's loop stands still: its transport answers."""
        suspected = host.connection
        if suspected is None:
            return
        life = suspected.peer.life

        def look() -> None:
            is_frozen = suspected.peer.frozen and suspected.peer.life == life
            is_silent = suspected.link.is_blocked(self.scheduler.now_ms) or host.is_paused or is_frozen
            if is_silent and host.alive and host.connection is suspected:
                self.disconnect(host)

        self.scheduler.after(self._rng.uniform(*TRANSPORT_SILENCE_MS), look)

    def watch_coordinator(self, coordinator: CoordinatorHost) -> None:
        for host in self.agents():
            if host.connection is not None and host.connection.peer is coordinator:
                self.watch(host)

    def is_partitioned(self, node: str, coordinator: CoordinatorHost) -> bool:
        now_ms = self.scheduler.now_ms
        return self.partitioned.get(node, -1.0) > now_ms or self.link(node, coordinator).is_blocked(now_ms)

    def link(self, node: str, coordinator: CoordinatorHost) -> Link:
        return self.links.setdefault((node, coordinator.name), Link())

    def new_clock(self, whose: str) -> Clock:
        """Of one life of a daemon: it begins anywhere."""
        self._clocks[whose] += 1
        rng = self.streams(f"clock/{whose}/{self._clocks[whose]}")
        drift = self.options.drift
        return Clock(self.scheduler, rng.uniform(0.0, 1e7), 1.0 + rng.uniform(-drift, drift))

    def disconnect(self, host: AgentHost) -> None:
        """The connection ends; both ends learn of it, each in its own time."""
        ended = host.connection
        if ended is None:
            return
        ended.end()
        self._agent_learns(host, ended, 20.0)
        self._tell_ended(host.node, ended, 20.0)

    def _agent_learns(self, host: AgentHost, ended: Connection, within_ms: float) -> None:
        def learn() -> None:
            if host.connection is ended:
                ended.end()
                host.connection = None
                host.feed(CoordinatorDisconnected())
                self._connect_later(host, self._rng.uniform(1.0, 60.0))

        self.scheduler.after(self._rng.uniform(0.2, within_ms), lambda: host.gate(learn))

    def _tell_ended(self, node: str, ended: Connection, within_ms: float) -> None:
        delay_ms = self._rng.uniform(0.2, within_ms)
        self.scheduler.after(delay_ms, lambda: ended.peer.line_ended(node, ended))

    def coordinator_ended(self, coordinator: CoordinatorHost) -> None:
        """It listens no more."""
        for host in self.agents():
            ended = host.connection
            if ended is not None and ended.peer is coordinator:
                ended.end_at_peer()
                self._agent_learns(host, ended, 5.0)

    def leave(self, host: AgentHost) -> None:
        """The agent ends its line, and calls all coordinators again."""
        ended = host.connection
        if ended is not None:
            ended.end()
            host.connection = None
            self._tell_ended(host.node, ended, 20.0)
            host.feed(CoordinatorDisconnected())
            self._connect_later(host, self._rng.uniform(1.0, 60.0))

    def probe(self, coordinator: CoordinatorHost, node: str) -> None:
        host, life = self.hosts[node], coordinator.life

        def answer(what: Literal["alive", "gone", "unknown"]) -> None:
            if coordinator.life == life:
                coordinator.feed(AgentProbed(node, what))

        if self.is_partitioned(node, coordinator) or host.is_paused:
            self.scheduler.after(200.0, lambda: answer("unknown"))
            return
        found: Literal["alive", "gone"] = "alive" if host.alive else "gone"
        self.scheduler.after(self._rng.uniform(0.3, 2.0), lambda: answer(found))

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
            self._tell_ended(node, ended, 5.0)
        incarnation = host.incarnation + 1
        self.scheduler.after(back_ms, lambda: self.start_node(node, incarnation))

    def replace_node(self, node: str, thawed_ms: float, ends_ms: float) -> None:
        """Its machine stands still, and is started anew elsewhere; then the old one goes on, in its old life, until
        somebody ends it."""
        old = self.hosts[node]
        old.freeze(whole=True)
        for worker in old.workers.values():
            worker.faults.append("freeze")
        self.watch(old)
        self.ghosts.append(old)
        old.end_store()
        self.start_node(node, old.incarnation + 1)
        self.scheduler.after(thawed_ms, old.thaw)
        self.scheduler.after(thawed_ms + ends_ms, lambda: self._end_ghost(old))

    def _end_ghost(self, ghost: AgentHost) -> None:
        self.log(ghost.node, f"incarnation {ghost.incarnation} is ended")
        ghost.die()
        if ghost.connection is not None:
            ended, ghost.connection = ghost.connection, None
            ended.end()
            self._tell_ended(ghost.node, ended, 5.0)

    def agents(self) -> list[AgentHost]:
        return [*self.hosts.values(), *(g for g in self.ghosts if g.alive)]

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
            and not self.strangers()
        )

    def strangers(self) -> list[str]:
        """Processes on the nodes of which the coordinator does not know: nobody would ever end them."""
        known = {name for task in self.tasks() for name in task.workers}
        return [w.name for h in self.hosts.values() for w in h.workers.values() if w.alive and w.name not in known]

    def _is_settled(self, task: TaskState) -> bool:
        target = self.coordinator.machine.state.target(task.name)
        if task.phase in (*TERMINAL, TaskPhase.WAITING, TaskPhase.SUSPENDED):
            return not target
        if task.phase is not TaskPhase.RUNNING or task.plan is None:
            return False
        placed = {m.rank: m.node for m in task.plan.members}
        changes = task.name in self.coordinator.machine.state.allocation.layouts
        is_open = bool(task.lost or task.reports or task.leaving or task.guests) or changes
        return placed == target and not is_open and len(self.members_of(task)) == len(placed)
