"""Counters of the coordinator: each incident once, when it is over, and its cost as it grows."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from unicron.coordinator.incident import Incident
from unicron.coordinator.state import State
from unicron.runtime.metrics_coordinator import CoordinatorMetrics
from unicron.types import Method, Outcome, Severity

OPEN = Incident(
    id="i1", task="t", fault="node lost", severity=Severity.SEV1, node="n1", rank=1, method=Method.CONNECTION,
    opened_ms=1_000.0, slots=4, detect_ms=500.0, decide_ms=600.0,
)  # fmt: skip
CLOSED = msgspec.structs.replace(
    OPEN, outcome=Outcome.RESIZED, resume_ms=2_500.0, missing_slots=2, phases_ms={"compute": 40.0}
)


def sample(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"unicron_{name}", labels) or 0.0


def test_an_incident_counts_once_when_it_is_over() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    count = {"severity": "SEV1", "cause": "node lost"}
    metrics.note_incident(OPEN, 2_000.0)
    assert sample(registry, "incidents_total", **count) == 0
    for _ in range(3):  # every change of it is recorded again
        metrics.note_incident(CLOSED, 4_000.0)
    assert sample(registry, "incidents_total", **count) == 1
    assert sample(registry, "recovery_phase_seconds_sum", phase="resume") == 2.5
    assert sample(registry, "recovery_phase_seconds_count", phase="compute") == 1
    for part, seconds in (("detection", 2.0), ("transition", 8.0), ("sub_healthy", 2.0)):  # 2 slots x (4.0 - 3.0) s
        assert sample(registry, "lost_gpu_seconds_total", cause="node lost", part=part) == seconds, part


def test_slots_that_are_missed_go_on_costing() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    state = State(incidents={"i1": CLOSED}, sub_healthy={"i1"})
    metrics.note_incident(CLOSED, 4_000.0)
    lost = {"cause": "node lost", "part": "sub_healthy"}
    for now_ms, seconds in ((5_000.0, 4.0), (9_000.0, 12.0), (9_000.0, 12.0)):
        list(metrics.families(state, {}, now_ms, 0))
        assert sample(registry, "lost_gpu_seconds_total", **lost) == seconds
    metrics.note_incident(msgspec.structs.replace(CLOSED, healthy_ms=10_000.0), 20_000.0)
    assert sample(registry, "lost_gpu_seconds_total", **lost) == 14.0


def test_a_coordinator_that_comes_back_counts_nothing_again() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    metrics.begin(State(incidents={"i1": CLOSED}, sub_healthy={"i1"}), 5_000.0)
    metrics.note_incident(msgspec.structs.replace(CLOSED, healthy_ms=6_000.0), 6_000.0)
    assert sample(registry, "incidents_total", severity="SEV1", cause="node lost") == 0
    assert sample(registry, "lost_gpu_seconds_total", cause="node lost", part="sub_healthy") == 2.0


def test_a_death_that_was_its_nodes_costs_nothing_of_its_own() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    metrics.note_incident(msgspec.structs.replace(CLOSED, part_of="i0"), 4_000.0)
    assert sample(registry, "lost_gpu_seconds_total", cause="node lost", part="transition") == 0
