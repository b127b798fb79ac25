"""Megatron's own overlapped communication is switched off in a managed model: unicron reduces and gathers itself.

A reduction that starts by itself in the middle of a backward cannot be staged, and one that is in flight when a peer
dies leaves a buffer of which nobody knows what it holds (DESIGN 5.2).
"""

from __future__ import annotations

import sys
from typing import Any


def take_over(model: Any, optimizer: Any) -> tuple[str, ...]:
    """Names of what was on and is off now, for model = DistributedDataParallel. Said once on stderr."""
    ddp, config = model.ddp_config, model.config
    was_on = [name for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(ddp, name, False)]
    if getattr(model, "remove_forward_pre_hook_handles", None):
        model.disable_forward_pre_hook(param_sync=False)
    for name in was_on:
        setattr(ddp, name, False)
    for name in ("grad_sync_func", "param_sync_func"):
        setattr(config, name, None)
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for settings in (getattr(part, "config", None) for part in parts):
        if settings is not None and getattr(settings, "overlap_param_gather", False):
            settings.overlap_param_gather = False
    if was_on:
        print(f"unicron: {' and '.join(was_on)} off: unicron reduces and gathers between replicas", file=sys.stderr)
    return tuple(was_on)
