"""What an event does to the cluster, as one value: several events at once are the sum of theirs.

slot:TASK      a slot of the task is lost (slot:TASK@NODE: there)
process:TASK   a process of the task died, its slot is whole
node:NODE      the node is lost with all its slots
join:NODE      a node that was not up comes back whole (join:8: a new node of 8 slots)
finish:TASK    the task is done
standby        a standby is gone
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron.planner.cluster import Cluster, Node, PlannerProblem

EVENTS = "slot:TASK, process:TASK, node:NODE, join:NODE, join:SLOTS, finish:TASK, standby"


@dataclass(frozen=True)
class Situation:
    nodes: tuple[Node, ...]  # after the event
    standbys: int  # after the event, before one is spent
    lost_slots: int = 0  # that were usable before
    lost_free: int = 0  # of them, those that no task held
    lost: dict[tuple[str, str], int] = field(default_factory=dict)  # (task, node) -> slots it lost there
    restarted: frozenset[str] = frozenset()  # tasks with a dead process on a whole slot
    finished: frozenset[str] = frozenset()

    @property
    def pool(self) -> int:
        return sum(node.usable for node in self.nodes)

    @property
    def wounded(self) -> frozenset[str]:
        """Tasks that lost slots and are still there."""
        return frozenset(task for task, _ in self.lost) - self.finished


def situation_of(cluster: Cluster, events: tuple[str, ...]) -> Situation:
    """Raises PlannerProblem for an event that cannot happen to this cluster."""
    result = Situation(cluster.nodes, cluster.standbys)
    for event in events:
        kind, _, name = event.partition(":")
        if kind in ("slot", "process", "finish"):
            result = _task_event(cluster, result, kind, name)
        elif kind == "node":
            result = _lose_node(cluster, result, name)
        elif kind == "join" and name:
            result = _join(result, name)
        elif event == "standby":
            if result.standbys == 0:
                raise PlannerProblem("standby: the cluster has none")
            result = _replace(result, standbys=result.standbys - 1)
        else:
            raise PlannerProblem(f"no event {event!r}: {EVENTS}")
    return result


def _task_event(cluster: Cluster, before: Situation, kind: str, name: str) -> Situation:
    name, _, place = name.partition("@")
    task = next((task for task in cluster.tasks if task.name == name), None)
    if task is None:
        raise PlannerProblem(f"{kind}:{name}: no such task")
    if kind == "finish":
        return _replace(before, finished=before.finished | {name})
    if not task.holds:
        raise PlannerProblem(f"{kind}:{name}: the task does not run")
    if kind == "process":
        return _replace(before, restarted=before.restarted | {name})
    place = place or max(sorted(task.holds), key=lambda node: task.holds[node])
    if place not in task.holds:
        raise PlannerProblem(f"slot:{name}@{place}: the task holds nothing there")
    if task.holds[place] <= before.lost.get((name, place), 0):
        raise PlannerProblem(f"slot:{name}@{place}: the task has lost all its slots there already")
    nodes = _change(before.nodes, place, broken=1)
    lost = {**before.lost, (name, place): before.lost.get((name, place), 0) + 1}
    return _replace(before, nodes=nodes, lost=lost, lost_slots=before.lost_slots + 1)


def _lose_node(cluster: Cluster, before: Situation, name: str) -> Situation:
    node = next((node for node in before.nodes if node.name == name), None)
    if node is None or node.state != "up":
        raise PlannerProblem(f"node:{name}: no such node is up")
    lost = dict(before.lost)
    held = 0
    for task in cluster.tasks:
        if name in task.holds:
            held += task.holds[name] - lost.get((task.name, name), 0)
            lost[task.name, name] = task.holds[name]
    return _replace(
        before,
        nodes=_change(before.nodes, name, state="lost"),
        lost=lost,
        lost_slots=before.lost_slots + node.usable,
        lost_free=before.lost_free + max(0, node.usable - held),
    )


def _join(before: Situation, name: str) -> Situation:
    if name.isdecimal():
        if not 1 <= int(name) <= 1 << 16:
            raise PlannerProblem(f"join:{name}: a node has 1 to {1 << 16} slots")
        known = {node.name for node in before.nodes}
        new = next(f"new{index}" for index in range(len(known) + 1) if f"new{index}" not in known)
        return _replace(before, nodes=(*before.nodes, Node(new, int(name))))
    node = next((node for node in before.nodes if node.name == name), None)
    if node is None or node.state == "up":
        raise PlannerProblem(f"join:{name}: no such node is missing (join:SLOTS is a new one)")
    back = Node(node.name, node.slots, node.domain, 0, node.faults, "up")
    return _replace(before, nodes=tuple(back if other is node else other for other in before.nodes))


def _change(nodes: tuple[Node, ...], name: str, *, broken: int = 0, state: str = "") -> tuple[Node, ...]:
    def changed(node: Node) -> Node:
        # What failed is remembered: placement prefers other nodes.
        return Node(
            node.name, node.slots, node.domain, node.broken + broken, node.faults + 1, "lost" if state else node.state
        )

    return tuple(changed(node) if node.name == name else node for node in nodes)


def _replace(before: Situation, **changes: object) -> Situation:
    fields = {name: getattr(before, name) for name in Situation.__dataclass_fields__}
    return Situation(**{**fields, **changes})


def foreseen(cluster: Cluster) -> list[str]:
    """Every one-step event, in a fixed order; nodes that cost the same tasks the same come one after the other."""
    running = [task.name for task in cluster.tasks if task.holds]
    events = [f"slot:{name}" for name in running]
    events += [f"process:{name}" for name in running]
    events += [f"finish:{task.name}" for task in cluster.tasks]
    events += [f"node:{node.name}" for node in cluster.nodes if node.state == "up"]
    events += [f"join:{node.name}" for node in cluster.nodes if node.state != "up"]
    events += [f"join:{slots}" for slots in sorted({node.slots for node in cluster.nodes})]
    return [*events, *(["standby"] if cluster.standbys else [])]
