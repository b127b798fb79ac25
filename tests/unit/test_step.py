"""The step's fault point: half of the parameters are written, and who lives on ends with the same bits."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from unicron.healing.record import CommitResult
from unicron.training.optimizer_state import even_optimizer_steps
from unicron.training.step import Stepper
from unicron.types import Layout


class Optimizer:
    """The parts of megatron's FP32Optimizer that a step uses, around a real torch optimizer."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        groups = [{"params": params[:3]}, {"params": params[3:], "lr": 0.5}]
        self.optimizer = torch.optim.Adam(groups, lr=0.1)
        self.config = SimpleNamespace(clip_grad=1.0)

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        self.optimizer.step()
        return True


def make() -> tuple[Stepper, list[torch.nn.Parameter]]:
    torch.manual_seed(7)
    params = [torch.nn.Parameter(torch.randn(n, 3)) for n in (1, 2, 3, 4, 5)]
    gradients = SimpleNamespace(
        scale=lambda factor: [p.grad.mul_(factor) for p in params if p.grad is not None],
        finish=lambda: None,
        stepped=lambda commit: None,
        own_state=dict,
        load_own=lambda state: None,
    )
    stepper = Stepper(Optimizer(params), None, Layout(dp=2, num_micro_batches=2), gradients)  # type: ignore[arg-type]
    return stepper, params


def run(faulty: int) -> tuple[list[torch.nn.Parameter], list[list[bool]]]:
    """Three steps, with a half_way in one of them; which parameters had been written there."""
    stepper, params = make()
    seen: list[list[bool]] = []
    for iteration in range(3):
        torch.manual_seed(iteration)
        for param in params:
            param.grad = torch.randn_like(param)
        before = [p.detach().clone() for p in params]

        def look(before: list[torch.Tensor] = before) -> None:
            seen.append([not torch.equal(old, new) for old, new in zip(before, params, strict=True)])

        commit = CommitResult(iteration, 4.0, 9.0, 0.0, 1.0)
        half_way: Any = look if iteration == faulty else None
        stepper.step(commit, lambda *_: None, half_way=half_way)
    return params, seen


def test_at_the_fault_point_half_of_each_group_is_written() -> None:
    _, seen = run(1)
    assert seen == [[True, True, False, True, False]]


def test_who_survives_the_fault_point_ends_with_the_same_bits() -> None:
    undisturbed, _ = run(-1)
    disturbed, _ = run(1)
    assert all(torch.equal(a, b) for a, b in zip(undisturbed, disturbed, strict=True))


def test_a_torn_state_is_made_even_before_a_checkpoint_is_loaded_over_it() -> None:
    """Megatron's sharded_state_dict refuses step counts that differ."""
    stepper, params = make()
    for param in params:
        param.grad = torch.ones_like(param)

    class Died(Exception):
        pass

    def die() -> None:
        raise Died

    with contextlib.suppress(Died):
        stepper.step(CommitResult(0, 4.0, 9.0, 0.0, 1.0), lambda *_: None, half_way=die)
    inner = stepper.optimizer.optimizer
    stepper.optimizer.step_with_ready_grads()
    assert len({float(state["step"]) for state in inner.state.values()}) == 2
    even_optimizer_steps(stepper.optimizer)
    assert len({float(state["step"]) for state in inner.state.values()}) == 1


def test_counts_of_groups_go_with_the_state() -> None:
    """Apex's and Transformer Engine's Adam count their steps there: an heir that began at 0 would correct anew."""
    stepper, _ = make()
    heir, _ = make()
    assert "counts" not in msgspec.msgpack.decode(stepper.extra_state())
    for group, count in zip(stepper.optimizer.optimizer.param_groups, (7, 9), strict=True):
        group["step"] = count
    heir.load_extra(stepper.extra_state())
    assert [group["step"] for group in heir.optimizer.optimizer.param_groups] == [7, 9]
