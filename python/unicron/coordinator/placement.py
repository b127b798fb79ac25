"""Which node each role of a replica goes to: a replica stays in one node where it fits (MECHANICS
1.11).

Otherwise losing one node could take the same pipeline stage of every replica, hence the last holder
of a state.
First fit over the nodes in their order; the planner will choose better ones later, this one is the
rule it must keep.
"""

from __future__ import annotations

from unicron.coordinator.state import Purpose, State, TaskState, node_order
from unicron.coordinator.transitions import TERMINAL, NodePhase
from unicron.types import Layout, Rank


def free_slots(state: State) -> dict[str, int]:
    """Slots without a role, on the nodes that are up, in node order."""
    free = {n.name: n.slots for n in state.nodes.values() if n.phase is NodePhase.UP}
    for task in state.tasks.values():
        if task.phase in TERMINAL:
            continue
        for node in _roles(task).values():
            if node in free:
                free[node] -= 1
    return dict(sorted(free.items(), key=lambda item: node_order(item[0])))


def _roles(task: TaskState) -> dict[Rank, str]:
    roles = dict(task.placement)
    for worker in task.workers.values():
        if worker.purpose is Purpose.JOINER:
            roles[worker.rank] = worker.node
    return roles


def place_replica(layout: Layout, replica: int, free: dict[str, int]) -> dict[Rank, str] | None:
    """Node of each role of one replica, taking from `free`; None (and nothing taken) when it does
    not fit.
    """
    ranks = layout.replica_ranks(replica)
    home = next((n for n, count in free.items() if count >= len(ranks)), None)
    if home is not None:
        free[home] -= len(ranks)
        return dict.fromkeys(ranks, home)
    if sum(max(count, 0) for count in free.values()) < len(ranks):
        return None
    placed: dict[Rank, str] = {}
    for rank in ranks:
        node = next(n for n, count in free.items() if count > 0)
        free[node] -= 1
        placed[rank] = node
    return placed


def place_replicas(
    layout: Layout, replicas: tuple[int, ...], free: dict[str, int]
) -> dict[Rank, str]:
    """As many of these replicas as fit."""
    placed: dict[Rank, str] = {}
    for replica in replicas:
        placed.update(place_replica(layout, replica, free) or {})
    return placed
