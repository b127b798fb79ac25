"""What the cluster earned and what failures cost, and that a coordinator that comes back still knows it."""

from __future__ import annotations

import pytest

from several import Cluster
from unicron.coordinator import events as on
from unicron.coordinator.accounting import cost_of
from unicron.coordinator.incident import Incident
from unicron.coordinator.transitions import TaskPhase
from unicron.runtime import views
from unicron.types import Method, Outcome, Severity


def incident(**fields: object) -> Incident:
    known = {
        "id": "i1", "task": "t", "fault": "node lost", "severity": Severity.SEV1, "node": "n0", "rank": 0,
        "method": Method.CONNECTION, "opened_ms": 1_000.0, "slots": 8,
    }  # fmt: skip
    return Incident(**{**known, **fields})  # type: ignore[arg-type]


def test_cost_of_an_incident_part_by_part() -> None:
    done = incident(detect_ms=250.0, resume_ms=1_250.0, outcome=Outcome.RESIZED, missing_slots=2, healthy_ms=12_000.0)
    cost = cost_of(done, 50_000.0)
    assert cost["detection_gpu_s"] == pytest.approx(8 * 0.25)
    assert cost["transition_gpu_s"] == pytest.approx(8 * 1.0)
    assert cost["sub_healthy_gpu_s"] == pytest.approx(2 * 10.0)  # from 1,000 + 1,250 - 250 ms on
    assert cost["total_gpu_s"] == pytest.approx(30.0)
    still = incident(detect_ms=None, resume_ms=500.0, outcome=Outcome.RESIZED, missing_slots=2)
    assert cost_of(still, 2_500.0)["sub_healthy_gpu_s"] == pytest.approx(2 * 1.0)
    is_open = incident(detect_ms=100.0)
    assert cost_of(is_open, 2_000.0)["transition_gpu_s"] == pytest.approx(8 * 1.0)
    assert cost_of(incident(outcome=Outcome.UNAFFECTED), 9e9)["total_gpu_s"] == 0.0


def wait(cluster: Cluster, seconds: float) -> None:
    cluster.now_ms += 1000 * seconds


def test_time_waf_and_ettr_survive_a_restart() -> None:
    cluster = Cluster(nodes=2)
    cluster.run("a", 4, throughput={n: n * 1e12 for n in (1, 2, 3, 4)}, weight=2.0)
    began_ms = cluster.now_ms
    wait(cluster, 100)
    cluster.lose("n1")
    wait(cluster, 50)
    cluster.hello("n1", 2)
    cluster.bring_up()
    wait(cluster, 50)
    task = cluster.tasks()["a"]
    before = (task.accounts.spent(cluster.now_ms), task.accounts.flop_until(cluster.now_ms))
    assert before[0]["running"] == pytest.approx(200_000.0, abs=100) and before[0]["recovering"] < 100
    assert before[1] == pytest.approx(2 * 1e12 * (100 * 4 + 50 * 2 + 50 * 4), rel=1e-3)
    assert 0.999 < (task.accounts.ettr(cluster.now_ms) or 0.0) < 1.0
    (lost,) = cluster.machine.state.incidents.values()
    assert (lost.slots, lost.missing_slots) == (4, 2) and lost.healthy_ms is not None
    cost = cost_of(lost, cluster.now_ms)
    assert cost["sub_healthy_gpu_s"] == pytest.approx(2 * 50.0, rel=0.01)
    history = list(cluster.machine.state.waf_history)
    assert {waf for _, waf in history} >= {8e12, 4e12, 0.0} and history[0][0] <= began_ms

    now_ms = cluster.now_ms
    cluster.restart()
    again = cluster.tasks()["a"]
    assert again.accounts.flop_until(now_ms) == pytest.approx(before[1], rel=1e-6)
    assert again.accounts.spent(now_ms)["running"] == pytest.approx(before[0]["running"], abs=1)
    assert list(cluster.machine.state.waf_history)[: len(history)] == history
    assert cost_of(cluster.machine.state.incidents[lost.id], now_ms) == cost
    view = views.cluster_view(cluster.machine.state, now_ms)
    assert view["cost"]["total_gpu_s"] == pytest.approx(cost["total_gpu_s"])


def test_suspension_is_no_loss_and_waiting_is_one() -> None:
    cluster = Cluster(nodes=1)
    cluster.run("a", 2)
    wait(cluster, 10)
    cluster.ask(on.SuspendRequested("s", "a"))
    cluster.say_saved("a", 5)
    wait(cluster, 1_000)
    task = cluster.tasks()["a"]
    assert task.phase is TaskPhase.SUSPENDED
    assert (task.accounts.ettr(cluster.now_ms) or 0.0) > 0.99
    cluster.ask(on.ResumeRequested("s", "a"))
    cluster.run("high", 2, priority=3, replicas_min=2)
    cluster.say_saved("a", 6)
    assert task.phase is TaskPhase.WAITING
    wait(cluster, 90)
    assert (task.accounts.ettr(cluster.now_ms) or 0.0) == pytest.approx(0.1, abs=0.02)


def test_the_planner_learns_from_what_was_seen() -> None:
    cluster = Cluster(nodes=2)
    cluster.run("a", 4)
    state = cluster.machine.state
    count, seconds = state.transitions_s["start"]
    assert count == 1 and seconds > 0
    failures = state.num_failures
    cluster.lose("n1")
    assert state.num_failures == failures + 1 and state.node_faults == {"n1": 1}
    assert "shrink" in state.transitions_s
    wait(cluster, 10)
    cluster.hello("n1", 2)
    cluster.bring_up()
    assert "grow" in state.transitions_s and state.slot_ms > 10_000
