"""The step of state that nobody else holds, in chunks that a death cannot tear: a shard of Megatron's distributed
optimizer, and any optimizer where there is one replica only.

A process that dies inside such a step must leave enough to finish it: each chunk's old values lie in the undo area of
the arena before one of them is overwritten, and one word of the arena's header counts the chunks. An heir restores the
open chunk and goes on (ARCHITECTURE, step). The reduced gradient stays as it is until the next iteration: it is scaled
chunk by chunk, beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unicron.training.memory import inner_optimizers, optimizer_parts

CHUNK_BYTES = 16 << 20  # of parameters; their optimizer state comes on top
GPU_CHUNK_BYTES = 64 << 20  # a GPU is waited for twice a chunk: a tenth of a millisecond each
CHUNKS_MIN = 4  # about so many, of a small shard too: the undo area is what this costs in memory
ALIGN = 64

Param = tuple[Any, torch.Tensor]  # (inner optimizer, parameter)
Pair = tuple[torch.Tensor, torch.Tensor]  # (what the step overwrites, its flat copy)


def is_sharded(optimizer: Any) -> bool:
    """Whether this is Megatron's distributed optimizer, alone or chained."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return any(isinstance(part, DistributedOptimizer) for part in optimizer_parts(optimizer))


def params_of(optimizer: Any) -> list[Param]:
    """What this rank steps, in the order of the groups."""
    inners = inner_optimizers(optimizer)
    return [(inner, param) for inner in inners for group in inner.param_groups for param in group["params"]]


def chunks_of(optimizer: Any) -> list[list[Param]]:
    """The shard's parameters in the order of their groups, in chunks of about CHUNK_BYTES; none is divided."""
    params = params_of(optimizer)
    whole = sum(nbytes_of(param) for _, param in params)
    largest = GPU_CHUNK_BYTES if any(param.is_cuda for _, param in params) else CHUNK_BYTES
    limit = max(1, min(largest, whole // CHUNKS_MIN))
    chunks: list[list[Param]] = []
    room = 0
    for entry in params:
        nbytes = nbytes_of(entry[1])
        if nbytes > room:
            chunks.append([])
            room = limit
        chunks[-1].append(entry)
        room -= nbytes
    return chunks


def undo_bytes(optimizer: Any) -> int:
    """Size of the undo area: the largest chunk with its optimizer state, which must exist."""
    return max((sum(aligned(nbytes_of(t)) for t in tensors_of(chunk)) for chunk in chunks_of(optimizer)), default=0)


def nbytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def aligned(nbytes: int) -> int:
    return (nbytes + ALIGN - 1) // ALIGN * ALIGN


def tensors_of(params: list[Param]) -> Iterator[torch.Tensor]:
    """What the step overwrites."""
    for inner, param in params:
        yield param.data
        state = inner.state[param]
        yield from (state[key] for key in sorted(state) if torch.is_tensor(state[key]))


@contextlib.contextmanager
def only(optimizer: Any, params: list[torch.Tensor]) -> Iterator[None]:
    """The inner optimizers know only these of their parameters meanwhile."""
    wanted = {id(param) for param in params}
    groups = [group for inner in inner_optimizers(optimizer) for group in inner.param_groups]
    whole = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [param for param in group["params"] if id(param) in wanted]
    try:
        yield
    finally:
        for group, all_of_them in zip(groups, whole, strict=True):
            group["params"] = all_of_them


def show_main_params(optimizer: Any) -> None:
    """The model's parameters become those of the optimizer: what Megatron does at the end of a step."""
    for part in optimizer_parts(optimizer):
        if hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()


class UndoableStep:
    """undo: flat bytes in the arena, undo_bytes(optimizer) long."""

    def __init__(self, optimizer: Any, undo: torch.Tensor) -> None:
        self.optimizer, self._undo = optimizer, undo
        self._chunks = chunks_of(optimizer)

    @torch.no_grad()
    def run(
        self, factor: float, mark: Callable[[int], None], marked: int = 0, half_way: Callable[[], None] | None = None
    ) -> None:
        """Write every chunk. mark(n): 2 x chunks written, + 1 while the next one is; marked: where a predecessor stood.

        half_way: a fault, called when half of the middle chunk's parameters are written.
        """
        self.optimizer.prepare_grads()
        first = marked // 2
        if marked % 2:
            self._restore(self._chunks[first])
        for number in range(first, len(self._chunks)):
            chunk = self._chunks[number]
            self._save(chunk)
            mark(2 * number + 1)
            if half_way is not None and number == len(self._chunks) // 2:
                middle = (len(chunk) + 1) // 2
                self._write(chunk[:middle], factor)
                half_way()
                self._write(chunk[middle:], factor)
            else:
                self._write(chunk, factor)
            mark(2 * number + 2)
        show_main_params(self.optimizer)

    def _write(self, chunk: list[Param], factor: float) -> None:
        """The inner optimizer's own update of these parameters only; each parameter's update is its own."""
        with_grad = [param for _, param in chunk if param.grad is not None]
        grads = [param.grad for param in with_grad if param.grad is not None]
        for param, grad in zip(with_grad, torch._foreach_mul(grads, factor) if grads else (), strict=True):
            param.grad = grad
        with only(self.optimizer, [param for _, param in chunk]):
            for inner in inner_optimizers(self.optimizer):
                inner.step()
        for _, param in chunk:
            param.grad = None

    def _save(self, chunk: list[Param]) -> None:
        here, elsewhere, end = self._pairs(chunk)
        if here:
            torch._foreach_copy_([saved for _, saved in here], [tensor.reshape(-1) for tensor, _ in here])
        if elsewhere:  # one copy to the GPU, whatever their number: each would be waited for
            packed = torch.zeros(end - elsewhere[0][1], dtype=torch.uint8)
            for tensor, view in self._views(elsewhere, packed):
                view.copy_(tensor.reshape(-1))
            self._undo[elsewhere[0][1] : end].copy_(packed)

    def _restore(self, chunk: list[Param]) -> None:
        here, elsewhere, end = self._pairs(chunk)
        for tensor, saved in here:
            tensor.copy_(saved.view(tensor.shape))
        if elsewhere:
            for tensor, view in self._views(elsewhere, self._undo[elsewhere[0][1] : end].cpu()):
                tensor.copy_(view.view(tensor.shape))

    def _pairs(self, chunk: list[Param]) -> tuple[list[Pair], list[tuple[torch.Tensor, int]], int]:
        """(tensor, its place in the undo area) where both are on one device; then the others, with the byte at which
        their place begins (torch's Adam counts its steps on the host, one count a parameter); and where all that ends.
        """
        here: list[Pair] = []
        elsewhere: list[tuple[torch.Tensor, int]] = []
        offset = 0
        for tensor in sorted(tensors_of(chunk), key=lambda tensor: tensor.device != self._undo.device):
            if tensor.device == self._undo.device:
                here.append((tensor, self._undo[offset : offset + nbytes_of(tensor)].view(tensor.dtype)))
            else:
                elsewhere.append((tensor, offset))
            offset += aligned(nbytes_of(tensor))
        return here, elsewhere, offset

    @staticmethod
    def _views(elsewhere: list[tuple[torch.Tensor, int]], packed: torch.Tensor) -> Iterator[Pair]:
        first = elsewhere[0][1]
        for tensor, start in elsewhere:
            yield tensor, packed[start - first : start - first + nbytes_of(tensor)].view(tensor.dtype)
