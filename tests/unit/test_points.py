"""Faults around and inside operations with others: where each goes off, and what an operation without one is like."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unicron import _core
from unicron.faults.kinds import AFTER, BEFORE, INSIDE, FaultKind, FaultPoint
from unicron.faults.perform import InjectedFault
from unicron.training import fault_points as module
from unicron.training.engine import Engine
from unicron.training.fault_points import FaultPoints
from unicron.types import Stage, WaitKind

ITERATION = 5


class Setting:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, stage: Stage = Stage.COMPUTE) -> None:
        monkeypatch.setattr(module, "OTHERS_ARE_IN_S", 0.0)
        self._pages = _core.create_pulse_pages(1)
        self.pulse = _core.PulsePage(self._pages, 0)
        self.said: list[str] = []
        self.engine = object.__new__(Engine)
        self.engine.link = SimpleNamespace(pulse=self.pulse)  # type: ignore[assignment]
        record = SimpleNamespace(stage=stage, iteration=ITERATION)
        self.engine.machine = SimpleNamespace(record=record)  # type: ignore[assignment]
        self.engine.refusal = ""
        self.engine.points = FaultPoints(self.pulse, lambda: ITERATION, self.engine._fault)

    def arm(self, point: FaultPoint, number: int) -> None:
        self.pulse.arm_fault(int(FaultKind.EXCEPTION), int(point), ITERATION, number)

    def joint(self, point: FaultPoint) -> None:
        def operation(is_async: bool) -> SimpleNamespace:
            self.said.append("begun" if is_async else "done")
            return SimpleNamespace(wait=lambda: self.said.append("done"))

        self.engine.points.joint(point, operation)


@pytest.mark.parametrize(
    ("number", "said"), [(-1, []), (BEFORE, []), (INSIDE, ["begun"]), (AFTER, ["done"])]
)  # fmt: skip
def test_a_fault_goes_off_before_inside_or_after(number: int, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(monkeypatch)
    setting.arm(FaultPoint.COMMIT, number)
    setting.joint(FaultPoint.CONFIRM)
    assert setting.said == ["done"], "without a fault nothing is begun apart"
    setting.said.clear()
    with pytest.raises(InjectedFault):
        setting.joint(FaultPoint.COMMIT)
    assert setting.said == said


@pytest.mark.parametrize(
    ("kind", "name", "point"),
    [
        (WaitKind.TP, "allreduce", FaultPoint.TENSOR),
        (WaitKind.TP, "all_gather_single", FaultPoint.TENSOR),
        (WaitKind.PP, "send", FaultPoint.SEND),
        (WaitKind.PP, "recv", FaultPoint.RECEIVE),
    ],
)
def test_what_the_schedule_does_with_others_is_a_passage(
    kind: WaitKind, name: str, point: FaultPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(monkeypatch)
    assert setting.engine._enter_operation(kind, name) is None
    setting.arm(point, INSIDE)
    assert setting.engine._enter_operation(WaitKind.DP, "allreduce") is None
    then = setting.engine._enter_operation(kind, name)
    assert then is not None
    with pytest.raises(InjectedFault, match=f"injected at {point.name.lower()} of iteration 5, micro-batch 1"):
        then()
    setting.arm(point, BEFORE)
    with pytest.raises(InjectedFault):
        setting.engine._enter_operation(kind, name)


def test_outside_of_compute_the_same_groups_are_no_tensor_parallel_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """With pp of 1 the group of a replica is its tensor-parallel one: the confirm is said there, too."""
    setting = Setting(monkeypatch, Stage.COMMIT)
    setting.arm(FaultPoint.TENSOR, -1)
    assert setting.engine._enter_operation(WaitKind.TP, "allgather") is None
    tying = Setting(monkeypatch, Stage.TIE)
    tying.arm(FaultPoint.TIE, INSIDE)
    assert tying.engine._enter_operation(WaitKind.PP, "allreduce") is not None
