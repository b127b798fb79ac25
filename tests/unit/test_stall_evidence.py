"""Who stands still is ended only on two independent signals, and not at all where the job says to observe only."""

from __future__ import annotations

import msgspec
import pytest

from machines import Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.incident import Incident
from unicron.coordinator.job import Job, refusal_of
from unicron.messages import AgentHeartbeat, EndWorker
from unicron.types import Cpu, Layout, Outcome, Severity, Stage

LAYOUT = Layout(dp=3, num_micro_batches=6)


def cluster(**fields: object) -> tuple[Coordinator, list[str]]:
    """A running task of three replicas on three nodes, and its members by rank."""
    driver = running(LAYOUT, nodes=3, slots=1, **fields)
    assert driver.task.plan is not None
    return driver, [member.worker for member in driver.task.plan.members]


def ended(driver: Coordinator) -> list[str]:
    return [message.worker for message in driver.sent(EndWorker)]


def told(driver: Coordinator) -> list[Incident]:
    return list(driver.machine.state.incidents.values())


@pytest.mark.parametrize(("cpu", "ends"), [
    (Cpu.IDLE, True), (Cpu.BUSY, False), (Cpu.STARVED, False), (Cpu.UNKNOWN, False),
])  # fmt: skip
def test_a_suspicion_needs_all_others_waiting_and_a_sleeping_process(cpu: Cpu, ends: bool) -> None:
    driver, workers = cluster()
    driver.stalled(workers[1], waiting=False, is_sure=False, cpu=cpu)
    assert not ended(driver)
    driver.stalled(workers[0], waiting=True, is_sure=False, cpu=Cpu.IDLE)
    assert not ended(driver), "the third may still compute"
    driver.stalled(workers[2], waiting=True, is_sure=False, cpu=Cpu.IDLE)
    assert ended(driver) == ([workers[1]] if ends else [])
    if ends:
        (incident,) = told(driver)
        assert (incident.fault, incident.rank) == ("stalled", 1)
        assert "nothing of it runs, and all 2 others wait" in incident.cause


@pytest.mark.parametrize(("cpu", "one_waits", "ends"), [
    (Cpu.BUSY, False, False), (Cpu.UNKNOWN, False, False), (Cpu.STARVED, False, False),
    (Cpu.IDLE, False, True), (Cpu.BUSY, True, True), (Cpu.UNKNOWN, True, True), (Cpu.STARVED, True, False),
])  # fmt: skip
def test_sure_needs_a_second_signal_still(cpu: Cpu, one_waits: bool, ends: bool) -> None:
    driver, workers = cluster()
    if one_waits:
        driver.stalled(workers[0], waiting=True, is_sure=False)
    driver.stalled(workers[1], waiting=False, cpu=cpu)
    assert ended(driver) == ([workers[1]] if ends else [])


def test_a_lonely_one_that_computes_is_given_twice_its_budget() -> None:
    driver, workers = cluster()
    driver.stalled(workers[1], waiting=False, cpu=Cpu.BUSY)
    driver.fire(f"stall/{workers[1]}")
    assert ended(driver) == [workers[1]]


@pytest.mark.parametrize(("stalled_ms", "budget_ms", "ends"), [
    (6_001.0, 6_000.0, True), (3_001.0, 3_000.0, True), (2_900.0, 2_000.0, False), (1_600.0, 1_500.0, False),
])  # fmt: skip
def test_three_times_a_long_phase_is_enough_without_evidence(stalled_ms: float, budget_ms: float, ends: bool) -> None:
    """A short phase may have a long piece of work; of one of seconds, three times the usual is what was promised."""
    driver, workers = cluster()
    usual_ms = budget_ms / 3
    driver.stalled(
        workers[1], waiting=False, cpu=Cpu.BUSY, usual_ms=usual_ms, budget_ms=budget_ms, stalled_ms=stalled_ms
    )
    assert ended(driver) == ([workers[1]] if ends else [])
    if not ends:
        driver.fire(f"stall/{workers[1]}")
        assert ended(driver) == [workers[1]]


@pytest.mark.parametrize("usual_ms", [0.0, 5.0])
def test_a_bound_that_was_stated_is_given_twice(usual_ms: float) -> None:
    """Of the script's own code between iterations a usual is known, too, but it is not what the budget is made of."""
    driver, workers = cluster()
    told: dict[str, object] = {"budget_ms": 120_000.0, "stalled_ms": 120_100.0, "usual_ms": usual_ms}
    driver.stalled(workers[1], waiting=False, cpu=Cpu.BUSY, stage=Stage.IDLE, **told)
    assert not ended(driver)
    driver.fire(f"stall/{workers[1]}")
    assert ended(driver) == [workers[1]]


def test_one_that_had_no_processor_is_ended_after_many_budgets_though_others_wait() -> None:
    """Found by the soak: on a machine loaded to many times its cores a rank was ended for its neighbours' load."""
    driver, workers = cluster()
    driver.stalled(workers[0], waiting=True, is_sure=False)
    driver.stalled(workers[1], waiting=False, cpu=Cpu.STARVED)
    fired = 0
    while not ended(driver) and fired < 20:
        driver.fire(f"stall/{workers[1]}")
        fired += 1
    assert ended(driver) == [workers[1]] and 5 <= fired <= 8


def test_all_that_wait_are_an_answer_only_when_all_are_sure() -> None:
    driver, workers = cluster()
    for name in workers:
        driver.stalled(name, waiting=True, is_sure=False)
    assert not told(driver)
    for name in workers:
        driver.stalled(name, waiting=True)
    assert [incident.fault for incident in told(driver)] == ["all wait"]


def test_who_does_not_move_when_all_were_freed_waits_for_nobody() -> None:
    """It stands before its collective, says that it waits, and so do the others, in theirs: they are freed, not it."""
    driver, workers = cluster()
    for name in workers:
        driver.stalled(name, waiting=True)
    assert driver.task.epoch == 2 and not ended(driver)
    driver.stalled(workers[1], waiting=True)
    assert not ended(driver), "nobody was seen to move since"
    driver.worker(workers[0]).progress += 1
    driver.stalled(workers[1], waiting=True, cpu=Cpu.STARVED)
    assert not ended(driver)
    driver.stalled(workers[1], waiting=True)
    assert ended(driver) == [workers[1]]
    assert [incident.fault for incident in told(driver)] == ["all wait", "stalled"]


def test_all_that_wait_in_the_healing_are_freed_again() -> None:
    driver, workers = cluster()
    for stage in (Stage.COMPUTE, Stage.HEAL):
        for name in workers:
            driver.stalled(name, waiting=True, stage=stage)
    assert driver.task.epoch == 3 and not ended(driver)


def test_observe_only_tells_what_it_would_have_ended() -> None:
    driver, workers = cluster(observe_only=True)
    for again in range(2):
        driver.stalled(workers[1], waiting=False, cpu=Cpu.IDLE)
        assert not ended(driver)
        (incident,) = told(driver)
        assert (incident.severity, incident.outcome) == (Severity.INFO, Outcome.UNAFFECTED)
        assert f"observed only: {workers[1]} would have been ended" in incident.cause, again
    driver.continued(workers[1])
    (incident,) = told(driver)
    assert incident.timeline[-1][1] == f"{workers[1]} went on by itself"


@pytest.mark.parametrize("knows_planned", [True, False])
def test_who_moved_before_the_plan_only_did_not_move_for_it(knows_planned: bool) -> None:
    """A GPU's worker stood before a collective that the others were in. The plan that freed them went out between two
    heartbeats, and the next one told how far that worker had come before: it was taken for an answer to the plan."""
    driver, workers = cluster()
    for name in workers:
        driver.stalled(name, waiting=True, stage=Stage.REDUCE)
    assert driver.task.epoch == 2, "all are freed"
    for name in workers:
        status = msgspec.structs.replace(
            driver.status(driver.worker(name), stage=Stage.REDUCE if name == workers[1] else Stage.HEAL),
            progress=70 if name == workers[1] else 90,
            progress_planned=70 if knows_planned else None,
        )
        node = driver.worker(name).node
        driver.feed(on.AgentMessage(node, AgentHeartbeat(node, driver.incarnations[node], 1, (status,))))
    driver.stalled(workers[1], waiting=True, stage=Stage.REDUCE, cpu=Cpu.IDLE)
    assert ended(driver) == ([workers[1]] if knows_planned else []), "an agent of 0.5 does not say: the longer bound"


def test_observe_only_frees_nobody_either() -> None:
    driver, workers = cluster(observe_only=True)
    for name in workers:
        driver.stalled(name, waiting=True)
    (incident,) = told(driver)
    assert incident.fault == "all wait" and incident.is_only_told and driver.task.epoch == 1


def test_observe_only_leaves_a_stopped_worker_alone() -> None:
    driver, workers = cluster(observe_only=True, stopped_grace_ms=50)
    driver.stopped(workers[1])
    driver.fire(f"stop/{workers[1]}")
    assert not ended(driver)
    assert "observed only" in told(driver)[0].cause


def test_a_death_after_an_observation_is_an_incident_of_its_own() -> None:
    driver, workers = cluster(observe_only=True)
    driver.stalled(workers[1], waiting=False, cpu=Cpu.IDLE)
    driver.lost(workers[1], "signal 11")
    observed, lost = told(driver)
    assert observed.outcome is Outcome.UNAFFECTED and "observed only" in observed.cause
    assert (lost.fault, lost.severity, lost.cause) == ("worker lost", Severity.SEV2, "signal 11")


@pytest.mark.parametrize("wrong", [{"slow_ratio": 1.0}, {"slow_ratio": float("nan")}])
def test_a_job_that_cannot_be(wrong: dict[str, float]) -> None:
    assert "slow_ratio" in refusal_of(Job("t", ("x",), Layout(num_micro_batches=1), **wrong))
