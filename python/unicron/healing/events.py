"""What a worker tells its healing machine. Facts, in the past tense."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unicron.healing.record import CommitResult, Record
from unicron.types import EpochPlan


class Event(msgspec.Struct, frozen=True, tag=True):
    pass


class PlanArrived(Event, frozen=True):
    """Noted at once; it takes effect at the next point where the machine may act on it. Answered by no action."""

    plan: EpochPlan


class Joined(Event, frozen=True):
    """The worker has a role, named by plan (it is one of its members), and gives the account it starts with."""

    plan: EpochPlan
    record: Record


class IterationBegun(Event, frozen=True):
    """The script called train_step."""

    iteration: int


class LoopEnded(Event, frozen=True):
    """The script asks for no more iterations."""


class Done(Event, frozen=True):
    """The outstanding action is done (one without a result of its own)."""


class RecordsGathered(Event, frozen=True):
    records: Sequence[Record]


class OthersLeft(Event, frozen=True):
    """Instead of records: all the others had left their loops before this rank's role was lost, and meet nobody."""


class CommitDone(Event, frozen=True):
    result: CommitResult


class Confirmed(Event, frozen=True):
    result: CommitResult | None


class Settled(Event, frozen=True):
    """Every member of the replica completed what was between replicas; or not every one did."""

    ok: bool


class CheckpointLoaded(Event, frozen=True):
    iteration: int


class Broken(Event, frozen=True):
    """The outstanding action did not complete: a collective raised, or a newer epoch interrupted the wait."""

    inside: bool
    text: str = ""
    segments_reduced: int = -1  # after a broken Reduce: how many are whole
    late: bool = False  # it was a gather that a Compute waited for; inside: others of the replica may wait for this one


AnyEvent = (
    PlanArrived | Joined | IterationBegun | LoopEnded | Done | RecordsGathered | OthersLeft | CommitDone
    | Confirmed | Settled | CheckpointLoaded | Broken
)  # fmt: skip
