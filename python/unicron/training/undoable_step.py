"""The step of state that nobody else holds, in chunks that a death cannot tear: a shard of Megatron's distributed
optimizer, and any optimizer where there is one replica only.

A process that dies inside such a step must leave enough to finish it: each chunk's old values lie in the undo area of
the arena before one of them is overwritten, and one word of the arena's header counts the chunks. An heir restores the
open chunk and goes on (ARCHITECTURE, step). The reduced gradient stays as it is until the next iteration: it is scaled
chunk by chunk, beside it.

On a GPU nobody waits between the chunks: the GPU itself writes their marks, in the order of its stream. What an
optimizer keeps on the host meanwhile (torch's Adam a count a parameter, Apex's and Transformer Engine's one a group) is
ahead of it, so the old values of all of that are saved before the first mark, and an heir restores those of every chunk
that is not written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from unicron.training.optimizer_state import GroupCounts, inner_optimizers, optimizer_parts

CHUNK_BYTES = 16 << 20  # of parameters; their optimizer state comes on top
GPU_CHUNK_BYTES = 64 << 20  # the largest parameter if that is more: the undo area has to hold it anyway
CHUNKS_MIN = 4  # about so many, of a small shard too: the undo area is what this costs in memory
ALIGN = 64

Param = tuple[Any, torch.Tensor]  # (inner optimizer, parameter)
Pair = tuple[torch.Tensor, torch.Tensor]  # (what the step overwrites, its flat copy)
Mark = Callable[[int, bool], None]  # (2 x chunks written, + 1 while the next one is; whether to wait until it is set)


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
    limit = max(1, min(CHUNK_BYTES, whole // CHUNKS_MIN))
    if any(param.is_cuda for _, param in params):
        largest = max(nbytes_of(param) for _, param in params)
        limit = max(1, min(GPU_CHUNK_BYTES, whole // CHUNKS_MIN), largest)
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
    """Of the undo area: the largest chunk with its optimizer state, which must exist, and what lies on the host."""
    chunks = chunks_of(optimizer)
    device = device_of(chunks)
    return max((size_of(tensors_on(device, chunk)) for chunk in chunks), default=0) + size_of(elsewhere(chunks, device))


def device_of(chunks: list[list[Param]]) -> torch.device:
    """Of the parameters."""
    return chunks[0][0][1].device if chunks else torch.device("cpu")


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(aligned(nbytes_of(tensor)) for tensor in tensors)


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


def tensors_on(device: torch.device, params: list[Param]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(params) if tensor.device == device]


def elsewhere(chunks: list[list[Param]], device: torch.device) -> list[torch.Tensor]:
    """What the step overwrites on the host, where the parameters are on this device."""
    return [] if device.type == "cpu" else [t for chunk in chunks for t in tensors_on(torch.device("cpu"), chunk)]


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
        self._device = device_of(self._chunks)
        of_host = elsewhere(self._chunks, self._device)
        self._of_host = size_of(of_host)
        self._packed = torch.zeros(self._of_host, dtype=torch.uint8)
        self._places = [place for _, place in places_of(of_host, self._packed)]

    @torch.no_grad()
    def run(self, factor: float, mark: Mark, marked: int = 0, half_way: Callable[[], None] | None = None) -> None:
        """Write every chunk. mark(n, wait): see Mark; it is set when all that was begun before is in memory. marked:
        where a predecessor stood.

        half_way: a fault, called when half of the middle chunk's parameters are written.
        """
        self.optimizer.prepare_grads()
        first = marked // 2
        if marked:
            self._restore(first, is_open=bool(marked % 2))
        elif self._of_host:
            self._save_host()
        counts = GroupCounts(inner_optimizers(self.optimizer))
        for number in range(first, len(self._chunks)):
            chunk = self._chunks[number]
            self._save(chunk)
            mark(2 * number + 1, number == 0)  # from the first one on the host's part may be ahead of the GPU's
            if half_way is not None and number == len(self._chunks) // 2:
                middle = (len(chunk) + 1) // 2
                self._write(chunk[:middle], factor, counts)
                half_way()
                self._write(chunk[middle:], factor, counts)
            else:
                self._write(chunk, factor, counts)
            mark(2 * number + 2, False)
        counts.stepped()
        show_main_params(self.optimizer)

    def _write(self, chunk: list[Param], factor: float, counts: GroupCounts) -> None:
        """The inner optimizer's own update of these parameters only; each parameter's update is its own."""
        with_grad = [param for _, param in chunk if param.grad is not None]
        grads = [param.grad for param in with_grad if param.grad is not None]
        for param, grad in zip(with_grad, torch._foreach_mul(grads, factor) if grads else (), strict=True):
            param.grad = grad
        counts.rewind()
        with only(self.optimizer, [param for _, param in chunk]):
            for inner in inner_optimizers(self.optimizer):
                inner.step()
        for _, param in chunk:
            param.grad = None

    def _save(self, chunk: list[Param]) -> None:
        pairs = self._pairs(chunk)
        if pairs:
            torch._foreach_copy_([saved for _, saved in pairs], [tensor.reshape(-1) for tensor, _ in pairs])

    def _save_host(self) -> None:
        """One copy to the GPU, whatever their number: each would be waited for."""
        torch._foreach_copy_(self._places, [t.reshape(-1) for t in elsewhere(self._chunks, self._device)])
        self._undo[-self._of_host :].copy_(self._packed)

    def _restore(self, first: int, *, is_open: bool) -> None:
        """What the predecessor had begun of this chunk, on the device, and of all from it on, on the host."""
        for tensor, saved in self._pairs(self._chunks[first]) if is_open else ():
            tensor.copy_(saved.view(tensor.shape))
        if self._of_host:
            pairs = places_of(elsewhere(self._chunks, self._device), self._undo[-self._of_host :].cpu())
            for tensor, saved in pairs[len(elsewhere(self._chunks[:first], self._device)) :]:
                tensor.copy_(saved.view(tensor.shape))

    def _pairs(self, chunk: list[Param]) -> list[Pair]:
        """(tensor, its place in the undo area) of what lies on the parameters' device."""
        return places_of(tensors_on(self._device, chunk), self._undo)


def places_of(tensors: list[torch.Tensor], area: torch.Tensor) -> list[Pair]:
    """Each tensor's place in the area, one after the other."""
    pairs: list[Pair] = []
    offset = 0
    for tensor in tensors:
        pairs.append((tensor, area[offset : offset + nbytes_of(tensor)].view(tensor.dtype)))
        offset += aligned(nbytes_of(tensor))
    return pairs
