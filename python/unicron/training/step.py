"""The optimizer's step from a commit's result: no collective in it, so who has the result rolls forward alone.

The gradient is scaled once, by clip coefficient over token count. Python-side state (scheduler, learning rate) is not
in tensors; it travels as a small MessagePack in the arena's header.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from unicron.healing.record import CommitResult
from unicron.training.gradients import Gradients
from unicron.training.loss_scale import LossScale
from unicron.training.optimizer_state import GroupCounts, group_counts, inner_optimizers, set_group_counts
from unicron.training.scheduler import advance_scheduler, restore_scheduler
from unicron.training.undoable_step import Mark, UndoableStep, only, show_main_params
from unicron.types import Layout

EXTRA_BYTES_MAX = 1024


class ExtraStateTooLarge(ValueError):
    pass


class Stepper:
    def __init__(self, optimizer: Any, scheduler: Any, layout: Layout, gradients: Gradients) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self._undoable = UndoableStep(optimizer, gradients.memory.undo) if layout.steps_undoably else None
        self.layout, self.gradients = layout, gradients
        self.loss_scale = LossScale(optimizer, exact=layout.exact)
        config = getattr(optimizer, "config", None)
        self.clip = float(getattr(config, "clip_grad", 0.0) or 0.0)
        self.grad_norm = 0.0

    def zero_grad(self) -> None:
        """Without this param.grad stays main_grad and the first micro-batch is added twice (MECHANICS 2.3)."""
        self.optimizer.zero_grad()

    def step(
        self, commit: CommitResult, mark: Mark, marked: int = 0, half_way: Callable[[], None] | None = None
    ) -> None:
        """mark, marked: see UndoableStep.run. half_way: a fault, called when a part of the parameters is written."""
        self.gradients.repeat = commit.repeat
        self.gradients.finish()
        divisor = max(commit.tokens, 1.0) * self.loss_scale.value
        self.grad_norm = math.sqrt(max(commit.sumsq, 0.0)) / divisor
        if commit.found_inf:
            self.grad_norm = math.inf
            if half_way is not None:
                half_way()
        else:
            factor = 1.0 / divisor
            if self.clip > 0.0 and self.grad_norm > self.clip:
                factor *= self.clip / (self.grad_norm + 1e-6)
            with self.loss_scale.put_aside():
                self._update(factor, mark, marked, half_way)
        self.gradients.stepped(commit)
        self.loss_scale.stepped(bool(commit.found_inf))
        if not (commit.found_inf and self.loss_scale):
            advance_scheduler(self.scheduler, self.layout)

    def _update(self, factor: float, mark: Mark, marked: int, half_way: Callable[[], None] | None) -> None:
        if self._undoable is not None:
            self._undoable.run(factor, mark, marked, half_way)
            return
        self.gradients.scale(factor)
        self.optimizer.prepare_grads()
        if half_way is None:
            self.optimizer.step_with_ready_grads()
        else:
            counts = GroupCounts(inner_optimizers(self.optimizer))
            groups = [g["params"] for o in inner_optimizers(self.optimizer) for g in o.param_groups]
            with only(self.optimizer, [p for params in groups for p in params[: (len(params) + 1) // 2]]):
                self.optimizer.step_with_ready_grads()
            half_way()
            counts.rewind()
            with only(self.optimizer, [p for params in groups for p in params[(len(params) + 1) // 2 :]]):
                self.optimizer.step_with_ready_grads()
            counts.stepped()

    @torch.no_grad()
    def show_main_params(self) -> None:
        show_main_params(self.optimizer)

    # ---------------------------------------------------------- python-side state

    def extra_state(self) -> bytes:
        inners = inner_optimizers(self.optimizer)
        state: dict[str, Any] = {"lr": [g.get("lr") for inner in inners for g in inner.param_groups]}
        if any(count is not None for count in group_counts(inners)):
            state["counts"] = group_counts(inners)
        if self.scheduler is not None:
            plain = (int, float, bool, str, type(None))
            state["scheduler"] = {
                k: v for k, v in self.scheduler.state_dict().items()
                if isinstance(v, plain) or (isinstance(v, list) and all(isinstance(x, plain) for x in v))
            }  # fmt: skip
        state.update(self.own_state())
        data = msgspec.msgpack.encode(state)
        if len(data) > EXTRA_BYTES_MAX:
            raise ExtraStateTooLarge(f"scheduler state: {len(data)} bytes, the arena's header holds {EXTRA_BYTES_MAX}")
        return data

    def load_extra(self, data: bytes) -> None:
        data = data.rstrip(b"\xc1")  # never used by MessagePack: padding of extra_tensor
        if not data:
            return
        state = msgspec.msgpack.decode(data)
        if self.scheduler is not None and "scheduler" in state:
            restore_scheduler(self.scheduler, {**self.scheduler.state_dict(), **state["scheduler"]})
        self.load_own(state)
        groups = [g for o in inner_optimizers(self.optimizer) for g in o.param_groups]
        for group, lr in zip(groups, state["lr"], strict=True):
            group["lr"] = lr
        if "counts" in state:
            set_group_counts(inner_optimizers(self.optimizer), state["counts"])

    def own_state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside parameters, optimizer and schedule, as plain values."""
        scales = {"loss_scale": self.loss_scale.state()} if self.loss_scale else {}
        return {**self.gradients.own_state(), **scales}

    def load_own(self, state: dict[str, Any]) -> None:
        """state: as own_state() gave it, with whatever else."""
        self.gradients.load_own(state)
        if "loss_scale" in state:
            self.loss_scale.load(state["loss_scale"])

    def extra_tensor(self) -> torch.Tensor:
        """extra_state padded to a fixed size, to be sent to a rank without state."""
        return torch.frombuffer(bytearray(self.extra_state().ljust(EXTRA_BYTES_MAX, b"\xc1")), dtype=torch.uint8)
