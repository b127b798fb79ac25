"""Megatron's own overlapped communication is switched off in a managed model: unicron reduces and gathers itself.

A reduction that starts by itself in the middle of a backward cannot be staged, and one that is in flight when a peer
dies leaves a buffer of which nobody knows what it holds (docs/ARCHITECTURE.md, One iteration: reduce). What takes its
place: eager.py, gathering.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from unicron.training import eager
from unicron.training.chunks import Chunks
from unicron.training.eager_plan import EagerPlan
from unicron.training.gathering import why_never_late
from unicron.training.optimizer_state import optimizer_parts
from unicron.types import Layout

REDUCE, GATHER = "overlap_grad_reduce", "overlap_param_gather"


def take_over(model: Chunks, optimizer: Any) -> tuple[str, ...]:
    """Names of what was on and is off now."""
    was_on: list[str] = []
    for chunk in model.chunks:
        ddp = chunk.ddp_config
        was_on += [name for name in (REDUCE, GATHER) if getattr(ddp, name, False)]
        if getattr(chunk, "remove_forward_pre_hook_handles", None):
            chunk.disable_forward_pre_hook(param_sync=False)
        for name in was_on:
            setattr(ddp, name, False)
        for name in ("grad_sync_func", "param_sync_func"):
            setattr(chunk.config, name, None)
    for settings in (getattr(part, "config", None) for part in optimizer_parts(optimizer)):
        if settings is not None and getattr(settings, GATHER, False):
            settings.overlap_param_gather = False
    return tuple(dict.fromkeys(was_on))


class Overlap(NamedTuple):
    """What unicron does in the place of what the script asked for."""

    eager: EagerPlan | None = None  # what is reduced under the backward; None: nothing
    gathers_late: bool = False  # parameters come under the next forward


def plan_own(model: Chunks, optimizer: Any, layout: Layout) -> Overlap:
    """Said on stderr. ValueError: see eager.plan_of."""
    was_on = take_over(model, optimizer)
    gathers_late = GATHER in was_on and layout.sharded and not why_never_late(model, layout)
    overlap = Overlap(eager.plan_of(model, layout) if REDUCE in was_on else None, gathers_late)
    for line in says(model, layout, was_on, overlap):
        print(f"unicron: {line}", file=sys.stderr)
    return overlap


def says(model: Chunks, layout: Layout, was_on: Sequence[str], overlap: Overlap) -> list[str]:
    lines = []
    if overlap.gathers_late:
        lines.append(f"{GATHER}: unicron gathers the parameters under the next forward")
    elif GATHER in was_on:
        why = why_never_late(model, layout)
        lines.append(f"{GATHER} off: unicron gathers the parameters behind the step, because {why}")
    plan = overlap.eager
    if REDUCE in was_on and plan is None:
        why = "there is one replica" if layout.dp == 1 else eager.why_never(model, layout)
        lines.append(f"{REDUCE} off: unicron reduces after the backward, because {why}")
    elif plan is not None:
        sums = [buffer.grad_data for buffer in model.buffers + model.expert_parallel_buffers]
        eagerly = plan.nbytes / (1 << 20)
        whole = sum(data.numel() * data.element_size() for data in sums) / (1 << 20)
        lines.append(
            f"{REDUCE}: unicron reduces {eagerly:.1f} of {whole:.1f} MiB of gradients ({len(plan.order)} segments) "
            f"under the backward; {eager.MIB_SETTING} says how much it may be"
        )
    return lines
