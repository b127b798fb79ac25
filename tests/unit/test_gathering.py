"""Parameters under way while the forward begins: who waits for what, and what is left when they do not come."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unicron.faults.kinds import FaultPoint
from unicron.healing import actions as do
from unicron.training import gathering as module
from unicron.training.engine import Engine
from unicron.training.gathering import Gathering
from unicron.training.watched_group import LostOperation
from unicron.types import Layout

LAYOUT = Layout(dp=2, num_micro_batches=2, sharded=True)


class Group:
    def size(self) -> int:
        return 2


class Setting:
    """One of two ranks. Buckets in the order of a backward: the last layer's first. What comes of a peer is 7."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.GELU(), torch.nn.Linear(2, 2))
        first, last = list(self.model[0].parameters()), list(self.model[2].parameters())
        self.buckets = [self.bucket(last), self.bucket(first)]
        chunks: Any = SimpleNamespace(
            chunks=[self.model], buffers=[SimpleNamespace(buckets=self.buckets)], expert_parallel_buffers=[],
        )  # fmt: skip
        self.said: list[str] = []
        self.breaks = self.refuses = -1
        groups: Any = SimpleNamespace(
            shard_mates_group=lambda: self.group, data_group=lambda: self.group,
            settle_broken=lambda: self.said.append("settled"),
        )  # fmt: skip
        self.group: Any = Group()
        points: Any = SimpleNamespace(maybe=self.passed, enter=lambda *_: None)
        self.gathering = Gathering(0, LAYOUT, chunks, groups, points, lambda error: isinstance(error, LostOperation))
        self.gathering.watch()
        monkeypatch.setattr(module.dist, "all_gather_into_tensor", self.begin)

    def bucket(self, params: list[Any]) -> Any:
        data = torch.zeros(sum(p.numel() for p in params) // 2 * 2)
        place = 0
        for param in params:
            param.data = data[place : place + param.numel()].view(param.shape)
            place += param.numel()
        return SimpleNamespace(params=set(params), param_data=data)

    def passed(self, point: FaultPoint, number: int) -> None:
        if point is FaultPoint.LATE:
            self.said.append(f"wait {number}")

    def begin(self, whole: torch.Tensor, own: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        number = next(n for n, b in enumerate(self.buckets) if b.param_data.data_ptr() == whole.data_ptr())
        if number == self.refuses:
            raise LostOperation("refused")
        assert own.data_ptr() == whole.data_ptr() and 2 * own.numel() == whole.numel()
        self.said.append(f"begin {number}")

        def wait() -> None:
            if number == self.breaks:
                raise LostOperation("a peer died")
            whole[own.numel() :] = 7.0

        return SimpleNamespace(wait=wait, is_completed=lambda: True)

    def forward(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(1, 2))


def test_the_forward_waits_for_what_it_comes_to_and_the_first_layers_begin_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting(monkeypatch)
    setting.gathering.begin()
    assert setting.said == ["begin 1", "begin 0"]
    setting.gathering.wait_for_first()
    assert setting.said[2:] == ["wait 1"] and float(setting.buckets[1].param_data[-1]) == 7.0
    assert float(setting.buckets[0].param_data[-1]) == 0.0, "nobody needed it yet"
    setting.forward()
    assert setting.said[3:] == ["wait 0"] and not setting.gathering.is_under_way
    setting.forward()
    setting.gathering.finish()
    assert len(setting.said) == 4, "once an iteration"


def test_what_no_module_asks_for_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.gathering.begin()
    setting.gathering.finish()
    assert setting.said[2:] == ["wait 1", "wait 0"] and setting.gathering.why_not_whole() == ""


@pytest.mark.parametrize("refused", [True, False])
def test_what_breaks_is_told_by_who_needs_it_and_nothing_is_computed_with_it(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(monkeypatch)
    setting.refuses, setting.breaks = (0, -1) if refused else (-1, 0)
    setting.gathering.begin()  # raises nothing
    with pytest.raises(LostOperation):
        setting.forward()
    assert setting.gathering.is_broken
    with pytest.raises(LostOperation):
        setting.forward()  # as long as it is not dropped
    assert "could not be gathered" in setting.gathering.why_not_whole() and setting.said[-1] == "settled"
    setting.gathering.drop()
    assert not setting.gathering.is_broken and not setting.gathering.is_under_way
    setting.refuses = setting.breaks = -1
    setting.gathering.begin()
    setting.forward()


def test_another_error_is_the_script_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    monkeypatch.setattr(module.dist, "all_gather_into_tensor", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        setting.gathering.begin()


def test_a_rank_with_all_shards_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.group = None
    setting.gathering.begin()
    setting.gathering.run()
    assert setting.said == [] and not setting.gathering.is_under_way


def test_a_model_that_is_left_has_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.gathering.begin()
    setting.gathering.leave()
    setting.forward()
    assert setting.said == ["begin 1", "begin 0"]


@pytest.mark.parametrize(
    ("action", "replica_size", "inside", "late"),
    [
        (do.Compute(iteration=3, micro_batches=(0,), dealt=(0,)), 1, False, True),
        (do.Compute(iteration=3, micro_batches=(0,), dealt=(0,)), 2, True, True),
        (do.FinishGather(), 2, False, True),
        # An evaluation found out, and a plan came: what breaks in the recovery is what it always was.
        (do.RebuildInside(plan=None, touched=None), 2, True, False),  # type: ignore[arg-type]
        (do.Reduce(), 2, False, False),
    ],
)
def test_only_who_needs_the_parameters_breaks_for_want_of_them(
    action: Any, replica_size: int, inside: bool, late: bool
) -> None:
    def raises(_: Any) -> None:
        raise LostOperation("a peer died")

    engine: Any = object.__new__(Engine)
    engine.account = SimpleNamespace(measure=lambda _: contextlib.nullcontext())
    engine.groups = SimpleNamespace(settle_broken=lambda: None)
    engine.link = SimpleNamespace(pulse=SimpleNamespace(set_waiting=lambda _: None))
    engine.layout = Layout(pp=replica_size, dp=2)
    engine.ledger = SimpleNamespace(segments_reduced=0)
    engine.gathering = SimpleNamespace(is_broken=True)
    engine._handlers = {type(action): raises}
    broken = engine._act(action)
    assert (broken.inside, broken.late) == (inside, late)
