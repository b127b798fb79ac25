"""What people see of the state: plain dicts for ps, nodes, incidents, describe. Reads only."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron.coordinator.state import State, TaskState


def view_tasks(state: State) -> list[dict[str, Any]]:
    return [view_task(task) for task in state.tasks.values()]


def view_task(task: TaskState) -> dict[str, Any]:
    return {
        "task": task.name,
        "phase": task.phase.value,
        "epoch": task.epoch,
        "iteration": task.iteration,
        "replicas": list(task.plan.replicas) if task.plan else [],
        "restarts": task.restarts,
        "outcome": task.outcome,
        "cause": task.cause,
        "checkpoint": list(task.checkpoint) if task.checkpoint else None,
        "workers": [
            {
                "worker": w.name,
                "node": w.node,
                "rank": w.rank,
                "purpose": w.purpose.value,
                "phase": w.phase.value,
                "iteration": w.iteration,
            }
            for w in task.workers.values()
        ],
    }


def view_nodes(state: State) -> list[dict[str, Any]]:
    return [
        {
            "node": n.name,
            "phase": n.phase.value,
            "incarnation": n.incarnation,
            "slots": n.slots,
            "store": n.store,
        }
        for n in state.nodes.values()
    ]


def view_incidents(state: State, task: str = "") -> list[dict[str, Any]]:
    return [msgspec.to_builtins(i) for i in state.incidents.values() if not task or i.task == task]
