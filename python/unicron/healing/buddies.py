"""Who keeps a copy of whose shard of the optimizer's state: the same rank of another replica, on another node. Pure.

A sharded optimizer has every shard once. With buddies each rank sends its own, after every step, to its holder and
keeps that of its ward: one lost node then takes no shard with it (PAPERS: Gemini; DESIGN 5.4).
"""

from __future__ import annotations

import msgspec

from unicron.types import EpochPlan, Rank


class Copy(msgspec.Struct, frozen=True):
    """A whole copy that a rank holds of another's shard, as it was when its iteration began."""

    rank: Rank  # whose
    iteration: int


def distance(plan: EpochPlan) -> int:
    """How many replicas further the holder is: the least number that puts most copies on another node."""
    layout = plan.layout
    nodes = {member.rank: member.node for member in plan.members}

    def apart(step: int) -> int:
        return sum(nodes[rank] != nodes[_further(plan, rank, step)] for rank in nodes)

    return max(range(1, layout.dp), key=lambda step: (apart(step), -step))


def holder_of(plan: EpochPlan, rank: Rank) -> Rank:
    """Who keeps the copy of this rank's shard."""
    return _further(plan, rank, distance(plan))


def ward_of(plan: EpochPlan, rank: Rank) -> Rank:
    """Whose shard this rank keeps a copy of."""
    return _further(plan, rank, -distance(plan))


def _further(plan: EpochPlan, rank: Rank, step: int) -> Rank:
    tp, dp, pp = plan.layout.coords(rank)
    return plan.layout.rank_of(tp, (dp + step) % plan.layout.dp, pp)
