"""Which GPU a worker has, and what must be so before torch starts on it.

One worker per GPU. The agent knows each role's (agent/gpus.py), and an understudy takes the GPU of the role it is built
for; when it gets another role it is built again, there (roles.py).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from unicron import _core
from unicron.types import Rank

# Before torch makes its first group: its watchdog must not end a process whose communicators unicron ended, and a
# group's destruction must not wait for a collective whose peer is dead.
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

STACK_BYTES_WAITING = 256  # a driver's own choice is 1024
UNMAPPED = 256  # an address of the page that nobody maps

NO_LAYOUTS = "layouts change in memory on CPUs only in this version"


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def prepare() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def take_device(link: Any, rank: Rank) -> int:
    """The role's GPU, of those that this process sees, as the agent says; it is the current one from here on, and the
    one that a script finds which sets the device by LOCAL_RANK."""
    index = int(link.request_gpu(rank, torch.cuda.device_count()))
    torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)
    return index


def warm_up(device: int, dtype: torch.dtype) -> None:
    """What a process's first iteration would otherwise pay for: libraries' handles and kernels of common shapes. Of the
    model's own dtype: a library's kernels stay in memory."""
    _core.load_kernels(device)
    for size in (64, 512, 2048):
        a = torch.ones(size, size, device=f"cuda:{device}", dtype=dtype, requires_grad=True)
        torch.nn.functional.layer_norm(torch.nn.functional.gelu(a @ a), (size,)).softmax(-1).sum().backward()
    del a
    give_memory_back(device)


def give_memory_back(device: int) -> None:
    """What torch keeps for later, cuBLAS's workspaces too: a process that waits beside a busy one has no use for it."""
    torch.cuda.synchronize(device)
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)  # no public name; without it some tens of MiB stay
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def small_stacks(device: int | None) -> Iterator[None]:
    """While a process only waits beside a busy one: the context keeps memory for the stacks of all threads that the GPU
    could run at once (200 MiB of an H200's more with 1024 bytes each than with 256). None: nothing to do, on a CPU."""
    if device is None:
        yield
        return
    before = _core.set_stack_bytes(device, STACK_BYTES_WAITING)
    try:
        yield
    finally:
        try:
            _core.set_stack_bytes(device, before)
        except _core.UnicronError as problem:  # full: the driver makes room for a kernel that needs more, or says so
            print(f"unicron: the stacks stay at {STACK_BYTES_WAITING} bytes a thread: {problem}", file=sys.stderr)


def access_illegally(device: torch.device) -> None:
    """The fault `memory`, as a bad kernel of a script does it: the context is lost, and who asks the GPU next is told
    "an illegal memory access was encountered". Here that is the synchronisation. Raises RuntimeError, also without GPU.
    """
    if device.type != "cuda":
        raise RuntimeError("the fault memory is an illegal memory access on a GPU, and this worker has none")
    stream = torch.cuda.current_stream(device).cuda_stream
    _core.gpu_exact_to_float(device.index, UNMAPPED, UNMAPPED, 1, 0, stream)
    torch.cuda.synchronize(device)
    raise RuntimeError("a kernel used an address that is not mapped, and the GPU did not say so")
