"""What every task shall hold, as decided, with the facts it was decided from. A value; the journal keeps it whole.

The next decision starts from here and not from how far the tasks have come in following it: so the same facts in the
same order give the same decisions, and a coordinator that comes back does not change its mind.
"""

from __future__ import annotations

import msgspec

from unicron.types import Layout, Rank


class Allocation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 0  # grows with every decision
    nodes: dict[str, int] = {}  # usable node -> its slots, as seen
    tasks: tuple[str, ...] = ()  # that wanted slots
    targets: dict[str, dict[Rank, str]] = {}  # task -> role -> node; a task without slots has none
    standbys: dict[str, tuple[str, ...]] = {}  # task -> nodes that stand warm for it, each with all it may have to take
    trigger: str = ""  # what had happened, in words
    events: tuple[str, ...] = ()  # the same, as the planner was asked
    from_table: bool = False  # found among the plans made beforehand, else solved
    waf: float = 0.0  # FLOP/s, weighted
    reward: float = 0.0  # FLOP until the next failure
    reason: str = ""
    layouts: dict[str, Layout] = {}  # task -> the layout that it shall go over to from these roles (reshaping.py)
    notes: dict[str, str] = {}  # task -> why it gets what it gets
    at_ms: float = 0.0
