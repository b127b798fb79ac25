"""Connections broke and nobody died: one break has one incident, however late its other victims tell of it."""

from __future__ import annotations

from machines import TASK, Coordinator, running
from unicron.messages import CollectiveFailed
from unicron.types import Layout, Outcome, PlanKind, Stage

PIPES = Layout(pp=2, dp=2, num_micro_batches=8)  # replicas {0, 2} and {1, 3}


def told(driver: Coordinator, rank: int, *, inside: bool) -> None:
    plan = driver.task.plan
    assert plan is not None
    member = plan.member(rank)
    assert member is not None
    driver.says(CollectiveFailed(member.worker, rank, plan.epoch, 5, Stage.COMMIT, inside, "Connection closed"))


def diagnosed(driver: Coordinator) -> None:
    driver.fire(f"diagnose/{TASK}")


def test_who_tells_late_of_a_break_inside_another_replica_is_answered_under_the_same_incident() -> None:
    """Of a reset in replica 1 the others of its reduction told first, and it some 36 ms later (a busy machine)."""
    driver = running(PIPES, nodes=2, slots=2)
    for rank in (0, 2):
        told(driver, rank, inside=True)
    diagnosed(driver)
    first = driver.task.epoch
    (incident,) = driver.machine.state.incidents.values()
    told(driver, 1, inside=True)
    diagnosed(driver)
    plan = driver.task.plan
    assert plan is not None and plan.epoch == first + 1 and plan.kind is PlanKind.RECONNECT
    assert set(plan.ended) >= {1, 3} and plan.incidents == (incident.id,)
    driver.all_healed()
    (incident,) = driver.machine.state.incidents.values()
    assert incident.outcome is Outcome.HEALED


def test_a_break_after_the_healing_has_its_own() -> None:
    driver = running(PIPES, nodes=2, slots=2)
    for _ in range(2):
        told(driver, 0, inside=True)
        diagnosed(driver)
        driver.all_healed()
    assert [i.outcome for i in driver.machine.state.incidents.values()] == [Outcome.HEALED] * 2


def test_parameters_that_do_not_come_because_of_a_death_are_no_failure_of_their_own() -> None:
    """A member of a whole replica waits for them in its forward, and the others of the replica for that one: a plan
    must touch it, and a person is to read of the death alone. However often, nobody is replaced for it."""
    driver = running(PIPES, nodes=2, slots=2)
    lost = driver.task.holder(1)
    assert lost is not None
    driver.lost(lost.name)
    driver.all_up()
    first = driver.task.epoch
    for turn in range(6):
        plan = driver.task.plan
        assert plan is not None
        member = plan.member(0)
        assert member is not None
        text = "Compute: Connection closed"
        driver.says(CollectiveFailed(member.worker, 0, plan.epoch, 5, Stage.COMPUTE, True, text, late=True))
        plan = driver.task.plan
        assert plan is not None and plan.epoch == first + 1 + turn and 0 in plan.touched, "at once"
    driver.all_healed()
    assert [i.fault for i in driver.machine.state.incidents.values()] == ["worker lost"]


def test_parameters_that_do_not_come_for_no_reason_are_a_failure() -> None:
    driver = running(PIPES, nodes=2, slots=2)
    plan = driver.task.plan
    assert plan is not None
    member = plan.member(0)
    assert member is not None
    driver.says(CollectiveFailed(member.worker, 0, plan.epoch, 5, Stage.COMPUTE, True, "Connection closed", late=True))
    diagnosed(driver)
    (incident,) = driver.machine.state.incidents.values()
    assert incident.fault == "connection" and driver.task.epoch == plan.epoch + 1
