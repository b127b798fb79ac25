"""An optimizer's whole state is there before its first step, and what it counts in its groups goes with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.training.optimizer_state import UnknownOptimizer, force_optimizer_state, group_counts, inner_optimizers
from unicron.training.undoable_step import UndoableStep, chunks_of, params_of, tensors_of, undo_bytes

SIZES = ((7, 3), (2,), (300,), (40,), (5, 5))


class Died(Exception):
    pass


class FusedAdam(torch.optim.Optimizer):
    """As Apex's and Transformer Engine's: state in the first step, one count a group."""

    def __init__(self, params: Any, lr: float = 0.1, capturable: bool = False) -> None:
        self.capturable = capturable
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group["step"] + 1 if "step" in group else 1
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                assert param.grad is not None
                state["exp_avg"].mul_(0.9).add_(param.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(param.grad, param.grad, value=0.01)
                count = group["step"]
                root = (state["exp_avg_sq"] / (1 - 0.99**count)).sqrt_().add_(1e-8)
                param.addcdiv_(state["exp_avg"] / (1 - 0.9**count), root, value=-group["lr"])


def init_state_fn(inner: Any, _: Any) -> None:
    """Megatron's of Adam."""
    for group in inner.param_groups:
        for param in group["params"]:
            if len(inner.state[param]) == 0:
                inner.state[param]["exp_avg"] = torch.zeros_like(param.data)
                inner.state[param]["exp_avg_sq"] = torch.zeros_like(param.data)


class Optimizer:
    """Megatron's, of as many chained parts as are given."""

    def __init__(self, *kinds: Any, init: Any = init_state_fn, **settings: Any) -> None:
        torch.manual_seed(3)
        self.params = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        self.gradients = [torch.randn(size) for size in SIZES]
        share = -(-len(SIZES) // len(kinds))
        self.chained_optimizers = [
            SimpleNamespace(
                optimizer=kind([{"params": [param]} for param in self.params[i * share : (i + 1) * share]], **settings),
                init_state_fn=init, config=None,
            )
            for i, kind in enumerate(kinds)
        ]  # fmt: skip

    def prepare_grads(self) -> None:
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient * 4

    def step(self) -> None:
        """As it is without unicron."""
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient
        for inner in inner_optimizers(self):
            inner.step()

    def bits(self) -> list[bytes]:
        return [tensor.detach().numpy().tobytes() for tensor in tensors_of(params_of(self))]


def undoable(optimizer: Any) -> UndoableStep:
    return UndoableStep(optimizer, torch.zeros(undo_bytes(optimizer), dtype=torch.uint8))


@pytest.mark.parametrize("kinds", [(FusedAdam,), (FusedAdam, FusedAdam), (torch.optim.AdamW, FusedAdam)])
def test_a_step_in_chunks_is_one_step(kinds: Any) -> None:
    ours, theirs = Optimizer(*kinds), Optimizer(*kinds)
    force_optimizer_state(ours)
    step = undoable(ours)
    assert len(chunks_of(ours)) > 2
    for number in range(1, 4):
        step.run(0.25, lambda *_: None)
        theirs.step()
        assert ours.bits() == theirs.bits()
        counts = [count for count in group_counts(inner_optimizers(ours)) if count is not None]
        assert counts and set(counts) == {number}


@pytest.mark.parametrize("steps", [0, 2])
def test_whoever_finishes_a_step_counts_it(steps: int) -> None:
    """A death at every mark, behind the last one too, and in the very first step."""
    undisturbed = Optimizer(FusedAdam)
    for _ in range(steps + 1):
        undisturbed.step()
    marks = 2 * len(chunks_of(undisturbed))
    for died_at in range(1, marks + 1):
        optimizer = Optimizer(FusedAdam)
        force_optimizer_state(optimizer)
        step = undoable(optimizer)
        for _ in range(steps):
            step.run(0.25, lambda *_: None)

        def mark(number: int, _: bool, died_at: int = died_at) -> None:
            if number == died_at:
                raise Died

        with pytest.raises(Died):
            step.run(0.25, mark)
        for group in inner_optimizers(optimizer)[0].param_groups:
            group["step"] = steps  # as the heir has it from what the last whole step left
        step.run(0.25, lambda *_: None, died_at)
        assert optimizer.bits() == undisturbed.bits(), f"died at mark {died_at}"
        assert set(group_counts(inner_optimizers(optimizer))) == {steps + 1}


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_momentum_that_is_made_before_is_that_of_the_first_step(nesterov: bool) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    ours, theirs = (Optimizer(torch.optim.SGD, init=None, **settings) for _ in range(2))
    force_optimizer_state(ours)
    assert sum(1 for _ in tensors_of(params_of(ours))) == 2 * len(SIZES)
    for _ in range(2):
        ours.step()
        theirs.step()
    assert ours.bits() == theirs.bits()


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        (torch.optim.Adagrad, {}, "torch.optim.adagrad.Adagrad makes its state in its first step"),
        (FusedAdam, {"capturable": True, "init": init_state_fn}, "build it without capturable"),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, "SGD with dampening"),
    ],
)
def test_what_would_be_lost_with_a_worker_is_refused(kind: Any, settings: dict[str, Any], said: str) -> None:
    optimizer = Optimizer(kind, **{"init": None, **settings})
    with pytest.raises(UnknownOptimizer, match=said):
        force_optimizer_state(optimizer)
