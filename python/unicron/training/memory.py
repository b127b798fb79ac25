"""A worker's training state in one arena: found once, moved once, adopted by one mmap.

`StateMemory` lists every tensor of parameters, gradient buffers and optimizer state in an order that depends on
structure only, moves all of their storages onto one page-aligned region over one memfd (MECHANICS 2, recipe O), and
thereafter swaps the memfd under the region: a fresh one at the start, the dead predecessor's at adoption. No copy, no
walk, 0.3 ms. On a GPU state is born in the arena instead (arena_pool.py), and adopted slab by slab; what torch keeps on
the host all the same (AdamW's step counts) lies in the memfd.

Rejected: share_memory_() per tensor: /dev/shm is 64 MB in many containers and costs one descriptor a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from unicron import _core
from unicron.training.arena_pool import ArenaPool
from unicron.training.optimizer_state import force_optimizer_state, inner_optimizers

PAGE = 4096
SCALARS = 4  # tokens, loss sum, loss count, spare: one more segment of the reduction


def _pages(nbytes: int) -> int:
    return (nbytes + PAGE - 1) // PAGE * PAGE


class StateMemory:
    """The tensors of (model, optimizer) plus unicron's own staging, scalars and undo area, on one region."""

    def __init__(
        self, model: Any, optimizer: Any, staging_bytes: int, undo_bytes: int = 0, pool: ArenaPool | None = None,
        exact: Sequence[int] = (), buddy_bytes: int = 0,
    ) -> None:  # fmt: skip
        """pool: the GPU's, in which model and optimizer were built; None on a CPU. exact: elements of integer sums.
        buddy_bytes: for copies of another rank's shard (buddies.py), on the host.
        """
        self.model, self.optimizer, self.pool = model, optimizer, pool
        self.device = torch.device("cpu") if pool is None else torch.device("cuda", pool.device)
        with contextlib.nullcontext() if pool is None else pool.born_here():
            force_optimizer_state(optimizer)
            self.staging = torch.zeros(staging_bytes, dtype=torch.uint8, device=self.device)
            self.exact = [torch.zeros(count, dtype=torch.int64, device=self.device) for count in exact]
            self.undo = torch.zeros(undo_bytes, dtype=torch.uint8, device=self.device)
            self.scalars = torch.zeros(SCALARS, dtype=torch.float64, device=self.device)
        self.buddy = torch.zeros(buddy_bytes, dtype=torch.uint8)
        self.index = self._lay_out()
        self.gpu_index = [] if pool is None else self._find_on_gpu(pool)
        _, offset, nbytes = self.index[-1] if self.index else ("", _core.ARENA_HEADER_BYTES, 1)
        self.nbytes = offset + _pages(nbytes)
        text = repr(self.index) if pool is None else repr((self.index, self.gpu_index, pool.layout_digest()))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.content_bytes = self.nbytes - _core.ARENA_HEADER_BYTES
        self.fd = _core.create_arena(self.content_bytes)
        self._region = torch.UntypedStorage.from_file(f"/proc/self/fd/{self.fd}", shared=True, nbytes=self.nbytes)
        self._move()

    # -------------------------------------------------------------- finding

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor), in an order that depends on structure only."""
        for number, buffer in enumerate(self.model.buffers + self.model.expert_parallel_buffers):
            yield f"buffer{number}.grad_data", buffer.grad_data
            if buffer.param_data is not None:
                yield f"buffer{number}.param_data", buffer.param_data
        for name, param in self.model.named_parameters():
            yield f"param.{name}", param.data
        count = 0
        for inner in inner_optimizers(self.optimizer):
            for group in inner.param_groups:
                for param in group["params"]:
                    yield f"optimizer{count}.param", param.data
                    for key in sorted(inner.state[param]):
                        value = inner.state[param][key]
                        if torch.is_tensor(value):
                            yield f"optimizer{count}.{key}", value
                    count += 1
        yield "unicron.staging", self.staging
        for number, sums in enumerate(self.exact):
            yield f"unicron.exact{number}", sums
        if self.undo.numel():  # the name says how it is filled (undoable_step.py): part of the arena's digest
            yield "unicron.undo" if self.pool is None else "unicron.undo3", self.undo
        if self.buddy.numel():
            yield "unicron.buddy", self.buddy
        yield "unicron.scalars", self.scalars

    def _lay_out(self) -> list[tuple[str, int, int]]:
        index: list[tuple[str, int, int]] = []
        self._offset_of: dict[int, tuple[int, int]] = {}
        offset = _core.ARENA_HEADER_BYTES
        for name, tensor in self.tensors():
            storage = tensor.untyped_storage()
            if storage.data_ptr() in self._offset_of or tensor.is_cuda:
                continue
            self._offset_of[storage.data_ptr()] = (offset, storage.nbytes())
            index.append((name, offset, storage.nbytes()))
            offset += _pages(storage.nbytes())
        return index

    def _find_on_gpu(self, pool: ArenaPool) -> list[tuple[str, int, int]]:
        """(name, place in the arena, bytes) of every storage of the state on the GPU."""
        found: dict[int, tuple[str, int, int]] = {}
        for name, tensor in self.tensors():
            if not tensor.is_cuda or not tensor.untyped_storage().nbytes():
                continue
            place = pool.place_of(tensor)
            if place is None:
                raise RuntimeError(f"{name} was not allocated between join() and manage(): it would not survive")
            found.setdefault(place, (name, place, tensor.untyped_storage().nbytes()))
        return list(found.values())

    # -------------------------------------------------------------- moving, once

    @torch.no_grad()
    def _move(self) -> None:
        base = self._region.data_ptr()
        for pointer, (offset, nbytes) in self._offset_of.items():
            ctypes.memmove(base + offset, pointer, nbytes)
        for tensor in self._all_views():
            self._repoint(tensor)
        missed = [name for name, tensor in self.tensors() if not tensor.is_cuda and not self._inside(tensor)]
        missed += [
            f"main_grad of {name}" for name, p in self.model.named_parameters()
            if getattr(p, "main_grad", None) is not None and not p.main_grad.is_cuda and not self._inside(p.main_grad)
        ]  # fmt: skip
        if missed:
            raise RuntimeError(f"state that could not be moved into the arena: {missed[:5]}")
        del self._offset_of

    def _all_views(self) -> list[torch.Tensor]:
        """Every live tensor that may view a storage of the state. The gc walk happens here only, never at adoption."""
        found: dict[int, torch.Tensor] = {}
        candidates = [obj for obj in gc.get_objects() if isinstance(obj, torch.Tensor)]
        candidates += [tensor for _, tensor in self.tensors()]
        for buffer in self.model.buffers + self.model.expert_parallel_buffers:
            candidates += [bucket.grad_data for bucket in buffer.buckets]
            candidates += [b.param_data for b in buffer.buckets if b.param_data is not None]
        for param in self.model.parameters():
            if getattr(param, "main_grad", None) is not None:
                candidates.append(param.main_grad)
        candidates += [self.staging, self.scalars, self.undo, self.buddy, *self.exact]
        for inner in inner_optimizers(self.optimizer):
            candidates += [v for state in inner.state.values() for v in state.values() if torch.is_tensor(v)]
        for tensor in candidates:
            found[id(tensor)] = tensor
        return list(found.values())

    def _repoint(self, tensor: torch.Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return  # sparse, fake or meta tensors have none
        entry = self._offset_of.get(storage.data_ptr()) if storage.nbytes() else None
        if entry is None or tensor.device.type != "cpu":
            return
        size = tensor.element_size()
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(self._region, entry[0] // size + tensor.storage_offset(), tensor.size(), tensor.stride())
        tensor.data = view

    def _inside(self, tensor: torch.Tensor) -> bool:
        base = self._region.data_ptr()
        return base <= tensor.data_ptr() < base + self.nbytes

    # -------------------------------------------------------------- swapping the memory underneath

    def move_to(self, fd: int) -> None:
        """Go on in another arena, taking the present content along (a fresh arena from the agent)."""
        target = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", shared=True, nbytes=self.nbytes)
        skip = _core.ARENA_HEADER_BYTES
        ctypes.memmove(target.data_ptr() + skip, self._region.data_ptr() + skip, self.nbytes - skip)
        del target
        self.adopt(fd)

    def adopt(self, fd: int, gpu_fds: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> None:
        """Go on with the content of fd (and of the GPU slabs): the predecessor's state is now under every tensor."""
        if gpu_fds:
            assert self.pool is not None
            self.pool.arena.adopt(list(gpu_fds), list(sizes))
        _core.map_fixed(self._region.data_ptr(), fd, self.nbytes)
        os.close(self.fd)
        self.fd = fd

    def let_go(self) -> None:
        """An heir's own tensors on the GPU have no memory from here on until adopt() or export()."""
        if self.pool is not None:
            self.pool.arena.let_go()

    def take_own_memory(self) -> None:
        """Under an understudy's tensors on the GPU. Raises UnicronError when there is no room; then it is unusable."""
        if self.pool is not None:
            self.pool.arena.take_own_memory()

    def export(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(descriptors, sizes) of the GPU slabs, for the agent to keep. An understudy gets memory of its own first."""
        if self.pool is None:
            return (), ()
        self.take_own_memory()
        sizes = tuple(nbytes for _, _, nbytes in self.pool.arena.slabs())
        return tuple(self.pool.arena.export_all()), sizes

    def synchronize(self) -> None:
        """All that was begun on this worker's memory has ended."""
        if self.pool is not None:
            torch.cuda.synchronize(self.device)

    def synchronize_stream(self) -> None:
        """All that was begun on this thread's stream has ended, and what that waits for; others may go on."""
        if self.pool is not None:
            torch.cuda.current_stream(self.device).synchronize()

    def state_pieces(self, piece_bytes: int = 64 << 20) -> list[torch.Tensor]:
        """Parameters and optimizer state as flat byte views of the region, for transfers."""
        spans: list[tuple[int, int]] = []
        for name, offset, nbytes in self.index:
            if name.endswith("grad_data") or name.startswith("unicron."):
                continue
            end = offset + _pages(nbytes)
            if spans and spans[-1][1] == offset:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((offset, end))
        whole = torch.empty(0, dtype=torch.uint8).set_(self._region)  # type: ignore[call-overload]
        pieces = [p for start, end in spans for p in whole[start:end].split(piece_bytes)]
        return pieces + [p for storage in self._gpu_storages() for p in storage.split(piece_bytes)]

    def place_of(self, tensor: torch.Tensor) -> int:
        """Byte of a tensor's first element in the arena (its header included). Of state on the host only."""
        if not self._inside(tensor):
            raise ValueError("a tensor that does not lie in the arena")
        return tensor.data_ptr() - self._region.data_ptr()

    def bytes_view(self) -> Any:
        """The whole arena as a flat NumPy array of bytes; it follows the memory that lies there."""
        return torch.empty(0, dtype=torch.uint8).set_(self._region).numpy()  # type: ignore[call-overload]

    def _gpu_storages(self) -> list[torch.Tensor]:
        """The same of the state on the GPU, each storage once."""
        seen: dict[int, torch.Tensor] = {}
        for name, tensor in self.tensors():
            storage = tensor.untyped_storage()
            if not tensor.is_cuda or not storage.nbytes() or name.endswith("grad_data") or name.startswith("unicron."):
                continue
            flat = torch.empty(0, dtype=torch.uint8, device=self.device)
            seen.setdefault(storage.data_ptr(), flat.set_(storage))  # type: ignore[call-overload]
        return list(seen.values())
