"""Gradient sums: segments, their staged reduction, the sum of squares, and the step's scaling.

Segment 0 is the scalars (tokens, loss sum) of the last pipeline stage, so that they too are reduced exactly once; the
others are chunks of DDP's flat gradient buffers. A segment is copied to the staging area *in the arena*, reduced there,
and copied over its local sum only when complete (ARCHITECTURE, reduce): an aborted collective tears nothing, and an
heir of a process killed during the copy finishes it from the staging area.

On a GPU three segments are under way, each in a slot of the staging area: while one's result is copied, and this
process waits until that is in memory, the next ones are being reduced. One at a time, the GPU stood still twice a
segment: 1.5 % of an iteration of a model with 60 of them. (Larger segments would do as well, but their size is what
processes of several versions must have in common.)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron.healing.record import CommitResult
from unicron.training import compute
from unicron.training.chunks import Chunks
from unicron.training.eager_plan import PLACE_BYTES, EagerPlan
from unicron.training.ledger import Ledger
from unicron.training.memory import StateMemory

CHUNK_BYTES = 64 << 20
GPU_SLOTS = 3
SQUARED_ON_GPU = 1 << 24  # elements at a time


def num_slots(pool: Any) -> int:
    """Of the staging area. pool: the GPU's; None on a CPU, whose copies do nothing beside a collective."""
    return 1 if pool is None else GPU_SLOTS


def staging_bytes(
    model: Any, chunk_bytes: int = CHUNK_BYTES, element_bytes: int = 0, slots: int = 1, eager_bytes: int = 0
) -> int:
    """What the staging area must hold: the largest chunk, in each slot. element_bytes: of the sums, where they are
    others' size; eager_bytes: of results that wait for the reduction, behind the slots."""
    buffers = [b.grad_data for b in model.buffers + model.expert_parallel_buffers]
    largest = max((data.numel() * (element_bytes or data.element_size()) for data in buffers), default=0)
    slot = max(64, min(chunk_bytes, largest))
    if slots == 1 and not eager_bytes:
        return slot
    return slots * (-(-slot // PLACE_BYTES) * PLACE_BYTES) + eager_bytes


class ReduceHooks(NamedTuple):
    before: Callable[[int], None]  # each segment
    settle: Callable[[], None]  # returns when the results that this thread's stream waits for are there and good, and
    # raises when their group was ended meanwhile: on a GPU a collective that was ended returns like any other
    half_copied: Callable[[int], None]  # of a segment's result
    # a segment's all-reduce is about to begin; what is to be called when it has begun, if anything is
    enter: Callable[[int], Callable[[], None] | None] = lambda number: None
    complete: Callable[[int], None] = lambda number: None  # a segment's result, of which nothing is copied yet
    # the operation that a segment's result comes of, if it began under the backward (eager.py)
    eager: Callable[[int], Any] = lambda number: None


class Gradients:
    def __init__(
        self, model: Any, memory: StateMemory, chunk_bytes: int = CHUNK_BYTES, eager: EagerPlan | None = None,
        *, counts_dense: bool = True,
    ) -> None:  # fmt: skip
        """counts_dense: whether this rank's share of the norm has what is outside of experts: of the lanes one's has.
        chunk_bytes: of a segment."""
        self.model, self.memory = model, memory
        self.buffers = [b.grad_data for b in model.buffers + model.expert_parallel_buffers]
        self.segments: list[torch.Tensor] = [memory.scalars]
        for data in self.buffers:
            self.segments += data.split(max(1, chunk_bytes // data.element_size()))
        self._slots = num_slots(memory.pool)
        self._eager_places = {} if eager is None else eager.places
        self._eager_begin = memory.staging.numel() - (0 if eager is None else eager.nbytes)
        self._may_be_written = False  # a slot, by a collective that was under way when another failed
        self._counted = _counted_ranges((model.buffers if counts_dense else []) + model.expert_parallel_buffers)

    # ---------------------------------------------------------- local sums

    def zero(self) -> None:
        self.model.zero_grad_buffer()
        self.memory.scalars.zero_()

    def backward_begins(self, chunk: int) -> None:
        """Of a micro-batch, in a chunk of the model. In floating point DDP's own buffers are the sums."""

    def computed(self) -> None:
        """The last backward of a compute has ended."""

    def tie(self, model: Chunks, config: Any) -> None:
        """Gradient collectives inside the replica, in place: if one breaks, every member drops its sums."""
        compute.tie(model, config)

    def put_aside(self) -> list[torch.Tensor]:
        """Copies of the whole local sums, while more micro-batches are summed from zero."""
        return [segment.clone() for segment in self.segments]

    def put_back(self, aside: list[torch.Tensor], segments_reduced: int) -> None:
        """aside + new sums for segments still local; those already reduced contain everything and stay as they were."""
        for number, (segment, old) in enumerate(zip(self.segments, aside, strict=True)):
            if number < segments_reduced:
                segment.copy_(old)
            else:
                segment.add_(old)

    # ---------------------------------------------------------- reduction

    def reduce(
        self, ledger: Ledger, group: dist.ProcessGroup | None, shared: tuple[int, ...], hooks: ReduceHooks
    ) -> None:
        """All segments in order; `shared`: place in the group of who holds segment 0, 1, … reduced already."""
        if group is None:
            for number in range(len(self.segments)):
                self._nothing_to_add(ledger, number, hooks)
            return
        if self._may_be_written:
            self.memory.synchronize()  # the group is ended by now, and what was under way with it
            self._may_be_written = False
        own = ledger.segments_reduced
        for number, place in enumerate(shared):
            hooks.before(number)
            staged = self.staged(number)
            if place == dist.get_rank(group):
                staged.copy_(self.segments[number])
            dist.broadcast(staged, group_src=place, group=group)
            hooks.settle()
            if number >= own:
                self._take_result(ledger, number, hooks)
        self._may_be_written = self._slots > 1
        self._add_up_segments(ledger, group, len(shared), hooks)
        self._may_be_written = False

    def _nothing_to_add(self, ledger: Ledger, number: int, hooks: ReduceHooks) -> None:
        """The points of a reduction are come to also where it is of one rank: faults wait there."""
        hooks.before(number)
        then = hooks.enter(number)
        if then is not None:
            then()
        hooks.complete(number)
        hooks.half_copied(number)
        if number >= ledger.segments_reduced:  # an heir of the last replica must not take it for local again
            ledger.reduced(number + 1)

    def _add_up_segments(self, ledger: Ledger, group: dist.ProcessGroup, first: int, hooks: ReduceHooks) -> None:
        left = deque(range(first, len(self.segments)))
        under_way: deque[tuple[int, Any]] = deque()
        while left or under_way:
            while left and len(under_way) < self._slots:
                number = left.popleft()
                hooks.before(number)
                work = hooks.eager(number)
                staged = self.staged(number)
                if work is None:
                    staged.copy_(self.segments[number])
                then = hooks.enter(number)
                if work is None:
                    is_async = self._slots > 1 or then is not None
                    work = dist.all_reduce(staged, group=group, async_op=is_async)
                under_way.append((number, work))
                if then is not None:
                    then()
            number, work = under_way.popleft()
            if work is not None:
                work.wait()
            hooks.settle()
            self._take_result(ledger, number, hooks)

    def _take_result(self, ledger: Ledger, number: int, hooks: ReduceHooks) -> None:
        segment, staged = self.segments[number], self.staged(number)
        hooks.complete(number)
        ledger.copying(number)
        half = segment.numel() // 2
        segment[:half].copy_(staged[:half])
        hooks.half_copied(number)
        segment[half:].copy_(staged[half:])
        self.memory.synchronize_stream()
        ledger.reduced(number + 1)

    def finish_open_copy(self, ledger: Ledger) -> None:
        """An heir's first act: the predecessor died between a complete result and its copy."""
        if ledger.open_copy:
            number = ledger.segments_reduced
            self.segments[number].copy_(self.staged(number))
            self.memory.synchronize()
            ledger.reduced(number + 1)

    def staged(self, number: int) -> torch.Tensor:
        """The segment's place: in its slot, or its own, so that an heir finds it whoever reduced it and when."""
        segment = self.segments[number]
        nbytes = segment.numel() * segment.element_size()
        start = number % self._slots * (self._eager_begin // self._slots)
        if number in self._eager_places:
            start = self._eager_begin + self._eager_places[number]
        return self.memory.staging[start : start + nbytes].view(segment.dtype)

    # ---------------------------------------------------------- norm and scaling

    def finish(self) -> None:
        """The reduced sums, unscaled, are to be in the buffers."""

    def found(self, squares: float) -> float:
        """Above 0: this gradient, with this sum of squares, cannot be stepped with (CommitResult.found_inf)."""
        return 0.0 if math.isfinite(squares) else 1.0

    #: How often the iteration was computed before, at scales that were too large (exact mode; healing/record.py).
    repeat = 0

    def stepped(self, commit: CommitResult) -> None:
        """A step with this commit is done."""

    def own_state(self) -> dict[str, Any]:
        """What the next iteration's sums need, as plain values: it goes where the state goes."""
        return {}

    def load_own(self, state: dict[str, Any]) -> None:
        """state: as own_state() gave it, with whatever else."""

    @torch.no_grad()
    def sum_of_squares(self) -> float:
        """Of the reduced, unscaled gradient; parameters shared between ranks of the replica are counted on one."""
        return squares_of(data[start:end] for data, start, end in self._counted)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for data in self.buffers:
            data.mul_(factor)


@torch.no_grad()
def squares_of(spans: Iterable[torch.Tensor]) -> float:
    """Sum of squares. On a GPU piece by piece, each as a tree in float32: asked for more bits than it has, torch writes
    the whole span once more, in float64. (A CPU adds up in a row, and would lose them.)"""
    norms: list[torch.Tensor] = []
    total = 0.0
    for data in spans:
        if data.is_cuda:
            pieces = data.split(SQUARED_ON_GPU)
            norms += [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces]
        else:
            total += float(torch.linalg.vector_norm(data, dtype=torch.float64)) ** 2
    return float(torch.stack(norms).double().square().sum()) if norms else total


def _counted_ranges(buffers: list[Any]) -> list[tuple[torch.Tensor, int, int]]:
    """Ranges of the flat buffers that hold gradients this rank counts in the norm, merged where they touch."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    ranges: list[tuple[torch.Tensor, int, int]] = []
    for buffer in buffers:
        data = buffer.grad_data
        spans = []
        for param in buffer.params:
            if param_is_not_shared(param) and param_is_not_tensor_parallel_duplicate(param):
                start = (param.main_grad.data_ptr() - data.data_ptr()) // data.element_size()
                spans.append((start, start + param.main_grad.numel()))
        for start, end in sorted(spans):
            if ranges and ranges[-1][0] is data and ranges[-1][2] == start:
                ranges[-1] = (data, ranges[-1][1], end)
            else:
                ranges.append((data, start, end))
    return ranges
