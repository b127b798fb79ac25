"""A torch.cuda.MemPool whose memory is an arena's: what is allocated in it outlives this process.

What a script builds between join() and manage() is born in it; nothing is moved. An understudy's pool has no memory of
its own (see csrc/state/gpu_arena.h): it builds a model of any size on a busy GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch

from unicron import _core


class ArenaPool:
    """One per GPU and process. Its allocations stay until the process ends, like the arena."""

    def __init__(self, device: int, *, own_memory: bool) -> None:
        self.device = device
        self.arena = _core.GpuArena(device, 0, own_memory)
        self._allocator = torch.cuda.memory.CUDAPluggableAllocator(_core.__file__, _core.ARENA_MALLOC, _core.ARENA_FREE)
        self._pool = torch.cuda.MemPool(self._allocator.allocator())

    @contextlib.contextmanager
    def born_here(self) -> Iterator[None]:
        """This thread's CUDA allocations come from the arena."""
        self.arena.open()
        try:
            with torch.cuda.use_mem_pool(self._pool, device=self.device):
                yield
        finally:
            self.arena.close()

    def explain(self, error: BaseException) -> None:
        """torch calls every refusal of an allocator "out of memory"; what the arena said goes with it."""
        said = _core.arena_allocator_error()
        if said and isinstance(error, torch.cuda.OutOfMemoryError):
            error.add_note(f"the arena of GPU {self.device} says: {said}")

    def place_of(self, tensor: torch.Tensor) -> int | None:
        """Offset of a tensor's storage from the arena's first address; None: it lies elsewhere."""
        offset = tensor.untyped_storage().data_ptr() - self.arena.address
        return offset if any(start <= offset < start + size for _, start, size in self._slabs()) else None

    def layout_digest(self) -> str:
        """Equal where the same script allocated the same pieces in the same order."""
        return hashlib.sha256(repr((self.arena.slabs(), self.arena.pieces())).encode()).hexdigest()[:32]

    def _slabs(self) -> list[tuple[int, int, int]]:
        return self.arena.slabs()
