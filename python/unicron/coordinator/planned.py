"""What a decision was solved from: enough to solve it again. For checkers; it is not journaled."""

from __future__ import annotations

from typing import NamedTuple

from unicron.planner.cluster import Cluster


class Planned(NamedTuple):
    number: int  # of the allocation
    cluster: Cluster
    events: tuple[str, ...]
    counts: dict[str, int]  # task -> slots, as the planner said
    unplaced: dict[str, int]  # task -> of them, those that found no node with room
    reward: float = 0.0  # FLOP
