"""The simulated world: one coordinator, a node for each replica, connections, one task; and a log that is its history."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from unicron.agent.events import CoordinatorConnected, CoordinatorDisconnected
from unicron.coordinator.events import AgentDisconnected, AgentProbed, TaskSubmitted
from unicron.coordinator.job import Job
from unicron.coordinator.state import TaskState
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.messages import Reply
from unicron.sim.agent_host import AgentHost
from unicron.sim.checkers import Checkers
from unicron.sim.coordinator_host import CoordinatorHost
from unicron.sim.groups import Group, Store, Waiter
from unicron.sim.network import Connection
from unicron.sim.scheduler import Scheduler, Streams
from unicron.sim.worker import SimWorker
from unicron.types import Layout, Rank

TASK = "task"


@dataclass
class Options:
    """Drawn from the seed (run.py), or given."""

    seed: int
    layout: Layout = field(default_factory=Layout)
    iterations: int = 1_000_000
    checkpoint_every: int = 0
    stopped_grace_ms: int = 0
    delay_ms: tuple[float, float] = (0.1, 1.0)
    twice: float = 0.0  # a message of an agent arrives twice
    num_faults: int = 3
    faults_ms: float = 4_000.0  # length of the phase in which faults happen
    crash_rate: float = 0.0
    plant: str = ""
    keep_log: bool = False


class Cluster:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.scheduler = Scheduler()
        self.streams = Streams(options.seed)
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        self.answers: dict[str, Reply] = {}
        self.lines: list[str] = []
        self._digest = hashlib.sha256()
        self.checkers = Checkers(self)
        self.coordinator = CoordinatorHost(self)
        self.hosts: dict[str, AgentHost] = {}
        self.partitioned: dict[str, float] = {}  # node -> until
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

    # ------------------------------------------------------------ start

    def start(self) -> None:
        self.coordinator.start()
        for index in range(self.options.layout.dp):
            self.start_node(f"n{index}", 1)
        self.scheduler.after(20.0, self._submit)

    def _submit(self) -> None:
        options = self.options
        job = Job(
            name=TASK,
            command=("train.py",),
            layout=options.layout,
            stopped_grace_ms=options.stopped_grace_ms,
            checkpoint_dir="ckpt",
            checkpoint_every=options.checkpoint_every,
            restart_max=1_000,
        )
        self.coordinator.feed(TaskSubmitted("submit", job))
        answer = self.answers.get("submit")
        if answer is None or not answer.ok:  # its nodes have not all said hello
            self.scheduler.after(20.0, self._submit)

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
        if not self.coordinator.alive or self.is_partitioned(host.node):
            self._connect_later(host, self._rng.uniform(20.0, 80.0))
            return
        options = self.options
        host.connection = Connection(self.scheduler, self._rng, options.delay_ms, options.twice)
        host.feed(CoordinatorConnected())

    def is_partitioned(self, node: str) -> bool:
        return self.partitioned.get(node, -1.0) > self.scheduler.now_ms

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

        self.scheduler.after(self._rng.uniform(0.2, 20.0), agent_learns)
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

    def _learner(self, host: AgentHost):  # type: ignore[no-untyped-def]
        def learn() -> None:
            host.feed(CoordinatorDisconnected())
            self._connect_later(host, self._rng.uniform(1.0, 60.0))

        return learn

    def probe(self, node: str) -> None:
        if self.is_partitioned(node):
            self.scheduler.after(200.0, lambda: self.coordinator.feed(AgentProbed(node, "unknown")))
            return
        answer = "alive" if self.hosts[node].alive else "gone"
        delay_ms = self._rng.uniform(0.3, 2.0)
        self.scheduler.after(delay_ms, lambda: self.coordinator.feed(AgentProbed(node, answer)))  # type: ignore[arg-type]

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

    def members(self) -> list[SimWorker]:
        """Live holders of roles in the coordinator's plan."""
        task = self.task()
        if task is None or task.plan is None:
            return []
        found = [self.worker(m.worker) for m in task.plan.members]
        return [w for w in found if w is not None and w.alive]

    def is_whole(self) -> bool:
        """Full width, nobody missing, nothing open."""
        task = self.task()
        state = self.coordinator.machine.state
        return (
            self.coordinator.alive
            and task is not None
            and task.phase is TaskPhase.RUNNING
            and task.plan is not None
            and len(task.plan.replicas) == self.options.layout.dp
            and not task.lost
            and not task.reports
            and all(n.phase is NodePhase.UP for n in state.nodes.values())
            and len(self.members()) == self.options.layout.world_size
        )
