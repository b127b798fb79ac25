"""Megatron's own overlapped communication is switched off in a managed model: unicron reduces and gathers itself.

A reduction that starts by itself in the middle of a backward cannot be staged, and one that is in flight when a peer
dies leaves a buffer of which nobody knows what it holds (docs/ARCHITECTURE.md, One iteration: reduce).
"""

from __future__ import annotations

import sys
from typing import Any

from unicron.training.chunks import Chunks
from unicron.training.memory import optimizer_parts


def take_over(model: Chunks, optimizer: Any) -> tuple[str, ...]:
    """Names of what was on and is off now. Said once on stderr."""
    was_on: list[str] = []
    for chunk in model.chunks:
        ddp = chunk.ddp_config
        was_on += [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(ddp, name, False)]
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            chunk.disable_forward_pre_hook(param_sync=False)
        for name in was_on:
            setattr(ddp, name, False)
        for name in ("grad_sync_func", "param_sync_func"):
            setattr(chunk.config, name, None)
    was_on = list(dict.fromkeys(was_on))
    for settings in (getattr(part, "config", None) for part in optimizer_parts(optimizer)):
        if settings is not None and getattr(settings, "overlap_param_gather", False):
            settings.overlap_param_gather = False
    if was_on:
        print(f"unicron: {' and '.join(was_on)} off: unicron reduces and gathers between replicas", file=sys.stderr)
    return tuple(was_on)
