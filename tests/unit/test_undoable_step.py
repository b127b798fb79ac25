"""A sharded step dies anywhere, and an heir finishes it: the same bits as a step that nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron.training import undoable_step
from unicron.training.optimizer_state import force_optimizer_state
from unicron.training.undoable_step import UndoableStep, chunks_of, only, tensors_of, undo_bytes

SIZES = ((1,), (7, 3), (2,), (40,), (5, 5), (300,), (4,))


class Died(Exception):
    pass


class Optimizer:
    """The parts of megatron's DistributedOptimizer that a sharded step uses, around a real torch optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.params = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        self.gradients = [torch.randn(size) for size in SIZES]
        groups = [{"params": self.params[:3]}, {"params": self.params[3:], "lr": 0.5}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.copied = 0

    def prepare_grads(self) -> bool:
        for param, gradient in zip(self.params, self.gradients, strict=True):
            param.grad = gradient
        return False

    def _copy_main_params_to_model_params(self) -> None:
        self.copied += 1


def make() -> tuple[Optimizer, torch.Tensor]:
    optimizer = Optimizer()
    force_optimizer_state(optimizer)
    return optimizer, torch.zeros(undo_bytes(optimizer), dtype=torch.uint8)


def bits(optimizer: Optimizer) -> list[bytes]:
    state = optimizer.optimizer.state
    tensors = [t for p in optimizer.params for t in (p.data, *(state[p][key] for key in sorted(state[p])))]
    return [t.numpy().tobytes() for t in tensors]


def undisturbed(steps: int) -> list[bytes]:
    optimizer, undo = make()
    for _ in range(steps):
        UndoableStep(optimizer, undo).run(0.25, lambda *_: None)
    return bits(optimizer)


class DyingParams:
    """torch's own update of one parameter after another, until the n-th write of a tensor since the start."""

    def __init__(self, optimizer: Optimizer, writes: int) -> None:
        self.optimizer, self.writes = optimizer, writes
        self.step = optimizer.optimizer.step

    def __call__(self) -> None:
        groups = self.optimizer.optimizer.param_groups
        for param in [p for group in groups for p in group["params"]]:
            self.writes -= 1
            if self.writes < 0:
                param.data.fill_(float("nan"))  # torn
                self.optimizer.optimizer.state[param]["exp_avg"].zero_()
                raise Died
            with only(self.optimizer, [param]):
                self.step()


@settings(max_examples=40, deadline=None)
@given(deaths=st.lists(st.integers(0, 12), max_size=4))
def test_who_dies_in_the_step_again_and_again_ends_with_the_same_bits(deaths: list[int]) -> None:
    optimizer, undo = make()
    marks = [0]
    UndoableStep(optimizer, undo).run(0.25, lambda *_: None)
    step = optimizer.optimizer.step
    for writes in deaths:
        optimizer.optimizer.step = DyingParams(optimizer, writes)  # type: ignore[method-assign]
        try:
            UndoableStep(optimizer, undo).run(0.25, lambda mark, _: marks.append(mark), marks[-1])
        except Died:
            continue
        break
    else:
        optimizer.optimizer.step = step  # type: ignore[method-assign]
        UndoableStep(optimizer, undo).run(0.25, lambda mark, _: marks.append(mark), marks[-1])
    assert bits(optimizer) == undisturbed(2)
    assert marks == sorted(marks) and marks[-1] == 2 * len(chunks_of(optimizer))


def test_the_gradient_is_not_touched() -> None:
    """It is needed whole by an heir, and by nobody's next step twice scaled."""
    optimizer, undo = make()
    before = [g.clone() for g in optimizer.gradients]
    UndoableStep(optimizer, undo).run(0.25, lambda *_: None)
    assert all(torch.equal(a, b) for a, b in zip(before, optimizer.gradients, strict=True))
    assert optimizer.copied == 1 and all(param.grad is None for param in optimizer.params)


def test_chunks_hold_every_parameter_once_in_order() -> None:
    optimizer, _ = make()
    chunks = chunks_of(optimizer)
    assert [id(p) for chunk in chunks for _, p in chunk] == [id(p) for p in optimizer.params]
    assert len(chunks) >= 3


@pytest.mark.parametrize("raises", [False, True])
def test_only_restores_the_groups(raises: bool) -> None:
    optimizer, _ = make()
    groups = optimizer.optimizer.param_groups
    before = [list(map(id, group["params"])) for group in groups]

    def inside(act: Callable[[], Any]) -> None:
        with only(optimizer, optimizer.params[2:4]):
            assert [len(group["params"]) for group in groups] == [1, 1]
            act()

    if raises:
        with pytest.raises(ZeroDivisionError):
            inside(lambda: 1 // 0)
    else:
        inside(lambda: None)
    assert [list(map(id, group["params"])) for group in groups] == before


def test_a_gpu_that_is_behind_its_host_is_followed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU writes marks in its own order, while the host has counted the steps of chunks that the GPU never came to.
    Here the counts, tensors without a dimension, are the host's part."""
    monkeypatch.setattr(undoable_step, "device_of", lambda chunks: torch.device("meta"))
    monkeypatch.setattr(
        undoable_step, "tensors_on",
        lambda device, params: [t for t in tensors_of(params) if (t.dim() == 0) == (device.type == "cpu")],
    )  # fmt: skip
    optimizer, undo = make()
    UndoableStep(optimizer, undo).run(0.25, lambda *_: None)
    of_gpu = [*undoable_step.tensors_on(torch.device("meta"), undoable_step.params_of(optimizer)), undo]
    seen: list[tuple[int, list[torch.Tensor]]] = []
    waited = []

    def mark(number: int, wait: bool) -> None:
        waited.append(wait)
        seen.append((number, [tensor.clone() for tensor in of_gpu]))

    UndoableStep(optimizer, undo).run(0.25, mark)
    assert waited == [True] + [False] * (2 * len(chunks_of(optimizer)) - 1)
    expected = bits(optimizer)
    for number, then in seen:
        for tensor, old in zip(of_gpu, then, strict=True):
            tensor.copy_(old)
        UndoableStep(optimizer, undo).run(0.25, lambda *_: None, number)
        assert bits(optimizer) == expected, f"died at mark {number}"
