"""A rank's account of itself, exchanged while healing, and the result of a commit.

A record says which version of the parameters the rank has, what its local gradient sums contain and how far they are
reduced. It is read out of the arena's header, so an heir can give its predecessor's account.
"""

from __future__ import annotations

import msgspec

from unicron.healing.buddies import Copy
from unicron.types import Rank, Stage

VETO = 1e9  # above any number of members
OVERFLOW = float(1 << 20)  # in found_inf, of one member: a scale was too large; less: something was not finite


class CommitResult(msgspec.Struct, frozen=True):
    """What the commit all-reduce gave: with it a rank can step alone. Sums are over the whole task."""

    iteration: int
    tokens: float
    sumsq: float  # sum of squares of the unscaled reduced gradient, each position counted once
    found_inf: float
    loss_sum: float
    hold: float = 0.0  # sum of the members' hold_vote(); above 0: after this iteration everybody saves and holds
    repeat: int = 0  # Record.repeat of everybody who made it

    @property
    def overflowed(self) -> bool:
        """Exact mode: sums did not fit their scale. Nobody steps; all compute the iteration again at the next smaller
        one. (What is not finite at any scale is no matter of it: that step is left out.)"""
        return self.found_inf >= OVERFLOW and self.found_inf % OVERFLOW == 0.0


def hold_vote(*, told: bool, may_hold: bool) -> float:
    """One member's share of CommitResult.hold: it was told to save and hold, and nobody may be where it cannot."""
    return (1.0 if told else 0.0) - (0.0 if may_hold else VETO)


class Record(msgspec.Struct, frozen=True):
    """iteration counts the committed steps in the parameters, and so names the iteration being worked on."""

    rank: Rank
    iteration: int
    stage: Stage
    has_state: bool = True  # parameters and optimizer state are whole (not torn, not merely initialised)
    begun: bool = False  # this iteration's micro-batches were dealt (over `dealt`)
    dealt: tuple[int, ...] = ()  # replicas over which they were dealt
    done: tuple[int, ...] = ()  # micro-batches in the local sums, when summed
    summed: bool = False  # local sums complete and tied: the rank reached the reduction
    segments_reduced: int = 0
    num_segments: int = 0
    commit: CommitResult | None = None  # of the newest commit this rank knows
    gathered: bool = True  # parameters hold the shards of all replicas (always so, unless the optimizer is sharded)
    met_replicas: tuple[int, ...] = ()  # live replicas of the newest plan this rank met; a predecessor's are not known
    # The epoch in which the state it has last went back, to a checkpoint or to buddies' copies: what was committed
    # before is done again, so state and commits of different branches do not go together, whatever their iterations.
    branch: int = 0
    repeat: int = 0  # exact mode: how often this iteration was computed before, at scales that were too large
    # Of buddies, filled in when records are exchanged: whole copies of other ranks' shards, and iterations of which its
    # own shard is kept.
    copies: tuple[Copy, ...] = ()
    kept: tuple[int, ...] = ()
    side_by_side: bool = False  # it knows sources that serve side by side: 0.4.0 did not, and may be in the same group
    loop: int = -1  # filled in when records are exchanged: the iteration that its script is in, -1 for none
    # Filled in when records are exchanged: what it can reduce under the backward, in a word that must be the same in
    # all of a position (training/eager_plan.py); "" for nothing, and from a worker of 0.5.0, which cannot.
    eager: str = ""
    late: bool = False  # filled in when records are exchanged: its forward can wait for the parameters it gathers
    # Filled in when records are exchanged: after its script's loop it waits for the others'; 0.5.0 does not.
    waits_at_end: bool = False
    inside_epoch: int = 0  # epoch in which this replica's inside groups were last rebuilt, as this rank knows
    inside_touched: tuple[Rank, ...] = ()  # ranks of this replica touched since, as this rank knows


def encode_record(record: Record) -> bytes:
    return msgspec.msgpack.encode(record)


def decode_record(data: bytes) -> Record:
    return msgspec.msgpack.decode(data, type=Record)
