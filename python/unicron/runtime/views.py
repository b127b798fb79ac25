"""What people and programs see of the coordinator's state: plain dicts and lists, ready for JSON.
Pure.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from unicron.coordinator.incident import Incident
from unicron.coordinator.state import NodeState, State, TaskState
from unicron.types import Stage


def nodes_view(state: State) -> list[dict[str, Any]]:
    return [_node(node, state) for node in state.nodes.values()]


def _node(node: NodeState, state: State) -> dict[str, Any]:
    workers = [w for t in state.tasks.values() for w in t.workers.values() if w.node == node.name]
    return {
        "node": node.name,
        "phase": node.phase.value,
        "incarnation": node.incarnation,
        "slots": node.slots,
        "understudies": node.understudies,
        "workers": len(workers),
        "store": node.store,
    }


def tasks_view(state: State) -> list[dict[str, Any]]:
    return [task_view(task, state) for task in state.tasks.values()]


def task_view(task: TaskState, state: State) -> dict[str, Any]:
    incidents = [i for i in state.incidents.values() if i.task == task.name]
    return {
        "task": task.name,
        "phase": task.phase.value,
        "outcome": task.outcome,
        "cause": task.cause,
        "epoch": task.epoch,
        "replicas": list(task.plan.replicas) if task.plan else [],
        "layout": msgspec.to_builtins(task.job.layout),
        "iteration": task.iteration,
        "restarts": task.restarts,
        "managed": task.job.managed,
        "incidents": len(incidents),
        "open_incidents": sum(i.is_open for i in incidents),
        "log_dir": task.job.log_dir,
    }


def describe_view(task: TaskState, state: State, seen: dict[str, Any]) -> dict[str, Any]:
    """``seen``: newest WorkerStatus by worker, as the agents told it."""
    view = task_view(task, state)
    view["command"] = list(task.job.command)
    view["workers"] = [_worker(worker.name, task, seen.get(worker.name)) for worker in task.workers.values()]
    view["plan"] = msgspec.to_builtins(task.plan) if task.plan else None
    return view


def _worker(name: str, task: TaskState, status: Any) -> dict[str, Any]:
    worker = task.workers[name]
    held = task.role_of(name)
    return {
        "worker": name,
        "node": worker.node,
        "rank": worker.rank if held is None else held,
        "is_member": held is not None,
        "purpose": worker.purpose.value,
        "phase": worker.phase.value,
        "incarnation": worker.incarnation,
        "pid": status.pid if status else 0,
        "stage": Stage(status.stage).name.lower() if status else "",
        "iteration": status.iteration if status else worker.iteration,
        "stopped": worker.stopped_ms is not None,
    }


def _name(value: enum.StrEnum | None) -> str | None:
    """Its text, also where a plain string stands in its place: a look at the state must not fail."""
    return None if value is None else str(value)


def incident_view(incident: Incident) -> dict[str, Any]:
    """The JSON of INTERFACES.md, and beside it what a person asks next."""
    return {
        "id": incident.id,
        "task": incident.task,
        "fault": incident.fault,
        "severity": _name(incident.severity),
        "root": {"node": incident.node, "rank": incident.rank},
        "method": _name(incident.method),
        "outcome": _name(incident.outcome),
        "detect_ms": incident.detect_ms,
        "decide_ms": incident.decide_ms,
        "resume_ms": incident.resume_ms,
        "lost_ms": incident.lost_ms,
        "state_source": _name(incident.state_source),
        "iterations_lost": incident.iterations_lost,
        "micro_batches_recomputed": incident.micro_batches_recomputed,
        "groups_kept": incident.groups_kept,
        "groups_rebuilt": incident.groups_rebuilt,
        "recompute_ms": incident.recompute_ms,
        "phases_ms": incident.phases_ms,
        "kind": _name(incident.kind),
        "cause": incident.cause,
        "text": incident.text,
        "where": incident.where,
        "log": incident.log,
        "worker": incident.worker,
        "iteration": incident.iteration,
        "micro_batch": incident.micro_batch,
        "stage": incident.stage.name.lower(),
        "epoch": incident.epoch,
        "part_of": incident.part_of,
        "timeline": [[at_ms, text] for at_ms, text in incident.timeline],
    }
