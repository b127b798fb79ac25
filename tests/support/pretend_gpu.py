"""For machines without a GPU: lets a worker take its GPU paths, on the CPU, over the fault injectors of tests/fakes.

Imported into the template (tests/gpu/managed.py --pretend). Tensors stay on the CPU and collectives are gloo's, so it
shows nothing of CUDA or NCCL: only that session, memory, groups, engine and agent fit together.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unicron import _core
from unicron.training import gpu, memory, nccl_groups, session

MARK = b"what a dead worker left on its GPU"


class Pool:
    """An ArenaPool with one piece, by which an heir sees that it got its predecessor's."""

    def __init__(self, device: int, *, own_memory: bool) -> None:
        self.device = device
        self.arena = _core.GpuArena(device, 0, own_memory)
        self._address = self.arena.allocate(1 << 20)
        self.is_heirs = not own_memory

    @contextlib.contextmanager
    def born_here(self) -> Iterator[None]:
        self.arena.open()
        yield
        self.arena.close()

    def layout_digest(self) -> str:
        return repr(self.arena.slabs())

    def mark(self) -> None:
        ctypes.memmove(self._address, MARK, len(MARK))

    def explain(self, error: BaseException) -> None:
        pass

    def is_marked(self) -> bool:
        return ctypes.string_at(self._address, len(MARK)) == MARK


class Backend(dist.ProcessGroupGloo):
    class Options:
        _timeout = None

    def __init__(self, store: Any, rank: int, size: int, _options: Any) -> None:
        super().__init__(store, rank, size, timedelta(seconds=60))
        self.communicator = _core.NcclCommunicator(0, size, rank, _core.make_nccl_id())

    def _comm_ptr(self) -> int:
        return self.communicator.handle

    def abort(self) -> None:
        print("pretend: a group is taken apart", flush=True)


class Groups(nccl_groups.NcclGroups):
    def _wrap(self, backend: Any) -> Any:
        group = dist.ProcessGroup(backend.rank(), backend.size())
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def _unconnected(self, store: Any, name: str, rank: int, size: int) -> Any:
        self.place = torch.device("cpu")
        return Backend(dist.PrefixStore(name, store), rank, size, None)

    def connect_beside(self, *how: Any) -> Any:
        made = super().connect_beside(*how)
        print("pretend: a group stands beside those in use", flush=True)
        return made

    @contextlib.contextmanager
    def beside(self) -> Iterator[Callable[[], bool]]:
        yield lambda: True


class Memory(memory.StateMemory):
    def __init__(self, model: Any, optimizer: Any, staging_bytes: int, undo_bytes: int, pool: Any, *more: Any) -> None:
        super().__init__(model, optimizer, staging_bytes, undo_bytes, None, *more)
        self.pool = self._pretended = pool

    def adopt(self, fd: int, gpu_fds: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> None:
        super().adopt(fd, gpu_fds, sizes)
        if gpu_fds:
            print(f"pretend: adopted {len(gpu_fds)} slabs, marked {self._pretended.is_marked()}", flush=True)
            assert self._pretended.is_marked()

    def export(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        result = super().export()
        self._pretended.mark()
        print(f"pretend: exported {len(result[0])} slabs", flush=True)
        return result


def take_device(link: Any, rank: int) -> int:
    index = link.request_gpu(rank, int(os.environ.get("PRETEND_GPUS", "8")))
    print(f"pretend: rank {rank} has GPU {index}", flush=True)
    return int(index)


def access_illegally(device: Any) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def pretend() -> None:
    from unicron.training import groups

    for holder, name, value in (
        (gpu, "has_gpu", lambda: True), (gpu, "take_device", take_device), (gpu, "warm_up", lambda device, dtype: None),
        (gpu, "access_illegally", access_illegally),
        (torch.cuda, "set_device", lambda device: None), (torch.cuda.nccl, "version", lambda: (2, 29, 7)),
        (session, "ArenaPool", Pool), (session, "StateMemory", Memory), (groups, "NcclGroups", Groups),
    ):  # fmt: skip
        setattr(holder, name, value)


pretend()
