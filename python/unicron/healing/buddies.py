"""Who keeps a copy of whose shard of the optimizer's state: the same rank of another replica, on another node. Pure.

A sharded optimizer has every shard once. With buddies each rank sends its own, after every step, to its holder and
keeps that of its ward: one lost node then takes no shard with it (Gemini, in-memory checkpoints).

Copies that are made beside the training, every few iterations, are older than what the others have. Each rank then
keeps its own shard as it sent it, too, and when one is lost everybody goes back to the newest iteration of which all
shards are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from unicron.types import EpochPlan, Rank

EVERY_MIN = 2  # iterations; below, a copy would overwrite one before all know that a newer one is whole


class Copy(msgspec.Struct, frozen=True):
    """A whole copy that a rank holds of another's shard, as it was when its iteration began."""

    rank: Rank  # whose
    iteration: int


def distance(plan: EpochPlan) -> int:
    """How many replicas further the holder is: the least number that puts most copies on another node."""
    return plan.buddy_distance()


def holder_of(plan: EpochPlan, rank: Rank) -> Rank:
    """Who keeps the copy of this rank's shard."""
    return plan.holder_of(rank)


def ward_of(plan: EpochPlan, rank: Rank) -> Rank:
    """Whose shard this rank keeps a copy of."""
    return plan.layout.further(rank, -distance(plan))


class Keeper(Protocol):
    """What is asked of a record (record.py)."""

    @property
    def rank(self) -> Rank: ...
    @property
    def copies(self) -> tuple[Copy, ...]: ...
    @property
    def kept(self) -> tuple[int, ...]: ...


def common_version(keepers: Iterable[Keeper]) -> tuple[int, dict[Rank, Rank]] | None:
    """(iteration, who has no own shard of it -> who sends a copy), the newest for which that can be said of everybody;
    each sends at most one."""
    everybody = sorted(keepers, key=lambda keeper: keeper.rank)
    for iteration in sorted({i for keeper in everybody for i in keeper.kept}, reverse=True):
        sources: dict[Rank, Rank] = {}
        lacking = [keeper.rank for keeper in everybody if iteration not in keeper.kept]
        for keeper in everybody:
            wards = [rank for rank in lacking if Copy(rank, iteration) in keeper.copies and rank not in sources]
            if wards and keeper.rank not in lacking:
                sources[wards[0]] = keeper.rank
        if sources.keys() == set(lacking):
            return iteration, sources
    return None
