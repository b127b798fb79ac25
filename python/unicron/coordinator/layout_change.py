"""A change of a task's layout as a value: where it stands, where its roles go, and how it is called off.

Nothing of it is journaled before it is decided: until the plan of the new layout is out, the task is what it was. A
coordinator that comes back in the middle calls it off (reshaping.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unicron.messages import LayoutReady
from unicron.types import EpochPlan, Layout, Rank

if TYPE_CHECKING:
    from unicron.coordinator.state import State, TaskState

MOVES_KEPT_MAX = 32


@dataclass(slots=True)
class LayoutChange:
    layout: Layout
    placement: dict[Rank, str]  # node of every role of it
    reason: str
    begun_ms: float
    plan: EpochPlan | None = None  # announced to the members and joiners; published when all of them are ready
    ready: dict[str, LayoutReady] = field(default_factory=dict)  # by worker
    failed: str = ""  # somebody could not take it over
    is_width: bool = False  # the planner's, of a task that lost nodes or has them back (narrowing.py)
    decided: int = 0  # number of the newest decision with which it is known to agree


def slots_for(state: State, task: TaskState) -> dict[str, int]:
    """Slots that the task may use for another layout, by node: its own, first, and those that nobody has or shall have,
    or stands by on for another task.

    Its own nodes come first, in the order of what it has there: what stays on a node crosses none.
    """
    own: dict[str, int] = {}
    for home in task.slotted.values():
        own[home] = own.get(home, 0) + 1
    free = dict(own)
    standing = {node for name, nodes in state.allocation.standbys.items() for node in nodes if name != task.name}
    for node in state.nodes.values():
        if node.is_usable and node.name not in standing:
            others = [t for t in state.tasks.values() if t is not task and not t.is_over]
            held = sum(there == node.name for t in others for there in t.placement.values())
            meant = sum(there == node.name for t in others for there in state.target(t.name).values())
            kept = min(own.get(node.name, 0), node.slots - meant)  # what it has to give to others it may not keep
            free[node.name] = max(kept, node.slots - max(held, meant))
    order = sorted(free, key=lambda name: (-own.get(name, 0), len(name), name))
    return {name: free[name] for name in order if free[name] > 0}


def place_layout(layout: Layout, slots: dict[str, int]) -> dict[Rank, str] | None:
    """Node of every role, a replica in a node where it fits; None when there are not enough slots."""
    from unicron.coordinator.placement import place_replica  # which knows the state, and the state a change

    free: dict[str, int] = dict(slots)
    placement: dict[Rank, str] = {}
    for replica in range(layout.num_replicas):
        placed = place_replica(layout, replica, free)
        if placed is None:
            return None
        placement.update(placed)
    return placement


def seats(change: LayoutChange, members: dict[str, list[str]]) -> tuple[dict[Rank, str], dict[Rank, str]]:
    """(role -> worker that holds one now, role -> node where a newcomer is needed). members: by node, by rank."""
    left = {node: list(workers) for node, workers in members.items()}
    taken: dict[Rank, str] = {}
    missing: dict[Rank, str] = {}
    for rank, node in sorted(change.placement.items()):
        if left.get(node):
            taken[rank] = left[node].pop(0)
        else:
            missing[rank] = node
    return taken, missing
