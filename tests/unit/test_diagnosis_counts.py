"""What a failure means beside the recent ones."""

from __future__ import annotations

from typing import Any

import pytest

from unicron.diagnosis.counts import Counted, CountLimits, Seen, count
from unicron.diagnosis.words import Scope
from unicron.types import Severity

pytestmark = pytest.mark.timeout(30)


def seen(at_ms: float = 100_000.0, node: str = "n0", **changes: Any) -> Seen:
    what = {"severity": Severity.SEV2, "scope": Scope.PROCESS, "signature": "KeyError at f"}
    return Seen(at_ms, node, **{**what, "rank": 3, "iteration": 7, "micro_batch": 1, **changes})


def verdict(incident: Seen, *recent: Seen, num_nodes: int = 8) -> tuple[str, str]:
    found = count(incident, recent, num_nodes)
    assert bool(found.reason) == ((found.severity, found.scope) != (incident.severity, incident.scope))
    return found.severity.value, found.scope.value


ONCE = ("SEV2", "process")


def test_one_failure_is_what_it_is() -> None:
    assert count(seen(), [], 8) == Counted(Severity.SEV2, Scope.PROCESS)
    assert verdict(seen(), seen()) == ONCE  # itself among the recent


def test_the_same_place_twice_is_fatal() -> None:
    assert verdict(seen(incarnation=2), seen(1000, incarnation=1)) == ("FATAL", "job")


@pytest.mark.parametrize(
    "change",
    [{"iteration": 8}, {"micro_batch": 2}, {"signature": "other"}, {"rank": 4}, {"incarnation": 2}],
    ids=lambda change: next(iter(change)),
)
def test_another_place_is_not(change: dict[str, Any]) -> None:
    earlier = {"node": "n1", "incarnation": 1, **change}
    same_life = {"node": "n0"} if "incarnation" in change else {}
    assert verdict(seen(incarnation=2), seen(1000, **{**earlier, **same_life})) == ONCE


def test_no_place_is_no_repetition() -> None:
    assert verdict(seen(iteration=-1, incarnation=2), seen(1000, node="n1", iteration=-1)) == ONCE
    assert verdict(seen(signature="", incarnation=2), seen(1000, node="n1", signature="")) == ONCE


def test_the_same_node_at_other_work_is_the_node() -> None:
    assert verdict(seen(), seen(1000, iteration=3, signature="x")) == ("SEV1", "node")
    assert verdict(seen(), seen(1000, iteration=3, node="n1")) == ONCE


def test_a_node_is_not_blamed_for_what_is_old_counted_or_shared() -> None:
    old = seen(100_000.0, iteration=3)
    assert verdict(seen(100_000.0 + CountLimits().node_window_ms + 1), old) == ONCE
    assert verdict(seen(), seen(1000, iteration=3, severity=Severity.INFO)) == ONCE
    assert verdict(seen(), seen(1000, iteration=3, scope=Scope.STORAGE)) == ONCE


def test_all_nodes_at_once_is_the_job_or_storage() -> None:
    others = [seen(100_000.0 + index, f"n{index}", rank=10 + index) for index in range(1, 8)]
    assert verdict(seen(), *others) == ("SEV2", "job")
    storage = count(seen(scope=Scope.STORAGE), others, 8)
    assert (storage.scope, storage.count) == (Scope.STORAGE, 8)
    hardware = {"severity": Severity.SEV1, "scope": Scope.NODE}
    assert verdict(seen(**hardware), *others) == ("SEV2", "job")


def test_a_moment_later_is_not_at_once() -> None:
    others = [seen(50_000.0, f"n{index}", rank=10 + index) for index in range(1, 8)]
    assert verdict(seen(), *others) == ONCE


def test_one_node_alone_is_never_all_nodes() -> None:
    assert verdict(seen(), num_nodes=1) == ONCE


def test_hardware_and_verdicts_stay() -> None:
    hardware = seen(severity=Severity.SEV1, scope=Scope.GPU, incarnation=2)
    assert count(hardware, [seen(1000, severity=Severity.SEV1, scope=Scope.GPU)], 8).severity is Severity.SEV1
    for severity in (Severity.FATAL, Severity.INFO):
        assert not count(seen(severity=severity), [seen(1000, iteration=3)] * 3, 8).reason
