"""From counts to nodes: what csrc/planner/placement.h is told of the cluster, and its answer as moves."""

from __future__ import annotations

import msgspec

from unicron import _core
from unicron.planner.cluster import Cluster, Node
from unicron.planner.situation import Situation

STANDBY = "standby"  # the place of standbys that were spent: no node of the file


class Move(msgspec.Struct, frozen=True):
    task: str
    node: str
    change: int  # slots gained (or lost, below 0) on this node


def placed(
    cluster: Cluster, situation: Situation, allocation: dict[str, int], how: str
) -> tuple[tuple[Move, ...], dict[str, int]]:
    """Moves, and slots per task for which no node has room in whole groups."""
    nodes = list(situation.nodes)
    if how == "wait":  # broken slots stay theirs: nothing is placed on or taken from them
        nodes = [*cluster.nodes, *nodes[len(cluster.nodes) :]]
    elif how == "standby":
        nodes.append(Node(STANDBY, situation.lost_slots - situation.lost_free))
    domains = {domain: index for index, domain in enumerate(dict.fromkeys(_domain(node) for node in nodes))}
    spaces = [(node.usable, domains[_domain(node)], node.faults) for node in nodes]
    lost = {} if how == "wait" else situation.lost
    needs = [
        (
            allocation[task.name],
            task.group,
            [task.holds.get(node.name, 0) - lost.get((task.name, node.name), 0) for node in nodes],
        )
        for task in cluster.tasks
    ]
    slots, unplaced, _ = _core.planner_place(spaces, needs)
    moves = [
        Move(task.name, node.name, after - task.holds.get(node.name, 0))
        for task, row in zip(cluster.tasks, slots, strict=True)
        for node, after in zip(nodes, row, strict=True)
        if after != task.holds.get(node.name, 0)
    ]
    missing = {task.name: count for task, count in zip(cluster.tasks, unplaced, strict=True) if count}
    return tuple(moves), missing


def _domain(node: Node) -> str:
    return node.domain or f"node {node.name}"
