"""What a failure means beside the recent ones: the same place, the same node, all nodes at once. Pure.

One failure says what it is; its neighbours say whose. Three counts, the first that holds:

1. *the same place*: the same signature at the same (iteration, micro-batch) in another incarnation is the code's or the
   data's fault: FATAL, and no node is blamed;
2. *all at once*: the same kind on most nodes within a moment is the job's or storage's fault; no node is blamed;
3. *the same node*: several failures of a node at different work within a window are the node's: SEV1.

A fault that was seen on the hardware (SEV1) is never talked down by a count of place, because a broken GPU fails at the
same place as well. What only echoes another failure is to be left out by the caller.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from unicron.diagnosis.words import Scope
from unicron.types import Rank, Severity


class CountLimits(msgspec.Struct, frozen=True):
    place_max: int = 2  # so often at one place, this one included, is FATAL
    node_max: int = 2  # so many failures of one node, this one included, are the node's
    node_window_ms: float = 24 * 3600 * 1000.0
    moment_ms: float = 5000.0  # what happens within it happens at once
    nodes_share_min: float = 0.75  # of all nodes
    nodes_min: int = 2  # fewer nodes than this are not "all"


class Seen(msgspec.Struct, frozen=True):
    """A failure as the counts see it. `signature` is what makes two failures the same; "" makes none."""

    at_ms: float
    node: str
    severity: Severity
    scope: Scope
    signature: str = ""
    rank: Rank = -1
    incarnation: int = 0
    iteration: int = -1  # -1: not known
    micro_batch: int = -1


class Counted(msgspec.Struct, frozen=True):
    """The verdict with the counts in it. `reason` is empty when they changed nothing."""

    severity: Severity
    scope: Scope
    reason: str = ""
    count: int = 1


def count(incident: Seen, recent: Iterable[Seen], num_nodes: int, limits: CountLimits | None = None) -> Counted:
    """The severity and scope of an incident beside the recent ones.

    Args:
        recent: earlier incidents and those of the same moment, in any order; the incident itself may be among them.
        num_nodes: nodes of the task, at least 1.
    """
    limits = limits or CountLimits()
    others = [seen for seen in recent if seen != incident and seen.at_ms <= incident.at_ms + limits.moment_ms]
    plain = Counted(incident.severity, incident.scope)
    if incident.severity in (Severity.INFO, Severity.FATAL):
        return plain
    return (
        _same_place(incident, others, limits)
        or _all_at_once(incident, others, num_nodes, limits)
        or _same_node(incident, others, limits)
        or plain
    )


def moment_of(iteration: int, micro_batch: int) -> str:
    """When in its training a worker failed, in words; micro-batch -1 is none: before the first, or between two."""
    if iteration < 0:
        return "its start"
    return f"iteration {iteration}, " + (
        f"micro-batch {micro_batch}" if micro_batch >= 0 else "outside any micro-batch"
    )


def _same_place(incident: Seen, others: list[Seen], limits: CountLimits) -> Counted | None:
    if not incident.signature or incident.iteration < 0 or incident.severity is Severity.SEV1:
        return None
    again = [
        seen for seen in others
        if seen.signature == incident.signature and seen.rank == incident.rank
        and (seen.iteration, seen.micro_batch) == (incident.iteration, incident.micro_batch)
        and (seen.node, seen.incarnation) != (incident.node, incident.incarnation)
    ]  # fmt: skip
    times = len(again) + 1
    if times < limits.place_max:
        return None
    where = moment_of(incident.iteration, incident.micro_batch)
    reason = f"{times} times the same at {where}, in different incarnations: code or data, not the node"
    return Counted(Severity.FATAL, Scope.JOB, reason, times)


def _all_at_once(incident: Seen, others: list[Seen], num_nodes: int, limits: CountLimits) -> Counted | None:
    if not incident.signature:
        return None
    nodes = {incident.node} | {
        seen.node for seen in others
        if seen.signature == incident.signature and abs(seen.at_ms - incident.at_ms) <= limits.moment_ms
    }  # fmt: skip
    if len(nodes) < max(limits.nodes_min, limits.nodes_share_min * num_nodes):
        return None
    scope = incident.scope if incident.scope is Scope.STORAGE else Scope.JOB
    severity = Severity.SEV2 if incident.severity is Severity.SEV1 else incident.severity
    reason = f"the same on {len(nodes)} of {num_nodes} nodes at once: {scope.value}, not a node"
    return Counted(severity, scope, reason, len(nodes))


def _same_node(incident: Seen, others: list[Seen], limits: CountLimits) -> Counted | None:
    if incident.scope in (Scope.JOB, Scope.STORAGE) or incident.severity is Severity.SEV1:
        return None
    work = {
        (seen.iteration, seen.micro_batch, seen.at_ms) for seen in others
        if seen.node == incident.node and incident.at_ms - seen.at_ms <= limits.node_window_ms
        and seen.severity is not Severity.INFO and seen.scope not in (Scope.JOB, Scope.STORAGE)
        and _is_other_work(seen, incident)
    }  # fmt: skip
    times = len(work) + 1
    if times < limits.node_max:
        return None
    return Counted(Severity.SEV1, Scope.NODE, f"{times} failures of node {incident.node} at different work", times)


def _is_other_work(seen: Seen, incident: Seen) -> bool:
    place = (seen.iteration, seen.micro_batch)
    return seen.iteration < 0 or place != (incident.iteration, incident.micro_batch)
