"""Everybody went back, and does many iterations again: longer than a healing may take, and yet nothing is wrong."""

from __future__ import annotations

from machines import TASK, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.transitions import TaskPhase
from unicron.messages import AgentHeartbeat, WorkerStatus
from unicron.types import Layout, PlanKind, Stage

KNOWN = 700


def gone_back() -> Coordinator:
    """At iteration 700 the state was lost; everybody loads the checkpoint of 600."""
    driver = running(Layout(dp=2, num_micro_batches=4), checkpoint_dir="ckpt", checkpoint_every=100)
    for worker in list(driver.task.workers):
        driver.saved(worker, 600)
    at(driver, KNOWN)
    driver.state_lost(driver.task.plan.members[0].worker)  # type: ignore[union-attr]
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.RESTORE and driver.task.phase is TaskPhase.HEALING
    return driver


def at(driver: Coordinator, iteration: int) -> None:
    """The members' loops are there now, computing."""
    for member in driver.task.plan.members:  # type: ignore[union-attr]
        worker = driver.task.workers[member.worker]
        status = WorkerStatus(
            TASK, worker.name, worker.incarnation, 100, worker.rank, False, True, driver.task.epoch, Stage.COMPUTE,
            iteration, progress=driver.now_ms,
        )  # fmt: skip
        beat = AgentHeartbeat(worker.node, driver.incarnations[worker.node], 1, (status,))
        driver.feed(on.AgentMessage(worker.node, beat))


def test_who_advances_is_left_alone() -> None:
    driver = gone_back()
    epoch = driver.task.epoch
    for iteration in (610, 640, 690):
        at(driver, iteration)
        driver.fire(f"heal/{TASK}")
        assert (driver.task.epoch, driver.task.heal_tries) == (epoch, 0)
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING


def test_who_does_not_advance_is_not() -> None:
    driver = gone_back()
    epoch = driver.task.epoch
    at(driver, 610)
    driver.fire(f"heal/{TASK}")
    driver.fire(f"heal/{TASK}")
    assert driver.task.epoch == epoch + 1 and driver.task.heal_tries == 1


def test_a_healing_that_did_not_go_back_has_its_bound() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4))
    at(driver, KNOWN)
    driver.lost(driver.task.plan.members[0].worker, iteration=KNOWN)  # type: ignore[union-attr]
    epoch = driver.task.epoch
    at(driver, KNOWN)
    driver.fire(f"heal/{TASK}")
    assert driver.task.epoch == epoch + 1
