"""What the healing machine tells a worker to do, one blocking thing at a time. Every action says why."""

from __future__ import annotations

import msgspec

from unicron.healing.record import CommitResult
from unicron.healing.resolve import Fetch
from unicron.types import EpochPlan, Rank


class Action(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    reason: str = ""


class Compute(Action, frozen=True):
    """Forward and backward of these micro-batches. extra: on top of whole local sums, kept aside meanwhile; eager: all
    of this rank's position reduce segments under the backward in this iteration."""

    iteration: int
    micro_batches: tuple[int, ...]
    dealt: tuple[int, ...]
    extra: bool = False
    eager: bool = False


class Tie(Action, frozen=True):
    """Gradient collectives inside the replica, out of a staging copy (of the extra sums only, if extra)."""

    extra: bool = False


class Reduce(Action, frozen=True):
    """Every segment not yet reduced: shared ones from the rank named, the others by all-reduce between replicas."""

    shared: tuple[Rank, ...] = ()  # source of segment 0, 1, ...


class Commit(Action, frozen=True):
    pass


class Confirm(Action, frozen=True):
    """Inside the replica: did anybody see the commit's result? Answered by Confirmed(result or None).

    Report text first if not empty: what broke here may not have broken for the others, who then wait in the commit for
    this replica, and it waits for its own members among them, until a new epoch frees them all.
    """

    result: CommitResult | None
    report: str = ""


class Step(Action, frozen=True):
    commit: CommitResult


class Repeat(Action, frozen=True):
    """The sums of the commit's iteration did not fit their scale: as if it had not begun, at the next smaller one."""

    commit: CommitResult


class Gather(Action, frozen=True):
    """Sharded optimizer: each replica's shard of the stepped parameters goes to all, in place; may be done again.

    late: it is begun, and waited for by the next Compute, bucket by bucket where the forward comes to them.
    """

    late: bool = False


class FinishGather(Action, frozen=True):
    """Wait for all of a late one: no Compute follows."""


class Settle(Action, frozen=True):
    """Inside the replica: did what was between replicas end well for every member? Answered by Settled.

    Report text first if not empty, as in Confirm.
    """

    ok: bool
    report: str = ""


class ExchangeInside(Action, frozen=True):
    """Publish my record, gather those of my replica's members. Interrupted (Broken) by a newer epoch."""

    plan: EpochPlan


class RebuildInside(Action, frozen=True):
    """Groups inside my replica that hold a touched rank (None: all of them). is_first: no member has stepped yet, so
    parameters that stages share are given by the first one to the others; harmless when that was done."""

    plan: EpochPlan
    touched: tuple[Rank, ...] | None
    is_first: bool = False


class ExchangeWorld(Action, frozen=True):
    plan: EpochPlan


class RebuildCross(Action, frozen=True):
    """All groups that span replicas."""

    plan: EpochPlan


class FetchState(Action, frozen=True):
    """Parameters and optimizer state of this rank's position, over the group of its replicas; a copy of a shard
    concerns its source and its target only, and may need the step of `commit` to be of `iteration`."""

    plan: EpochPlan
    fetch: Fetch
    iteration: int
    commit: CommitResult | None = None
    branch: int = 0  # see Record; of the target from here on


class GoBack(Action, frozen=True):
    """To this rank's own shard as it was kept of `iteration`; the parameters are gathered next."""

    iteration: int
    branch: int


class LoadCheckpoint(Action, frozen=True):
    plan: EpochPlan
    path: str


class AwaitPlan(Action, frozen=True):
    """Wait for a plan newer than after_epoch; bounded by the worker's own limit. Report text first if not empty."""

    after_epoch: int
    report: str = ""
    inside: bool = False
    late: bool = False  # as in Broken


class ReportStateLost(Action, frozen=True):
    positions: tuple[int, ...]
    iteration: int


class EndIteration(Action, frozen=True):
    """The iteration is committed and stepped; control returns to the script."""

    commit: CommitResult
    healed: bool  # a recovery ended in it: nothing of the plan is left to do


class Ready(Action, frozen=True):
    """The script may enter its loop at this iteration; what the machine does next waits until it does."""

    iteration: int


class AwaitOthers(Action, frozen=True):
    """The script's loop is over: wait for every member's to be, or for a newer plan. Who waits too long goes on."""

    plan: EpochPlan
    healed: bool  # a recovery ended here: nothing of the plan is left to do


class Over(Action, frozen=True):
    """The script may go on after its loop: all have the last commit, and nobody meets again."""

    healed: bool = False  # a recovery ended here, alone: nobody is there to be met


class Leave(Action, frozen=True):
    """The newest plan has no place for this worker."""


AnyAction = (
    Compute | Tie | Reduce | Commit | Confirm | Step | Repeat | Gather | FinishGather | Settle
    | ExchangeInside | RebuildInside | ExchangeWorld | RebuildCross | FetchState | GoBack | LoadCheckpoint
    | AwaitPlan | ReportStateLost | EndIteration | Ready | AwaitOthers | Over | Leave
)  # fmt: skip
