"""Exact mode: gradients summed as integers, so that neither order nor grouping enters the result (docs/TRAINING.md).

Each micro-batch's gradient is taken out of DDP's buffers when its backward has ended, multiplied by a power of two,
rounded once, and added to 64-bit sums in the arena. Sums of integers are the same whoever makes them in whatever order,
so any history of failures and widths ends in the same bits. The squared norm is summed in the same way.

The power of two follows from the last committed norm, with room for gradients 2^HEADROOM times as large. A gradient
above that is found by whoever computes it, and everybody learns it in the commit: nobody steps, and the iteration is
computed again, by all, at a scale 2^REPEAT_BITS smaller, and again, until it fits. What is found depends on nothing but
the micro-batch and the scale, so every history has the same repeats; and the scale that follows comes from the norm
that is committed in the end. A gradient that is not finite fits no scale: that step is left out, everywhere.

Cost: 8 more bytes a parameter, twice the wire of fp32, one more pass over the gradients a micro-batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from unicron import _core
from unicron.healing.record import OVERFLOW, CommitResult
from unicron.training.chunks import Chunks
from unicron.training.gradients import CHUNK_BYTES, Gradients
from unicron.training.memory import StateMemory
from unicron.types import Layout

HEADROOM = 12  # bits between the last norm and what may be added
SUM_BITS = 62
FIRST_EXPONENT = 26  # before anything is committed: room for 2^(62 - 26) / number of terms
EXPONENT_MAX = 100  # sums are given back as floats: 2^-126 to 2^126
REPEAT_BITS = 24  # so much smaller is the scale of each repeat: 62 bits less these are still more than a float has
# The smallest scale has room for any finite gradient, and no more repeats than this are between it and the largest.
REPEATS_MAX = -(-2 * EXPONENT_MAX // REPEAT_BITS)
SQUARE_BITS = 60  # of the largest square
NOT_FINITE, ABOVE_LIMIT = 1, 2  # the core's flags
SCALAR_NOT_FINITE, SCALAR_ABOVE_LIMIT = 2, 3  # places in the scalars where findings are counted


class ExactRefused(ValueError):
    """What cannot be summed exactly, by name."""


def exact_counts(model: Chunks, layout: Layout) -> list[int]:
    """Elements of each gradient buffer that get an exact sum; none when the task does not ask for it."""
    if not layout.exact:
        return []
    buffers = model.buffers + model.expert_parallel_buffers
    for buffer in buffers:
        if buffer.grad_data.dtype is not torch.float32:
            raise ExactRefused(f"exact: gradients are summed in {buffer.grad_data.dtype}: set grad_reduce_in_fp32=True")
    return [buffer.grad_data.numel() for buffer in buffers]


class ExactGradients(Gradients):
    """Gradients whose segments are the integer sums; the floats follow from them."""

    def __init__(
        self, model: Chunks, memory: StateMemory, layout: Layout, chunk_bytes: int = CHUNK_BYTES, *,
        counts_dense: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model, memory, chunk_bytes, counts_dense=counts_dense)
        self._terms = layout.num_micro_batches * (layout.tp + 1)  # the tie adds what other ranks of the replica have
        self._term_bits = math.ceil(math.log2(self._terms))
        self.base_exponent = FIRST_EXPONENT  # as the last committed iteration leaves it
        self.sums = memory.exact
        self.segments = [memory.scalars]
        for data in self.sums:
            self.segments += data.split(max(1, chunk_bytes // data.element_size()))
        self._of_chunk = _buffers_of_chunks(model)
        self._is_dirty = [False] * len(model.chunks)
        self._flags = torch.zeros(1, dtype=torch.int64, device=memory.device)  # of a kernel; of no use on a CPU

    @property
    def exponent(self) -> int:
        """Of the scale in force."""
        return max(-EXPONENT_MAX, self.base_exponent - REPEAT_BITS * self.repeat)

    # ---------------------------------------------------------- local sums

    def zero(self) -> None:
        super().zero()
        for data in self.sums:
            data.zero_()
        self._is_dirty = [False] * len(self._is_dirty)

    def backward_begins(self, chunk: int) -> None:
        """The micro-batch before is whole in the buffers: add it, and make room."""
        self._take(chunk)
        self._is_dirty[chunk] = True

    def computed(self) -> None:
        for chunk in range(len(self._is_dirty)):
            self._take(chunk)

    def _take(self, chunk: int) -> None:
        if not self._is_dirty[chunk]:
            return
        self._is_dirty[chunk] = False
        for number in self._of_chunk[chunk]:
            data = self.buffers[number]
            if data.is_cuda:
                self._accumulate_on_gpu(self.sums[number], data)
            else:
                self._count(
                    _core.exact_accumulate(self.sums[number].numpy(), data.numpy(), False, self.exponent, self._terms)
                )
            data.zero_()

    def _accumulate_on_gpu(self, sums: torch.Tensor, data: torch.Tensor) -> None:
        """In the order of the stream, and nothing waits for it: what was found is added up there, too."""
        self._flags.zero_()
        _core.gpu_exact_accumulate(
            data.device.index, sums.data_ptr(), data.data_ptr(), data.numel(), False, self.exponent, self._terms,
            self._flags.data_ptr(), _stream(data),
        )  # fmt: skip
        for place, flag in ((SCALAR_NOT_FINITE, NOT_FINITE), (SCALAR_ABOVE_LIMIT, ABOVE_LIMIT)):
            self.memory.scalars[place].add_(self._flags[0].bitwise_and(flag).ne(0))

    def _count(self, flags: int) -> None:
        if flags & NOT_FINITE:
            self.memory.scalars[SCALAR_NOT_FINITE].add_(1.0)
        if flags & ABOVE_LIMIT:
            self.memory.scalars[SCALAR_ABOVE_LIMIT].add_(1.0)

    # ---------------------------------------------------------- the tie, in integers

    def tie(self, model: Chunks, config: Any) -> None:
        """What compute.tie does with floats: norms under sequence parallelism, tied word embeddings, lanes."""
        from megatron.core import parallel_state

        if getattr(config, "sequence_parallel", False):
            params = [p for p in model.parameters() if getattr(p, "sequence_parallel", False)]
            self._add_up(params, parallel_state.get_tensor_model_parallel_group())
        weight = _tied_weight(model)
        if weight is not None and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            self._add_up([weight], parallel_state.get_embedding_group())
        if parallel_state.get_expert_model_parallel_world_size() > 1:
            lanes = parallel_state.get_expert_model_parallel_group()
            for sums in self.sums[: len(model.buffers)]:
                dist.all_reduce(sums, group=lanes)

    def _add_up(self, params: list[Any], group: dist.ProcessGroup) -> None:
        spans = [self._span(param) for param in params]
        if not spans or dist.get_world_size(group) == 1:
            return
        flat = torch.cat(spans)
        dist.all_reduce(flat, group=group)
        for span, value in zip(spans, flat.split([span.numel() for span in spans]), strict=True):
            span.copy_(value)

    def _span(self, param: Any) -> torch.Tensor:
        for data, sums in zip(self.buffers, self.sums, strict=True):
            start = (param.main_grad.data_ptr() - data.data_ptr()) // data.element_size()
            if 0 <= start < data.numel() and param.main_grad.untyped_storage().data_ptr() == _storage(data):
                return sums[start : start + param.main_grad.numel()]
        raise ExactRefused("exact: a tied parameter's gradient lies in no buffer of this rank")

    # ---------------------------------------------------------- norm and scaling

    def finish(self) -> None:
        """The floats of the reduced sums. Again after each recovery: it costs one pass."""
        for data, sums in zip(self.buffers, self.sums, strict=True):
            if data.is_cuda:
                _core.gpu_exact_to_float(
                    data.device.index, data.data_ptr(), sums.data_ptr(), data.numel(), self.exponent, _stream(data)
                )
            else:
                _core.exact_to_float(data.numpy(), sums.numpy(), self.exponent)

    @torch.no_grad()
    def sum_of_squares(self) -> float:
        """In integers, too: each square is rounded once, at a scale that its largest one gives."""
        largest = max((_largest(data[start:end]) for data, start, end in self._counted), default=0.0)
        if largest == 0.0:
            return 0.0
        exponent = SQUARE_BITS - 2 * math.frexp(largest)[1]
        parts = torch.zeros(4, dtype=torch.int64, device=self.memory.device)
        for data, start, end in self._counted:
            if data.is_cuda:
                values = data[start:end]
                _core.gpu_exact_sum_squares(
                    data.device.index, parts.data_ptr(), values.data_ptr(), values.numel(), exponent,
                    self._flags.data_ptr(), _stream(data),
                )  # fmt: skip
            else:
                _core.exact_sum_squares(parts.numpy().view("uint64"), data[start:end].numpy(), exponent)
        return float(_core.exact_wide_value(parts.cpu().numpy().view("uint64"), exponent))

    def found(self, squares: float) -> float:
        """See CommitResult.found_inf."""
        not_finite = float(self.memory.scalars[SCALAR_NOT_FINITE]) > 0
        above = float(self.memory.scalars[SCALAR_ABOVE_LIMIT]) > 0
        return (1.0 if not_finite else 0.0) + (OVERFLOW if above else 0.0)

    def stepped(self, commit: CommitResult) -> None:
        """The scale of the next iteration: a function of the commit, so every rank of every history has the same."""
        self.repeat = 0
        if not commit.found_inf and commit.sumsq > 0.0:
            norm_bits = math.frexp(math.sqrt(commit.sumsq))[1]
            wanted = SUM_BITS - self._term_bits - HEADROOM - norm_bits
            self.base_exponent = min(EXPONENT_MAX, max(-EXPONENT_MAX, wanted))

    def own_state(self) -> dict[str, Any]:
        return {"exponent": self.base_exponent}

    def load_own(self, state: dict[str, Any]) -> None:
        self.base_exponent = state.get("exponent", self.base_exponent)


def _stream(tensor: torch.Tensor) -> int:
    return int(torch.cuda.current_stream(tensor.device).cuda_stream)


def _largest(values: torch.Tensor) -> float:
    """Magnitude. Without a copy of all values."""
    low, high = torch.aminmax(values)
    return max(-float(low), float(high))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _buffers_of_chunks(model: Chunks) -> list[list[int]]:
    """Numbers in model.buffers + model.expert_parallel_buffers of each chunk's buffers."""
    every = model.buffers + model.expert_parallel_buffers
    own = [chunk.buffers + chunk.expert_parallel_buffers for chunk in model.chunks]
    return [[n for n, buffer in enumerate(every) if any(buffer is b for b in buffers)] for buffers in own]


def _tied_weight(model: Chunks) -> Any:
    """Of the first or the last stage, whose copies are one parameter; None elsewhere."""
    from megatron.core.utils import get_attr_wrapped_model

    modules = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model.chunks]
    module = next((m for m in modules if m.pre_process or m.post_process), None)
    if module is None or not getattr(module, "share_embeddings_and_output_weights", False):
        return None
    return module.shared_embedding_or_output_weight()
