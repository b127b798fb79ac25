"""What the dashboard's page is sent: one snapshot of the cluster, then what changed. Pure.

A node is a short list and not a dict with names, because there are thousands: [condition, free slots, held slots, warm
processes, why], where a held slot is [task, rank, state].
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from itertools import islice
from typing import Any

from unicron.coordinator.state import NodeState, Purpose, State, TaskState, WorkerState
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.messages import WorkerStatus
from unicron.runtime.views import cluster_view, incident_view, task_view

INCIDENTS_MAX = 200  # the newest, and all that are open
WAF_POINTS_MAX = 240
SLICE = 4096  # workers, or nodes, of one look
TASK_FIELDS = (
    "task", "phase", "slots", "target", "weight", "iteration", "ettr", "waf", "why", "epoch", "layout", "outcome",
    "cause", "open_incidents", "restarts", "leaving",
)  # fmt: skip

Snapshot = dict[str, Any]


class Looks:
    """One snapshot after the other. Of a large cluster the nodes come in slices, one a look, so that no look holds up
    the loop; incidents and tasks are new in each."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[Any]] = {}
        self._under_way: Generator[None, None, dict[str, list[Any]]] | None = None

    def look(self, state: State, seen: Mapping[str, WorkerStatus], now_ms: float) -> Snapshot:
        if self._under_way is None:
            self._under_way = _nodes_in_slices(state)
        try:
            next(self._under_way)
        except StopIteration as whole:
            self._nodes, self._under_way = whole.value, None
        return snapshot(state, seen, now_ms, self._nodes)


def snapshot(state: State, seen: Mapping[str, WorkerStatus], now_ms: float, nodes: dict[str, list[Any]]) -> Snapshot:
    cluster = cluster_view(state, now_ms)
    cluster["waf_over_time"] = cluster["waf_over_time"][-WAF_POINTS_MAX:]
    return {
        "cluster": cluster,
        "tasks": {task.name: _task(task, state, seen, now_ms) for task in state.tasks.values()},
        "nodes": nodes,
        "incidents": {i.id: incident_view(i, state, now_ms) for i in _shown(state)},
    }


def _shown(state: State) -> list[Any]:
    newest = set(islice(reversed(state.incidents), INCIDENTS_MAX))
    return [incident for name, incident in state.incidents.items() if name in newest or incident.is_open]


def _task(task: TaskState, state: State, seen: Mapping[str, WorkerStatus], now_ms: float) -> dict[str, Any]:
    view = task_view(task, state, now_ms)
    shown: dict[str, Any] = {name: view[name] for name in TASK_FIELDS}
    told = [seen[name] for name in _members(task) if name in seen]
    losses = [(status.iteration, status.loss) for status in told if status.loss is not None]
    shown["ettr"] = None if shown["ettr"] is None else round(shown["ettr"], 4)
    shown["loss"] = max(losses)[1] if losses else None
    size = task.job.layout.replica_size
    shown["iteration_s"] = task.measured_s.get(len(task.placement) // size)
    shown["samples"] = task.job.layout.micro_batch * task.job.layout.num_micro_batches  # of one iteration
    return shown


def _members(task: TaskState) -> set[str]:
    return {member.worker for member in task.plan.members} if task.plan else set()


def _nodes_in_slices(state: State) -> Generator[None, None, dict[str, list[Any]]]:
    nodes = [*state.nodes.values()]
    held: dict[str, list[list[Any]]] = {node.name: [] for node in nodes}
    warm = dict.fromkeys(held, 0)
    count = 0
    for task in [*state.tasks.values()]:
        members = _members(task)
        for worker in [*task.workers.values()]:
            count += 1
            if count % SLICE == 0:
                yield
            if worker.node not in held:
                continue
            if worker.purpose is Purpose.UNDERSTUDY and worker.name not in members:
                warm[worker.node] += 1
            else:
                held[worker.node].append([task.name, worker.rank, _condition(worker, task)])
    found: dict[str, list[Any]] = {}
    for node in nodes:
        count += 1
        if count % SLICE == 0:
            yield
        here = held[node.name]
        free = max(node.slots - len(here), 0)
        found[node.name] = [_node_condition(node), free, sorted(here), warm[node.name], node.why_drained]
    return found


def _node_condition(node: NodeState) -> str:
    if node.phase is NodePhase.UP and node.is_drained:
        return "unfit" if node.unfit else "drained"
    return node.phase.value


def _condition(worker: WorkerState, task: TaskState) -> str:
    """starting | training | recovering | ending | hurt."""
    if worker.stopped_ms is not None or worker.exception is not None or worker.stalled is not None:
        return "hurt"
    if worker.phase in (WorkerPhase.ENDING, WorkerPhase.FINISHED):
        return "ending"
    if worker.phase is not WorkerPhase.READY or task.phase is TaskPhase.STARTING:
        return "starting"
    return "recovering" if task.phase in (TaskPhase.RECOVERING, TaskPhase.HEALING) else "training"


def difference(old: Snapshot, new: Snapshot) -> Snapshot:
    """What makes ``new`` of ``old``: per part the entries that changed, and None for those that are gone; {} when
    nothing did. The clock alone is no change."""
    found: Snapshot = {}
    for part in ("tasks", "nodes", "incidents"):
        before, after = old[part], new[part]
        changed = {name: entry for name, entry in after.items() if before.get(name) != entry}
        changed.update(dict.fromkeys(name for name in before if name not in after))
        if changed:
            found[part] = changed
    if _without_clock(old["cluster"]) != _without_clock(new["cluster"]):
        found["cluster"] = new["cluster"]
    return found


def _without_clock(cluster: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in cluster.items() if name not in ("now_ms", "flop")}
