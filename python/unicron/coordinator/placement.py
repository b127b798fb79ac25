"""Which node each role of a replica goes to: a replica stays in one node where it fits (MECHANICS 1.11).

Otherwise losing one node could take the same pipeline stage of every replica, hence the last holder of a state.
First fit over the slots it is given, in node order. Which slots those are the planner says (deciding.py).
"""

from __future__ import annotations

from unicron.coordinator.state import ON_SLOTS, Purpose, State, TaskState, node_order
from unicron.coordinator.transitions import TERMINAL, NodePhase
from unicron.types import Layout, Rank


def free_slots(state: State) -> dict[str, int]:
    """Slots that nobody holds or is about to leave, on the nodes that are up and not drained, in node order."""
    free = {n.name: n.slots for n in state.nodes.values() if n.phase is NodePhase.UP and not n.is_drained}
    for task in state.tasks.values():
        for node in () if task.phase in TERMINAL else held_slots(task):
            if node in free:
                free[node] -= 1
    return dict(sorted(free.items(), key=lambda item: node_order(item[0])))


def held_slots(task: TaskState) -> list[str]:
    """The node of every slot it has: its roles' (a lost role keeps its slot), and those of processes that get ready
    for a role or whose end is ordered and not seen yet. A standby has its own, also beside the role that it is for."""
    others = [
        w.node for w in task.workers.values()
        if w.purpose in ON_SLOTS and (w.purpose is Purpose.STANDBY or task.placement.get(w.rank) != w.node)
    ]  # fmt: skip
    return [*task.placement.values(), *others]


def place_replica(layout: Layout, replica: int, free: dict[str, int]) -> dict[Rank, str] | None:
    """Node of each role of one replica, taking from `free`; None (and nothing taken) when it does not fit."""
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
