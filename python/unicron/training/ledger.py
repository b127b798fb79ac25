"""The ledger: a rank's record, kept in the arena's header so that an heir can read it.

One word holds the reduction's progress (2 x segments reduced, +1 while a complete result is being copied over the
segment's local sum), because an heir must never see half of an update.
"""

from __future__ import annotations

from collections.abc import Iterable

from unicron import _core
from unicron.healing.record import CommitResult, Record
from unicron.types import Rank, Stage


class Ledger:
    """Write side for the owner, read side for an heir."""

    def __init__(self, fd: int) -> None:
        self.header = _core.ArenaHeader(fd)

    @classmethod
    def of_new_arena(cls, fd: int, digest: str, content_bytes: int) -> Ledger:
        """Formatted, and torn until its owner says what is in it: one that dies before leaves nothing to an heir."""
        _core.ArenaHeader(fd).format(digest, content_bytes)
        ledger = cls(fd)
        ledger.begin_step()
        return ledger

    def write(self, record: Record) -> None:
        """Everything but the reduction's progress and the micro-batches begun, which are written as they happen."""
        header = self.header
        header.iteration = record.iteration
        header.dealt_replicas = sum(1 << r for r in record.dealt)
        header.summed = record.summed
        header.torn = not record.has_state
        header.ungathered = not record.gathered
        header.epoch = record.branch
        if record.commit is None:
            self.forget_commit()
        else:
            self._write_commit(record.commit)
        if not record.begun:
            header.set_done(b"")
        header.reduction = 2 * record.segments_reduced
        header.repeat = record.repeat  # after the sums of the last try were given up: they are not this one's
        header.stage = int(record.stage)

    def _write_commit(self, commit: CommitResult) -> None:
        header = self.header
        if header.has_commit and (header.commit_iteration, header.commit_repeat) == (commit.iteration, commit.repeat):
            return
        header.has_commit = False
        header.commit_iteration, header.commit_repeat = commit.iteration, commit.repeat
        header.commit_tokens, header.commit_sumsq = commit.tokens, commit.sumsq
        header.commit_found_inf, header.commit_loss_sum = commit.found_inf, commit.loss_sum
        header.has_commit = True

    def forget_commit(self) -> None:
        """What was committed is to be done again: an heir must not step with its result."""
        self.header.has_commit = False

    def set_branch(self, branch: int) -> None:
        """Of the state that is about to be whole here (healing/record.py); no commit of another is kept beside it."""
        self.forget_commit()
        self.header.epoch = branch

    def begin_step(self, *, undoable: bool = False) -> None:
        """undoable: chunk by chunk with an undo area, so that an heir can finish it (undoable_step.py)."""
        self.header.open_step = 2 if undoable else 0
        self.header.torn = True

    def mark_chunk(self, mark: int) -> None:
        self.header.open_step = 2 + mark

    def mark_chunk_on_stream(self, mark: int, device: int, stream: int) -> None:
        """The GPU writes it, when the stream gets here."""
        self.header.open_step_on_stream(2 + mark, device, stream)

    def open_step(self) -> tuple[CommitResult, int] | None:
        """(the commit to step with, the last mark) of a predecessor that died in an undoable step."""
        header = self.header
        is_open = header.torn and header.open_step >= 2 and header.has_commit
        if not is_open or header.commit_iteration != header.iteration:
            return None
        return self._commit(), header.open_step - 2

    def end_step(self, iteration: int, extra: bytes, *, gathered: bool = True) -> None:
        """The parameters now contain the step; the last word makes them usable."""
        self.header.ungathered = not gathered
        self.header.set_extra(extra)
        self.header.iteration = iteration
        self.header.summed = False
        self.header.reduction = 0
        self.header.dealt_replicas = 0
        self.header.repeat = 0
        self.header.set_done(b"")
        self.header.stage = int(Stage.IDLE)
        self.header.torn = False

    # ---------------------------------------------------------- reduction

    def copying(self, segment: int) -> None:
        """The staging area holds the complete result of this segment."""
        self.header.reduction = 2 * segment + 1

    def reduced(self, num_segments: int) -> None:
        self.header.reduction = 2 * num_segments

    @property
    def segments_reduced(self) -> int:
        return self.header.reduction // 2

    @property
    def open_copy(self) -> bool:
        return bool(self.header.reduction % 2)

    # ---------------------------------------------------------- micro-batches begun

    def set_begun(self, micro_batches: Iterable[int]) -> None:
        bits = bytearray()
        for number in micro_batches:
            if number >= len(bits) * 8:
                bits.extend(bytes(number // 8 + 1 - len(bits)))
            bits[number // 8] |= 1 << number % 8
        self.header.set_done(bytes(bits))

    def begun(self) -> set[int]:
        bits = self.header.done()
        return {8 * i + j for i, byte in enumerate(bits) for j in range(8) if byte >> j & 1}

    # ---------------------------------------------------------- for an heir

    def _commit(self) -> CommitResult:
        header = self.header
        return CommitResult(
            header.commit_iteration, header.commit_tokens, header.commit_sumsq,
            header.commit_found_inf, header.commit_loss_sum, repeat=header.commit_repeat,
        )  # fmt: skip

    def read(self, rank: Rank, num_segments: int) -> Record:
        """The account of the predecessor. Its inside groups are unknown to the heir."""
        header = self.header
        dealt = tuple(r for r in range(64) if header.dealt_replicas >> r & 1)
        commit = self._commit() if header.has_commit else None
        return Record(
            rank=rank,
            iteration=header.iteration,
            stage=Stage(header.stage),
            has_state=not header.torn,
            begun=bool(dealt),
            dealt=dealt,
            done=tuple(sorted(self.begun())) if header.summed else (),
            summed=bool(header.summed) and bool(dealt),
            segments_reduced=min(self.segments_reduced, num_segments),
            num_segments=num_segments,
            commit=commit,
            gathered=not header.ungathered,
            branch=header.epoch,
            repeat=header.repeat,
        )
