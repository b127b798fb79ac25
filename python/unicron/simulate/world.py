"""One history under one policy: who holds which node, who stands still and why, and the sums.

A policy only says what happens to tasks; time, nodes and accounts are kept here. Between two events nothing changes
but pauses running out, so a history of any length costs its number of events.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unicron.simulate.account import Account, Downtime
from unicron.simulate.history import History, Kind
from unicron.simulate.tasks import SimTask

if TYPE_CHECKING:
    from unicron.simulate.policies.policy import Policy

FREE, STANDBY, DOWN = -1, -2, -3


@dataclass(eq=False)
class Job:
    """A task as it runs. missing: nodes it waits for (policies with a fixed layout)."""

    index: int
    task: SimTask
    nodes: list[int] = field(default_factory=list)
    wanted: int = 0  # nodes it began with
    missing: int = 0
    missing_since_s: float = 0.0
    pauses: list[tuple[str, float]] = field(default_factory=list)  # what, seconds left
    trained_s: float = 0.0  # since the last version that a failure would return to
    rate: float = 0.0  # FLOP/s, weighted, and GPUs when it last trained: what is computed again was earned so
    gpus: int = 0

    @property
    def width(self) -> int:
        return len(self.nodes)


@dataclass(frozen=True)
class Incident:
    at_s: float
    node: int
    kind: Kind
    cause: str
    lasts_s: float


class World:
    def __init__(self, tasks: tuple[SimTask, ...], widths: list[int], history: History, policy: Policy) -> None:
        self.now_s = 0.0
        self.history, self.policy = history, policy
        self.jobs = [
            Job(index, task, wanted=width) for index, (task, width) in enumerate(zip(tasks, widths, strict=True))
        ]
        self.per_node = tasks[0].gpus_per_node
        self.account = Account(history.duration_s, history.num_nodes * self.per_node)
        self.owner = [FREE] * history.num_nodes
        self.free: list[int] = []
        self.standbys: list[int] = []
        self.down: dict[int, float] = {}  # node -> back at
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._give_out()

    def _give_out(self) -> None:
        nodes = list(range(self.history.num_nodes))
        for job in self.jobs:
            job.nodes, nodes = nodes[: job.wanted], nodes[job.wanted :]
            for node in job.nodes:
                self.owner[node] = job.index
        for node in nodes:
            self.put_away(node)

    # ------------------------------------------------------------ what policies do

    def pause(self, job: Job, incident: Incident | None, parts_s: dict[str, float]) -> None:
        """It stands still for the sum of the parts from now on; what it was standing still for is forgotten."""
        job.pauses = [(what, seconds) for what, seconds in parts_s.items() if seconds > 0]
        if incident is not None:
            self.account.downtimes.append(
                Downtime(self.now_s, incident.kind.name.lower(), incident.cause, job.task.name, dict(parts_s))
            )

    def roll_back(self, job: Job, interval_s: float) -> float:
        """Back to the last multiple of the interval: seconds of training that are computed again."""
        lost_s = job.trained_s % interval_s if interval_s > 0 else 0.0
        job.trained_s = 0.0
        self.account.lose(self.now_s, lost_s * job.rate)
        gpu_s = lost_s * job.gpus
        useful = self.policy.steady(job.task)
        self.account.gpu_s["productive"] -= gpu_s * useful
        self.account.gpu_s["overhead"] -= gpu_s * (1 - useful)
        self.account.gpu_s["recompute"] += gpu_s
        self.account.training_s[job.task.name] = self.account.training_s.get(job.task.name, 0.0) - lost_s
        return lost_s

    def take(self, job: Job) -> str:
        """A node for the job: where it came from (standby | free), or nothing."""
        source = self.standbys or self.free
        if not source:
            return ""
        kind = "standby" if self.standbys else "free"
        self.give(source.pop(), job)
        return kind

    def give(self, node: int, job: Job) -> None:
        self.owner[node] = job.index
        job.nodes.append(node)

    def release(self, job: Job, count: int) -> None:
        for _ in range(count):
            self.put_away(job.nodes.pop())

    def put_away(self, node: int) -> None:
        """Among the standbys as long as the policy wants more of them, else among the free."""
        is_standby = len(self.standbys) < self.policy.num_standbys
        self.owner[node] = STANDBY if is_standby else FREE
        (self.standbys if is_standby else self.free).append(node)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._later, (self.now_s + delay_s, self._count, call))

    @property
    def usable(self) -> int:
        """Nodes that tasks hold or could hold: neither down nor standing by."""
        return self.history.num_nodes - len(self.down) - len(self.standbys)

    # ------------------------------------------------------------ time

    def run(self) -> Account:
        history = self.history
        self.policy.begin(self)
        rows = zip(
            history.at_s.tolist(), history.node.tolist(), history.kind.tolist(), history.lasts_s.tolist(),
            history.cause.tolist(), strict=True,
        )  # fmt: skip
        for at_s, node, kind, lasts_s, cause in rows:
            self._run_later(at_s)
            self._advance(at_s)
            self._happen(Incident(at_s, node, Kind(kind), history.causes[cause], lasts_s))
        self._run_later(history.duration_s)
        self._advance(history.duration_s)
        return self.account

    def _run_later(self, until_s: float) -> None:
        while self._later and self._later[0][0] <= until_s:
            at_s, _, call = heapq.heappop(self._later)
            self._advance(at_s)
            call()

    def _happen(self, incident: Incident) -> None:
        self.account.num_events += 1
        place = self.owner[incident.node]
        if incident.kind in (Kind.NODE, Kind.PREEMPT):
            self._lose(incident, place)
        elif place >= 0:
            self.policy.hurt(self, self.jobs[place], incident)

    def _lose(self, incident: Incident, place: int) -> None:
        node = incident.node
        back_s = incident.at_s + incident.lasts_s
        if place == DOWN:
            self.down[node] = max(self.down[node], back_s)
            return
        self.down[node] = back_s
        self.owner[node] = DOWN
        self.after(incident.lasts_s, lambda: self._return(node))
        if place == FREE:
            self.free.remove(node)
        elif place == STANDBY:
            self.standbys.remove(node)
        else:
            self.jobs[place].nodes.remove(node)
            self.policy.lost(self, self.jobs[place], incident)

    def _return(self, node: int) -> None:
        if self.down[node] > self.now_s:
            self.after(self.down[node] - self.now_s, lambda: self._return(node))
            return
        del self.down[node]
        self.account.num_events += 1
        self.policy.returned(self, node)

    # ------------------------------------------------------------ sums

    def _advance(self, now_s: float) -> None:
        passed_s = now_s - self.now_s
        if passed_s <= 0:
            return
        account = self.account
        for what, nodes in (("down", len(self.down)), ("standby", len(self.standbys)), ("idle", len(self.free))):
            account.use(what, nodes * self.per_node, passed_s)
        for job in self.jobs:
            self._advance_job(job, now_s)
        self.now_s = now_s

    def _advance_job(self, job: Job, now_s: float) -> None:
        account, gpus = self.account, job.width * self.per_node
        at_s = self.now_s
        while job.pauses and at_s < now_s and not job.missing:
            what, left_s = job.pauses[0]
            done_s = min(left_s, now_s - at_s)
            account.use(what, gpus, done_s)
            at_s += done_s
            job.pauses = job.pauses[1:] if done_s == left_s else [(what, left_s - done_s), *job.pauses[1:]]
        if at_s >= now_s:
            return
        rate = 0.0 if job.missing else self.policy.rate(job)
        if rate <= 0.0:
            account.use("waiting", gpus, now_s - at_s)
            return
        steady = self.policy.steady(job.task)
        account.use("productive", gpus * steady, now_s - at_s)
        account.use("overhead", gpus * (1 - steady), now_s - at_s)
        account.earn(at_s, now_s, rate)
        job.trained_s += now_s - at_s
        job.rate, job.gpus = rate, gpus
        name = job.task.name
        account.training_s[name] = account.training_s.get(name, 0.0) + now_s - at_s
