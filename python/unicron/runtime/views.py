"""What people and programs see of the coordinator's state: plain dicts and lists, ready for JSON.
Pure.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from unicron.coordinator import bandwidth
from unicron.coordinator.accounting import cost_of
from unicron.coordinator.demand import replica_counts, throughput_of
from unicron.coordinator.incident import Incident, StateTransfer
from unicron.coordinator.layout_times import reachable_layouts
from unicron.coordinator.placement import held_slots
from unicron.coordinator.state import NodeState, State, TaskState, node_order
from unicron.coordinator.transitions import TERMINAL
from unicron.types import OF_MEMORY, Network, Stage


def nodes_view(state: State) -> list[dict[str, Any]]:
    """In the order of their names, however they came."""
    return [_node(state.nodes[name], state) for name in sorted(state.nodes, key=node_order)]


def _node(node: NodeState, state: State) -> dict[str, Any]:
    workers = [w for t in state.tasks.values() for w in t.workers.values() if w.node == node.name]
    held = {t.name: held_slots(t).count(node.name) for t in state.tasks.values() if t.phase not in TERMINAL}
    return {
        "node": node.name,
        "phase": node.phase.value,
        "drained": node.is_drained,
        "why": node.why_drained,
        "hearing": node.hearing.value,
        "checks": {name: f"{answer}: {reason}" for name, answer, reason in node.checks},
        "used": sum(held.values()),
        "tasks": {name: count for name, count in held.items() if count},
        "faults": state.node_faults.get(node.name, 0),
        "incarnation": node.incarnation,
        "slots": node.slots,
        "understudies": node.understudies,
        "workers": len(workers),
        "store": node.store,
        "control_network": _network(node.control_network),
        "state_network": _network(node.state_network),
    }


def _network(network: Network | None) -> dict[str, Any] | None:
    """None: an older agent does not say."""
    return None if network is None else dict(msgspec.to_builtins(network))


def _transfer(transfer: StateTransfer) -> dict[str, Any]:
    told = msgspec.to_builtins(transfer)
    return {**told, "mb_s": transfer.mb_s, "words": bandwidth.words(transfer)}


def tasks_view(state: State, now_ms: float) -> list[dict[str, Any]]:
    return [task_view(task, state, now_ms) for task in state.tasks.values()]


def task_view(task: TaskState, state: State, now_ms: float) -> dict[str, Any]:
    incidents = [i for i in state.incidents.values() if i.task == task.name]
    return {
        "task": task.name,
        "phase": task.phase.value,
        "held": task.is_held,
        "leaving": task.leaving,
        "priority": task.job.priority,
        "weight": task.job.weight,
        "slots": 0 if task.is_over else len(task.slotted),
        "target": len(state.target(task.name)),
        "why": "" if task.is_over else task.held_why or task.waits_why or state.allocation.notes.get(task.name, ""),
        "waf": task.accounts.waf,
        "waf_from": _throughput_from(task, len(task.slotted) // task.job.layout.replica_size),
        "ettr": task.accounts.ettr(now_ms),
        "outcome": task.outcome,
        "cause": task.cause,
        "epoch": task.epoch,
        "replicas": list(task.plan.replicas) if task.plan else [],
        "layout": msgspec.structs.asdict(task.job.layout),
        "iteration": task.iteration,
        "restarts": task.restarts,
        "managed": task.job.managed,
        "incidents": len(incidents),
        "open_incidents": sum(i.is_open for i in incidents),
        "log_dir": task.job.log_dir,
    }


def describe_view(task: TaskState, state: State, seen: dict[str, Any], now_ms: float) -> dict[str, Any]:
    """``seen``: newest WorkerStatus by worker, as the agents told it."""
    view = task_view(task, state, now_ms)
    view["command"] = list(task.job.command)
    view["checkpoint"] = {"iteration": task.checkpoint[0], "path": task.checkpoint[1]} if task.checkpoint else None
    view["allocation"] = allocation_view(state)
    size = task.job.layout.replica_size
    widths = replica_counts(task, len(state.target(task.name)) // size)
    view["throughput"] = {str(count * size): throughput_of(task, count) for count in widths}
    view["throughput_from"] = {str(count * size): _throughput_from(task, count) for count in widths}
    view["iteration_s"] = {str(count * size): seconds for count, seconds in sorted(task.measured_s.items())}
    view["layouts"] = reachable_layouts(state, task)
    view["layout_changes"] = list(task.moves)
    view["layout_change_refused"] = task.change_refused
    view["guests"] = {str(rank): node for rank, node in sorted(task.guests.items())}
    view["wide"] = msgspec.structs.asdict(task.asked.layout)
    view["spent_s"] = {kind: ms / 1000 for kind, ms in task.accounts.spent(now_ms).items()}
    view["flop"] = task.accounts.flop_until(now_ms)
    costs = [cost_of(i, now_ms) for i in state.incidents.values() if i.task == task.name and not i.part_of]
    view["cost"] = total_of(costs)
    view["workers"] = [_worker(worker.name, task, seen.get(worker.name)) for worker in task.workers.values()]
    view["plan"] = (
        {**msgspec.to_builtins(task.plan), "layout": msgspec.structs.asdict(task.plan.layout)} if task.plan else None
    )
    return view


def _throughput_from(task: TaskState, replicas: int) -> str:
    """What its T(t, x) at this width rests on. Assumed: nobody stated it, and it has not run so, or the FLOP of an
    iteration are not known, and all that is measured is how one width compares with another."""
    is_stated = replicas * task.job.layout.replica_size in task.job.throughput
    if task.job.measured and replicas in task.measured_s and (is_stated or task.job.iteration_flop > 0):
        return "measured"
    return "stated" if is_stated else "assumed"


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


def total_of(costs: list[dict[str, float]]) -> dict[str, float]:
    names = ("detection_gpu_s", "transition_gpu_s", "sub_healthy_gpu_s", "total_gpu_s")
    return {name: sum(cost[name] for cost in costs) for name in names}


def allocation_view(state: State) -> dict[str, Any]:
    """The newest decision: what it was made for, and why."""
    made = state.allocation
    return {
        "number": made.number,
        "trigger": made.trigger,
        "reason": made.reason,
        "from_table": made.from_table,
        "slots": {name: len(roles) for name, roles in made.targets.items()},
        "waf": made.waf,
        "reward": made.reward,
        "at_ms": made.at_ms,
    }


def cluster_view(state: State, now_ms: float) -> dict[str, Any]:
    """What the cluster earns and what failures cost it; `unicron top` shows it."""
    tasks = list(state.tasks.values())
    costs = [cost_of(incident, now_ms) for incident in state.incidents.values() if not incident.part_of]
    return {
        "term": state.term,
        "slots": sum(n.slots for n in state.nodes.values() if n.is_usable),
        "used": sum(len(t.slotted) for t in tasks if not t.is_over),
        "waf": sum(task.accounts.waf for task in tasks),
        "flop": sum(task.accounts.flop_until(now_ms) for task in tasks),
        "waf_over_time": [[at_ms, waf] for at_ms, waf in state.waf_history],
        "now_ms": now_ms,
        "cost": total_of(costs),
        "incidents": len(state.incidents),
        "failures": state.num_failures,
        "transitions_s": {kind: total / count for kind, (count, total) in sorted(state.transitions_s.items())},
        "allocation": allocation_view(state),
    }


def _name(value: enum.StrEnum | None) -> str | None:
    """Its text, also where a plain string stands in its place: a look at the state must not fail."""
    return None if value is None else str(value)


def incident_view(incident: Incident, state: State, now_ms: float) -> dict[str, Any]:
    """What `unicron incidents --json` prints: fields that scripts rely on, and what a person asks next."""
    lines = incident.text.split("\n")
    memory = [line for line in lines if line.startswith(OF_MEMORY)]
    text = [line for line in lines if line not in memory]
    return {
        "id": incident.id,
        "task": incident.task,
        "fault": incident.fault,
        "severity": _name(incident.severity),
        "root": {"node": incident.node, "rank": incident.rank},
        "method": _name(incident.method),
        "outcome": _name(incident.outcome),
        "opened_ms": incident.opened_ms,
        "detect_ms": incident.detect_ms,
        "decide_ms": incident.decide_ms,
        "resume_ms": incident.resume_ms,
        "lost_ms": incident.lost_ms,
        "state_source": _name(incident.state_source),
        "transfers": [_transfer(each) for each in incident.transfers],
        "iterations_lost": incident.iterations_lost,
        "micro_batches_recomputed": incident.micro_batches_recomputed,
        "groups_kept": incident.groups_kept,
        "groups_rebuilt": incident.groups_rebuilt,
        "recompute_ms": incident.recompute_ms,
        "phases_ms": incident.phases_ms,
        "kind": _name(incident.kind),
        "cause": incident.cause,
        "text": "\n".join(text),
        "memory": "\n".join(memory).replace(OF_MEMORY, ""),
        "where": incident.where,
        "log": incident.log,
        "category": incident.category,
        "rule": incident.rule,
        "meaning": incident.meaning,
        "is_only_told": incident.is_only_told,
        "worker": incident.worker,
        "iteration": incident.iteration,
        "micro_batch": incident.micro_batch,
        "stage": incident.stage.name.lower(),
        "epoch": incident.epoch,
        "part_of": incident.part_of,
        "slots": incident.slots,
        "missing_slots": incident.missing_slots,
        "cost": cost_of(incident, now_ms),
        "sub_healthy": incident.id in state.sub_healthy,
        "timeline": [[at_ms, text] for at_ms, text in incident.timeline],
    }
