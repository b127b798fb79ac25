"""Which GPU a worker has, and what must be so before torch starts on it.

One worker per GPU. A node's workers are numbered in the order of their ranks, and an understudy takes the GPU of the
role it was built for; when it gets another role it is built again, there (roles.py).
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


def device_of(rank: Rank, plan: Any) -> int:
    """This worker's GPU, of those that this process sees. plan: the newest one, None before any."""
    node = os.environ.get("UNICRON_NODE", "")
    local = sorted(m.rank for m in plan.members if m.node == node) if plan is not None else []
    index = local.index(rank) if rank in local else int(os.environ.get("LOCAL_RANK", "0"))
    return index % torch.cuda.device_count()


def warm_up(device: int) -> None:
    """What a process's first iteration would otherwise pay for: libraries' handles and kernels of common shapes."""
    for dtype in (torch.float32, torch.bfloat16):
        for size in (64, 512, 2048):
            a = torch.ones(size, size, device=f"cuda:{device}", dtype=dtype, requires_grad=True)
            torch.nn.functional.layer_norm(torch.nn.functional.gelu(a @ a), (size,)).softmax(-1).sum().backward()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
