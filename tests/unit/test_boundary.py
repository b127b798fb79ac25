"""Where all hold at a boundary, nobody waits for ever: an agent may have forgotten it, or a coordinator come back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from unicron.messages import MoveRoles
from unicron.training import boundary
from unicron.types import EpochPlan, Layout, PlanKind


class Silent:
    """A line to an agent that says nothing more."""

    def __init__(self, plan: EpochPlan) -> None:
        self.plan, self.change, self.move, self.told_to_hold, self.finished = plan, None, None, False, False
        self.monitor = SimpleNamespace(newest_epoch=lambda: plan.epoch)
        self.pulse = SimpleNamespace(advance=lambda *_: None)
        self.said: list[Any] = []

    def take_orders(self) -> None: ...

    def wait_for_orders(self, timeout_ms: int) -> None: ...


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> EpochPlan:
    monkeypatch.setattr(boundary, "HOLD_MS_MAX", 30)
    monkeypatch.setattr(boundary, "LATE_MS", 5)
    return EpochPlan("t", 3, PlanKind.START, Layout(), (0,), (), (), (), "", "")


def test_nobody_says_why(plan: EpochPlan) -> None:
    with pytest.raises(boundary.HeldTooLong, match="all hold at iteration 7"):
        boundary.order_to_hold(Silent(plan), plan, 7)  # type: ignore[arg-type]


def test_nobody_ends_who_has_saved(plan: EpochPlan) -> None:
    saved: list[tuple[int, int]] = []
    checkpoints = SimpleNamespace(save_last=lambda *what: saved.append(what), poll=lambda: None)
    with pytest.raises(boundary.HeldTooLong, match="saved at iteration 7"):
        boundary.save_and_hold(Silent(plan), checkpoints, plan, 0, 7)  # type: ignore[arg-type]
    assert saved == [(6, 3)]


def test_nobody_decides_about_a_move(plan: EpochPlan) -> None:
    """Whoever holds says so first: it may be that no coordinator knows of it."""
    said: list[str] = []
    order = MoveRoles("t", plan, plan, "drained", switch=True)
    move: Any = SimpleNamespace(order=order, rank=0, is_leaver=False, say=lambda phase, **_: said.append(phase))
    with pytest.raises(boundary.HeldTooLong, match="for a move, undecided"):
        boundary.hand_over(Silent(plan), move, None, 7)  # type: ignore[arg-type]
    assert said == ["held"]


def test_a_move_decided_before_a_rank_comes_to_the_boundary_is_not_given_up(plan: EpochPlan) -> None:
    """A slow stayer hears of the new epoch while it still steps: the others use the groups that it prepared, too."""
    moved, later = (msgspec.structs.replace(plan, epoch=epoch) for epoch in (4, 5))
    known = MoveRoles("t", plan, moved, "drained", switch=True)
    assert not boundary.is_given_up(known, known, plan, plan)
    assert not boundary.is_given_up(known, None, moved, plan)  # decided, and not entered yet
    assert boundary.is_given_up(known, None, moved, moved)  # entered: it is over
    assert boundary.is_given_up(known, None, later, plan)  # a failure came in between
    assert boundary.is_given_up(known, None, plan, plan)
    assert boundary.is_given_up(known, MoveRoles("t", plan, later, "another place"), plan, plan)
