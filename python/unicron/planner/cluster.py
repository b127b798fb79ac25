"""A cluster as the planner sees it: nodes, tasks with T(t, x), how often it fails and what transitions take.

Everything is checked before anything is planned, because a plan from a wrong table looks as good as one from a right
one: a count that workers allow but throughput does not know is an error, not a zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
TASKS_MAX = 4096
SLOTS_MAX = 1 << 20
# Above any cluster's, and so far from what a double holds that no product of them leaves it.
WEIGHT_MAX = 1e9
FLOPS_MAX = 1e24  # FLOP/s of a task
NUMBER_MAX = 1e18  # seconds, and failures; its inverse is the least that is above 0


class PlannerProblem(ValueError):
    """Input that cannot be planned; one line that says what is wrong and where."""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    slots: int
    domain: str = ""  # rack or switch: what fails together
    broken: int = 0  # slots that cannot be used
    faults: int = 0  # failures remembered against it
    state: Literal["up", "lost", "drained", "bad"] = "up"

    @property
    def usable(self) -> int:
        """Slots that a task may hold."""
        return self.slots - self.broken if self.state == "up" else 0


class Failures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Failures per slot-second: a Gamma prior and what was seen (Unicron's D_running is 1 / rate / n')."""

    prior: float = 1.0  # failures
    prior_slot_s: float = 1e8  # in so many slot-seconds: one failure of a slot in about three years
    seen: int = 0
    slot_s: float = 0.0  # exposure in which they were seen


class Transitions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """D_transition in seconds: from the decision until the task trains again, by what happens to it."""

    start_s: float = 120.0  # from no slots
    stop_s: float = 5.0  # to no slots
    shrink_s: float = 30.0
    grow_s: float = 40.0
    restart_s: float = 10.0  # the process died, its slot is whole: a warm process on the same node
    standby_s: float = 15.0  # a standby takes the role
    replace_s: float = 60.0  # a slot that was free or another task's takes the role
    repair_s: float = 86400.0  # until a broken slot or node is back


class Workers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min: int
    max: int
    unit: int = 1


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    workers: Workers
    throughput: dict[int, float | str]  # T(t, x): slots -> achieved FLOP/s of all slots together; YAML 1e12 is a string
    weight: float = 1.0  # w(t)
    group: int = 1  # slots that must share a node (tp)
    holds: dict[str, int] = {}  # node -> slots it holds there now
    required: bool = False  # it was admitted: it may shrink to its least count, not to nothing
    reachable: tuple[int, ...] = ()  # counts it can take now, ascending, without 0; (): all that workers allow
    relayout_s: dict[
        int, float
    ] = {}  # slots -> seconds, of counts it reaches by going over to another layout in memory

    @property
    def current(self) -> int:
        return sum(self.holds.values())

    def counts(self) -> list[int]:
        """Reachable numbers of slots, ascending, without 0."""
        own = self.reachable or range(self.workers.min, self.workers.max + 1, self.workers.unit)
        return sorted({*own, *self.relayout_s}) if self.relayout_s else list(own)

    def waf(self, slots: int) -> float:
        """F(t, x) = w(t) * T(t, x) in FLOP/s; 0 for what the task cannot run on (Unicron, WAF)."""
        return self.weight * float(self.throughput.get(slots, 0.0)) if slots >= self.least else 0.0

    @property
    def least(self) -> int:
        """T_necessary(t) as a number of slots; below the workers' own where survivors go on with fewer."""
        return min([self.workers.min, *self.reachable[:1]])


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: tuple[Node, ...]
    tasks: tuple[Task, ...]
    standbys: int = 0  # slots that stand warm outside the nodes above
    waits: bool = True  # may a wounded task stand still until the repair? (where survivors always go on, it may not)
    failures: Failures = Failures()
    transitions: Transitions = Transitions()

    @property
    def pool(self) -> int:
        """n: slots that can be given out now."""
        return sum(node.usable for node in self.nodes)


def check(cluster: Cluster) -> None:
    """Raises PlannerProblem for whatever no plan could mean."""
    _unique("node", [node.name for node in cluster.nodes])
    _unique("task", [task.name for task in cluster.tasks])
    if len(cluster.tasks) > TASKS_MAX:
        raise PlannerProblem(f"{len(cluster.tasks)} tasks: the planner takes at most {TASKS_MAX}")
    _numbers("failures", cluster.failures, ("prior", "prior_slot_s"), ("seen", "slot_s"))
    _numbers("transitions", cluster.transitions, (), Transitions.__struct_fields__)
    _whole("standbys", cluster.standbys, 0)
    for node in cluster.nodes:
        _check_node(node)
    if cluster.pool > SLOTS_MAX:
        raise PlannerProblem(f"{cluster.pool} slots: the planner takes at most {SLOTS_MAX}")
    usable = {node.name: node.usable for node in cluster.nodes}
    widest = max(usable.values(), default=0)
    for task in cluster.tasks:
        _check_task(task, cluster.pool, widest)
        for place, slots in task.holds.items():
            if place not in usable:
                raise PlannerProblem(f"task {task.name}: no node {place}")
            _whole(f"task {task.name}: slots on {place}", slots, 1)
    for node in cluster.nodes:
        held = sum(task.holds.get(node.name, 0) for task in cluster.tasks)
        if held > node.usable:
            raise PlannerProblem(f"node {node.name}: tasks hold {held} of {node.usable} usable slots")


def _check_node(node: Node) -> None:
    _whole(f"node {node.name}: slots", node.slots, 1)
    _whole(f"node {node.name}: broken", node.broken, 0)
    _whole(f"node {node.name}: faults", node.faults, 0)
    if node.broken > node.slots:
        raise PlannerProblem(f"node {node.name}: {node.broken} of {node.slots} slots are broken")


def _check_task(task: Task, pool: int, widest: int) -> None:
    who = f"task {task.name}"
    workers = task.workers
    _whole(f"{who}: workers.min", workers.min, 1)
    _whole(f"{who}: workers.unit", workers.unit, 1)
    _whole(f"{who}: group", task.group, 1)
    if not 0 <= task.weight <= WEIGHT_MAX:
        raise PlannerProblem(f"{who}: weight {task.weight} must be a number of 0 to {WEIGHT_MAX:g}")
    if workers.max < workers.min:
        raise PlannerProblem(f"{who}: workers.max {workers.max} is below workers.min {workers.min}")
    if workers.max > SLOTS_MAX:
        raise PlannerProblem(f"{who}: workers.max {workers.max} is above {SLOTS_MAX}")
    if (workers.max - workers.min) % workers.unit:
        raise PlannerProblem(f"{who}: workers.max is not workers.min and a multiple of unit {workers.unit}")
    if workers.min % task.group or (workers.unit % task.group and workers.max > workers.min):
        raise PlannerProblem(f"{who}: workers.min and unit must be multiples of group {task.group}")
    if task.least > pool:
        raise PlannerProblem(f"{who}: needs {task.least} slots, the cluster has {pool}")
    if list(task.reachable) != sorted(set(task.reachable)) or any(count < 1 for count in task.reachable):
        raise PlannerProblem(f"{who}: reachable must be ascending counts of 1 or more, without repetition")
    for slots, seconds in task.relayout_s.items():
        _whole(f"{who}: relayout_s: slots", slots, 1)
        if not 0 <= seconds <= NUMBER_MAX:
            raise PlannerProblem(f"{who}: relayout_s at {slots} slots is {seconds}; give 0 to {NUMBER_MAX:g} seconds")
    if task.group > widest:
        raise PlannerProblem(f"{who}: group {task.group} fits no node: the widest has {widest} usable slots")
    _check_throughput(task, who)
    if task.current and task.current not in task.counts():
        raise PlannerProblem(f"{who}: holds {task.current} slots, which its workers do not allow")


def _check_throughput(task: Task, who: str) -> None:
    counts = task.counts()
    holes = [count for count in counts if count not in task.throughput]
    if holes:
        raise PlannerProblem(f"{who}: throughput has no value for {_few(holes)} slots, which its workers allow")
    strangers = sorted(task.throughput.keys() - set(counts))
    if strangers:
        raise PlannerProblem(f"{who}: throughput names {_few(strangers)} slots, which its workers do not allow")
    for slots, value in task.throughput.items():
        try:
            flops = float(value)
        except ValueError:
            flops = math.nan
        if not 0 <= flops <= FLOPS_MAX:
            raise PlannerProblem(f"{who}: throughput at {slots} slots is {value}; give FLOP/s of 0 to {FLOPS_MAX:g}")


def _few(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _unique(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not NAME.fullmatch(name):
            raise PlannerProblem(f"{kind} {name!r}: a name has letters, digits, '_', '.' and '-' only")
        if name in seen:
            raise PlannerProblem(f"two {kind}s are called {name}")
        seen.add(name)


def _whole(what: str, value: int, least: int) -> None:
    if value < least:
        raise PlannerProblem(f"{what} is {value}; give at least {least}")


def _numbers(where: str, struct: msgspec.Struct, positive: Iterable[str], others: Iterable[str]) -> None:
    for names, least in ((positive, 1 / NUMBER_MAX), (others, 0)):
        for name in names:
            value = getattr(struct, name)
            if not least <= value <= NUMBER_MAX:
                raise PlannerProblem(f"{where}.{name} is {value}; give a number of {least:g} to {NUMBER_MAX:g}")
