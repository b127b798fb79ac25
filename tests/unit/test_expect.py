"""Session.expect: what ends a block of the script's own, and what only ends it early.

Found by the matrix at 2,1,2: a peer of a rank that died in the confirm rolled forward, stood in the new groups and
evaluated in them, while the heir was in the next iteration's forward: gloo saw two different collectives, and aborted.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from unicron import _core
from unicron.faults.kinds import FaultPoint
from unicron.training.engine import Engine
from unicron.training.fault_points import FaultPoints
from unicron.training.groups import GroupInterrupted
from unicron.training.session import Session
from unicron.training.watched_group import Helpers, LostOperation, WatchedGroup
from unicron.types import Stage, WaitKind

pytestmark = pytest.mark.timeout(60)


class Setting:
    """A session whose engine has everything that a block meets: a pulse page and a group."""

    def __init__(self, healing: bool = False, others_in: int = -1) -> None:
        self._pages = _core.create_pulse_pages(1)
        self.pulse = _core.PulsePage(self._pages, 0)
        self.settled = 0
        engine = self.engine = object.__new__(Engine)
        engine.link = SimpleNamespace(pulse=self.pulse)  # type: ignore[assignment]
        record = SimpleNamespace(stage=Stage.IDLE, iteration=8)
        engine.machine = SimpleNamespace(record=record, healing=healing)  # type: ignore[assignment]
        engine.memory = SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment]
        groups = SimpleNamespace(require_whole=self._require_whole, settle_broken=self._settle)
        engine.groups = groups  # type: ignore[assignment]
        engine.meeting, engine.refusal = SimpleNamespace(others_in=others_in, left_in=None), ""
        engine.points = FaultPoints(self.pulse, lambda: record.iteration, engine._fault)
        self.not_whole = ""
        engine.gathering = SimpleNamespace(why_not_whole=lambda: self.not_whole)  # type: ignore[assignment]
        self.is_whole = True
        session = self.session = object.__new__(Session)
        session.rank, session._engine, session._next, session._reported = 0, engine, 8, False
        session._link = engine.link
        backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
        self.group = WatchedGroup(
            backend, Helpers(), lambda: "whole", self.pulse, WaitKind.TP, engine._enter_operation
        )  # fmt: skip

    def _require_whole(self, *, inside: bool) -> None:
        if not self.is_whole:
            raise LostOperation("ended by a plan")

    def _settle(self) -> None:
        self.settled += 1

    def evaluate(self) -> float:
        loss = torch.ones(1)
        self.group.allreduce([loss]).wait()
        return float(loss)


def test_a_block_that_ends_is_finished_and_its_bound_is_told() -> None:
    setting = Setting()
    with setting.session.expect("evaluation", 2.5) as evaluation:
        assert setting.evaluate() == 1.0 and setting.pulse.stage == Stage.EVALUATE
    assert evaluation.finished and setting.pulse.stage == Stage.IDLE and not setting.settled


@pytest.mark.parametrize(
    "error", [LostOperation("x"), RuntimeError("gloo: Connection closed by peer"), dist.DistError()]
)
def test_a_collective_that_breaks_ends_the_block_and_not_the_script(error: Exception) -> None:
    setting = Setting()
    with setting.session.expect("evaluation", 1) as evaluation:
        raise error
    assert not evaluation.finished and setting.pulse.stage == Stage.IDLE and setting.settled == 1


def test_on_a_gpu_what_was_ended_looks_like_any_other_and_is_not_good() -> None:
    setting = Setting()
    setting.is_whole = False
    with setting.session.expect("evaluation", 1) as evaluation:
        pass
    assert not evaluation.finished


def test_an_error_of_the_script_is_the_script_s() -> None:
    setting = Setting()
    with pytest.raises(ZeroDivisionError), setting.session.expect("evaluation", 1) as evaluation:
        math.floor(1 / 0)
    assert not evaluation.finished and setting.pulse.stage == Stage.IDLE
    setting.session._reported = True  # by train_step, in such a block
    with pytest.raises(LostOperation), setting.session.expect("evaluation", 1):
        raise LostOperation("told already")


def test_while_work_of_a_recovery_is_left_the_script_does_nothing_with_others() -> None:
    setting = Setting(healing=True)
    with setting.session.expect("evaluation", 1) as evaluation:
        setting.evaluate()
    assert not evaluation.finished and "a recovery is not over" in evaluation.left_out
    assert setting.evaluate() == 1.0, "the next iteration's collectives are training's"
    setting.engine.machine.healing = False
    with setting.session.expect("evaluation", 1) as evaluation:
        setting.evaluate()
    assert evaluation.finished


def test_before_the_first_iteration_all_are_together() -> None:
    setting = Setting()
    setting.session._next = 0
    with setting.session.expect("evaluation", 1) as evaluation:
        setting.evaluate()
    assert evaluation.finished


def test_who_is_given_iterations_again_that_others_do_inside_of_one_train_step_does_nothing_with_them() -> None:
    """Found with `unicron demo --scenario checkpoint` at 2,1,2 and an evaluation after every iteration: heirs evaluated
    while the other ranks of their replicas trained, and gloo aborted three times over.
    """
    setting = Setting(others_in=8)
    with setting.session.expect("evaluation", 1) as evaluation:
        setting.evaluate()
    assert not evaluation.finished and "other scripts are in iteration 8" in evaluation.left_out
    setting.session._next = 9
    with setting.session.expect("evaluation", 1) as evaluation:
        setting.evaluate()
    assert evaluation.finished and not evaluation.left_out


def test_a_fault_is_met_when_the_block_begins() -> None:
    setting = Setting()
    setting.pulse.arm_fault(5, int(FaultPoint.EVALUATE), 8, -1)
    with pytest.raises(RuntimeError, match="injected at evaluate"), setting.session.expect("evaluation", 1):
        raise AssertionError("not reached")


def test_a_refused_operation_says_why() -> None:
    setting = Setting()
    setting.engine.refusal = "left out"
    with pytest.raises(GroupInterrupted, match="left out"):
        setting.evaluate()


def test_without_the_parameters_that_are_under_way_nothing_is_evaluated() -> None:
    setting = Setting()
    setting.not_whole = "the parameters could not be gathered: a peer died"
    with setting.session.expect("evaluation", 2.5) as evaluation, contextlib.suppress(GroupInterrupted):
        setting.evaluate()
    assert not setting.session.wait_for_parameters()
    assert "a peer died" in evaluation.left_out
