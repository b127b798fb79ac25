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
