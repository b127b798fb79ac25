"""Gradient sums: segments, their staged reduction, the sum of squares, and the step's scaling.

Segment 0 is the scalars (tokens, loss sum) of the last pipeline stage, so that they too are reduced exactly once; the
others are chunks of DDP's flat gradient buffers. A segment is copied to the staging area *in the arena*, reduced there,
and copied over its local sum only when complete (ARCHITECTURE, reduce): an aborted collective tears nothing, and an
heir of a process killed during the copy finishes it from the staging area.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unicron.healing.record import CommitResult
from unicron.training import compute
from unicron.training.chunks import Chunks
from unicron.training.ledger import Ledger
from unicron.training.memory import StateMemory

CHUNK_BYTES = 64 << 20


def staging_bytes(model: Any, chunk_bytes: int = CHUNK_BYTES, element_bytes: int = 0) -> int:
    """What the staging area must hold: the largest chunk. element_bytes: of the sums, where they are others' size."""
    buffers = [b.grad_data for b in model.buffers + model.expert_parallel_buffers]
    largest = max((data.numel() * (element_bytes or data.element_size()) for data in buffers), default=0)
    return max(64, min(chunk_bytes, largest))


class ReduceHooks(NamedTuple):
    before: Callable[[int], None]  # each segment
    settle: Callable[[], None]  # returns when a collective's result is there and good, and raises when its group was
    # ended meanwhile: on a GPU a collective that was ended returns like any other
    half_copied: Callable[[int], None]  # of a segment's result


class Gradients:
    def __init__(self, model: Any, memory: StateMemory, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.model, self.memory = model, memory
        self.buffers = [b.grad_data for b in model.buffers + model.expert_parallel_buffers]
        self.segments: list[torch.Tensor] = [memory.scalars]
        for data in self.buffers:
            self.segments += data.split(max(1, chunk_bytes // data.element_size()))
        self._counted = _counted_ranges(model)

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
        own = ledger.segments_reduced
        for number, segment in enumerate(self.segments):
            hooks.before(number)
            if group is None:
                ledger.reduced(number + 1)
                continue
            staged = self._staged(segment)
            if number < len(shared):
                if shared[number] == dist.get_rank(group):
                    staged.copy_(segment)
                dist.broadcast(staged, group_src=shared[number], group=group)
                if number < own:
                    hooks.settle()
                    continue
            else:
                staged.copy_(segment)
                dist.all_reduce(staged, group=group)
            hooks.settle()
            ledger.copying(number)
            half = segment.numel() // 2
            segment[:half].copy_(staged[:half])
            hooks.half_copied(number)
            segment[half:].copy_(staged[half:])
            self.memory.synchronize()
            ledger.reduced(number + 1)

    def finish_open_copy(self, ledger: Ledger) -> None:
        """An heir's first act: the predecessor died between a complete result and its copy."""
        if ledger.open_copy:
            number = ledger.segments_reduced
            self.segments[number].copy_(self._staged(self.segments[number]))
            self.memory.synchronize()
            ledger.reduced(number + 1)

    def _staged(self, segment: torch.Tensor) -> torch.Tensor:
        nbytes = segment.numel() * segment.element_size()
        return self.memory.staging[:nbytes].view(segment.dtype)

    # ---------------------------------------------------------- norm and scaling

    def finish(self) -> None:
        """The reduced sums, unscaled, are to be in the buffers."""

    def found(self, squares: float) -> float:
        """Above 0: this gradient, with this sum of squares, cannot be stepped with (CommitResult.found_inf)."""
        return 0.0 if math.isfinite(squares) else 1.0

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
        total = 0.0
        for data, start, end in self._counted:
            norm = torch.linalg.vector_norm(data[start:end], dtype=torch.float64)
            total += float(norm) ** 2
        return total

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for data in self.buffers:
            data.mul_(factor)


def _counted_ranges(model: Any) -> list[tuple[torch.Tensor, int, int]]:
    """Ranges of the flat buffers that hold gradients this rank counts in the norm, merged where they touch."""
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared

    ranges: list[tuple[torch.Tensor, int, int]] = []
    for buffer in model.buffers + model.expert_parallel_buffers:
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
