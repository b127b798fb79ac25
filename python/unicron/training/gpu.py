"""Which GPU a worker has, and what must be so before torch starts on it.

One worker per GPU. The agent knows each role's (agent/gpus.py), and an understudy takes the GPU of the role it is built
for; when it gets another role it is built again, there (roles.py).
"""

from __future__ import annotations

import os
from typing import Any

import torch

from unicron.types import Rank

# Before torch makes its first group: its watchdog must not end a process whose communicators unicron ended, and a
# group's destruction must not wait for a collective whose peer is dead.
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def prepare() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def take_device(link: Any, rank: Rank) -> int:
    """The role's GPU, of those that this process sees, as the agent says; it is the current one from here on, and the
    one that a script finds which sets the device by LOCAL_RANK."""
    index = int(link.request_gpu(rank)) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    os.environ["LOCAL_RANK"] = str(index)
    return index


def warm_up(device: int) -> None:
    """What a process's first iteration would otherwise pay for: libraries' handles and kernels of common shapes."""
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64, 512, 2048):
            a = torch.ones(size, size, device=f"cuda:{device}", dtype=dtype, requires_grad=True)
            torch.nn.functional.layer_norm(torch.nn.functional.gelu(a @ a), (size,)).softmax(-1).sum().backward()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
