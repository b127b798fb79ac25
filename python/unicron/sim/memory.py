"""A worker's arena in the simulator: it outlives the process, and holds what an heir may read.

Gradient sums are modelled exactly: a segment's value is the sorted tuple of the micro-batches added to it, so
summing is concatenation and a micro-batch counted twice, or not at all, is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron.healing.buddies import Copy
from unicron.healing.record import CommitResult, Record
from unicron.types import Rank, Stage

NUM_SEGMENTS = 2
Sum = tuple[int, ...]


def add(*sums: Sum) -> Sum:
    return tuple(sorted(m for s in sums for m in s))


@dataclass
class Memory:
    """The words of the arena's header plus the gradient segments (training/ledger.py has the real one)."""

    iteration: int = 0
    is_torn: bool = False
    is_wreck: bool = False  # what no record can hide: a step began here and did not end (for the checkers)
    dealt: tuple[int, ...] = ()
    begun: set[int] = field(default_factory=set)
    is_summed: bool = False
    reduced: int = 0  # segments that hold complete results
    commit: CommitResult | None = None
    stage: Stage = Stage.IDLE
    gathered: bool = True
    is_tied: bool = False  # what stages share has the first stage's values (no record says so: for the checkers)
    branch: int = 0
    repeat: int = 0
    copies: list[Copy] = field(default_factory=list)  # of its ward's shard, two at most
    kept: list[int] = field(default_factory=list)  # iterations of which it has its own, two at most
    segments: list[Sum] = field(default_factory=lambda: [()] * NUM_SEGMENTS)

    def write(self, record: Record) -> None:
        self.iteration = record.iteration
        self.dealt = record.dealt
        self.is_summed = record.summed
        self.is_torn = not record.has_state
        self.commit = record.commit
        self.branch = record.branch
        self.reduced = record.segments_reduced
        self.repeat = record.repeat
        self.stage = record.stage
        self.gathered = record.gathered
        if not record.begun:
            self.begun = set()

    def end_step(self, iteration: int, *, gathered: bool = True) -> None:
        self.iteration = iteration
        self.gathered, self.is_tied = gathered, True
        self.is_summed, self.is_torn, self.is_wreck = False, False, False
        self.reduced, self.dealt, self.repeat = 0, (), 0
        self.begun = set()
        self.stage = Stage.IDLE

    def keep(self, copy: Copy) -> None:
        """It came, whole."""
        others = [known for known in self.copies if known != copy]
        self.copies = [copy, *others[:1]]

    def make_room(self, iteration: int, common: int) -> None:
        """For one more of each: what is least worth goes, never what everybody could go back to."""

        def worth(at: int) -> tuple[bool, int]:
            return at == common, at if at <= iteration else -1

        while len(self.copies) > 1:
            self.copies.remove(min(self.copies, key=lambda copy: worth(copy.iteration)))
        while len(self.kept) > 1:
            self.kept.remove(min(self.kept, key=worth))

    def forget(self, after: int) -> None:
        """State went back: what is of later iterations will be made again."""
        self.copies = [copy for copy in self.copies if copy.iteration <= after]
        self.kept = [at for at in self.kept if at <= after]

    def read(self, rank: Rank) -> Record:
        """The predecessor's account, as an heir reads it."""
        return Record(
            rank=rank,
            iteration=self.iteration,
            stage=self.stage,
            has_state=not self.is_torn,
            begun=bool(self.dealt),
            dealt=self.dealt,
            done=tuple(sorted(self.begun)) if self.is_summed else (),
            summed=self.is_summed and bool(self.dealt),
            segments_reduced=self.reduced,
            num_segments=NUM_SEGMENTS,
            commit=self.commit,
            gathered=self.gathered,
            branch=self.branch,
            repeat=self.repeat,
        )
