"""What an optimizer keeps from step to step, of whatever kind: all of it is there before it is moved to the arena.

torch's Adam counts its steps in a tensor a parameter; those of Apex and Transformer Engine in a number a group, on the
host and outside of every tensor: that number goes where the schedule goes (step.py, extra_state).
"""

from __future__ import annotations

from typing import Any

import torch

COUNT = "step"  # the name of the number in a group


class UnknownOptimizer(ValueError):
    pass


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Megatron's optimizers that this one is made of: itself, where it is not chained."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def inner_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The torch optimizers inside Megatron's wrappers (one, or several when chained)."""
    if hasattr(optimizer, "chained_optimizers"):
        return [inner for part in optimizer.chained_optimizers for inner in inner_optimizers(part)]
    inner = getattr(optimizer, "optimizer", optimizer)
    return [inner] if isinstance(inner, torch.optim.Optimizer) else []


def even_optimizer_steps(optimizer: Any) -> None:
    """Before a torn state is overwritten by a checkpoint's: Megatron refuses to load over step counts that differ."""
    for inner in inner_optimizers(optimizer):
        for state in inner.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].zero_()


def force_optimizer_state(optimizer: Any) -> None:
    """Create all of its state now; what it would do in its first step. Raises UnknownOptimizer where that is not known:
    an heir would go on without it."""
    for part in optimizer_parts(optimizer):
        for inner in inner_optimizers(part):
            if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
                _force_adam(inner)
            elif isinstance(inner, torch.optim.SGD):
                _force_sgd(inner)
            elif getattr(part, "init_state_fn", None) is not None:
                part.init_state_fn(inner, part.config)
                _begin_counting(inner)
            else:
                name = f"{type(inner).__module__}.{type(inner).__name__}"
                raise UnknownOptimizer(
                    f"{name} makes its state in its first step, and unicron does not know how: it would not survive a "
                    "failure. Use Adam, SGD, or one for which Megatron has an init_state_fn"
                )


def _force_adam(inner: torch.optim.Optimizer) -> None:
    """Megatron's init_state_fn forgets `step`, and torch then raises KeyError."""
    for group in inner.param_groups:
        for param in group["params"]:
            if not inner.state[param]:
                inner.state[param]["step"] = torch.tensor(0.0, dtype=torch.float32)
                inner.state[param]["exp_avg"] = torch.zeros_like(param.data)
                inner.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)


def _force_sgd(inner: torch.optim.Optimizer) -> None:
    """Without dampening a first momentum of 0 is torch's own, which is the first gradient itself."""
    for group in inner.param_groups:
        if not group["momentum"]:
            continue
        if group["dampening"]:
            raise UnknownOptimizer("SGD with dampening begins with another momentum than it goes on with: say 0")
        for param in group["params"]:
            if inner.state[param].get("momentum_buffer") is None:
                inner.state[param]["momentum_buffer"] = torch.zeros_like(param.data)


def _begin_counting(inner: torch.optim.Optimizer) -> None:
    """The FusedAdam of Apex and of Transformer Engine: a group without the number begins with 1 in its first step."""
    if type(inner).__name__ != "FusedAdam":
        return
    if getattr(inner, "capturable", False):
        raise UnknownOptimizer("FusedAdam for CUDA graphs counts its steps on the GPU: build it without capturable")
    for group in inner.param_groups:
        group.setdefault(COUNT, 0)


class GroupCounts:
    """A step in chunks is one step for what counts in groups."""

    def __init__(self, inners: list[torch.optim.Optimizer]) -> None:
        self._inners = inners
        self._before = group_counts(inners)

    def rewind(self) -> None:
        set_group_counts(self._inners, self._before)

    def stepped(self) -> None:
        """All chunks are written, some of them perhaps by a predecessor."""
        groups = [group for inner in self._inners for group in inner.param_groups]
        for group, count in zip(groups, self._before, strict=True):
            if count is not None and group["params"]:
                group[COUNT] = count + 1


def group_counts(inners: list[torch.optim.Optimizer]) -> list[int | None]:
    """What their groups count, in order; None where they do not."""
    counts = [group.get(COUNT) for inner in inners for group in inner.param_groups]
    return [count if isinstance(count, int) else None for count in counts]


def set_group_counts(inners: list[torch.optim.Optimizer], counts: list[int | None]) -> None:
    groups = [group for inner in inners for group in inner.param_groups]
    for group, count in zip(groups, counts, strict=True):
        if count is not None:
            group[COUNT] = count
