"""The loss scale of fp16 (Megatron's gradient scaler), where the norm, the step and its overflow are decided elsewhere.

The script's `config.grad_scale_func` multiplies the loss, so the sums that are reduced are that much larger; the one
factor of the step divides by it again. Megatron's own unscaling asks all ranks whether anything overflowed, in the
middle of the step; here the commit has said it already (CommitResult.found_inf), and who has that rolls forward alone.
So the optimizers have no scaler while they prepare their gradients, and it is told afterwards. A step that overflowed
is left out, as Megatron leaves it out, and the schedule of the learning rate stands still.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from unicron.training.optimizer_state import optimizer_parts


def restore(scaler: Any, state: dict[str, Any]) -> None:
    """From what the scaler's own state_dict() gave. (Its load_state_dict() wants a GPU.)"""
    if scaler is None or "scale" not in state:
        return
    scaler._scale = scaler._scale.new_tensor([float(state["scale"])])
    if "growth_tracker" in state:
        scaler._growth_tracker = int(state["growth_tracker"])
        scaler._hysteresis_tracker = int(state["hysteresis_tracker"])


class LossScaleRefused(ValueError):
    """A loss scale with something that cannot have one."""


class LossScale:
    def __init__(self, optimizer: Any, *, exact: bool) -> None:
        self._parts = [part for part in optimizer_parts(optimizer) if getattr(part, "grad_scaler", None) is not None]
        self._scalers = [part.grad_scaler for part in self._parts]
        if self._scalers and exact:
            raise LossScaleRefused(
                "exact mode adds gradients as integers, which a loss scale that changes would overflow: use bf16 or "
                "fp32 (no loss_scale in the OptimizerConfig), or leave exact mode out"
            )

    def require_use(self, config: Any) -> None:
        """config: the TransformerConfig. Raises LossScaleRefused: nobody multiplies by what the step divides by."""
        if self._scalers and getattr(config, "grad_scale_func", None) is None:
            raise LossScaleRefused(
                "the optimizer has a loss scale, and TransformerConfig.grad_scale_func is None: set "
                "config.grad_scale_func = optimizer.scale_loss before manage()"
            )

    def __bool__(self) -> bool:
        return bool(self._scalers)

    @property
    def value(self) -> float:
        """What the sums of this iteration are multiplied by."""
        return float(self._scalers[0].scale) if self._scalers else 1.0

    @contextlib.contextmanager
    def put_aside(self) -> Iterator[None]:
        """Meanwhile the optimizers do not know of it."""
        for part in self._parts:
            part.grad_scaler = None
        try:
            yield
        finally:
            for part, scaler in zip(self._parts, self._scalers, strict=True):
                part.grad_scaler = scaler

    def stepped(self, found_inf: bool) -> None:
        for scaler in self._scalers:
            scaler.update(found_inf)

    def state(self) -> list[dict[str, float]]:
        """Plain values: they go where the state goes. A scale that never changes has none."""
        return [{name: float(value) for name, value in scaler.state_dict().items()} for scaler in self._scalers]

    def load(self, state: list[dict[str, float]]) -> None:
        for scaler, of_scaler in zip(self._scalers, state, strict=True):
            restore(scaler, of_scaler)
