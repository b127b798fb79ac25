"""The learning-rate scheduler's own ways: Megatron's OptimizerParamScheduler counts samples, torch's count calls."""

from __future__ import annotations

from typing import Any

from unicron.types import Layout


def advance_scheduler(scheduler: Any, layout: Layout) -> None:
    """One iteration further."""
    if scheduler is None:
        return
    if hasattr(scheduler, "num_steps"):
        scheduler.step(increment=layout.num_micro_batches * layout.micro_batch)
    else:
        scheduler.step()


def restore_scheduler(scheduler: Any, state: dict[str, Any]) -> None:
    """To `state`, wherever it stands now: Megatron's own load_state_dict adds the state's samples to those counted."""
    if hasattr(scheduler, "num_steps"):
        scheduler.num_steps = 0
    scheduler.load_state_dict(state)
