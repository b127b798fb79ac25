"""A thousand nodes beat two thousand times a second: a heartbeat without news must not cost a look at them all."""

from __future__ import annotations

import pytest

from machines import Coordinator, running
from unicron.coordinator import machine
from unicron.coordinator.machine import CHECK_MS


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was looked at in full."""
    found: list[str] = []
    settle_all, check = machine.settle_all, machine.check

    def settle(step: object) -> None:
        found.append("settled")
        settle_all(step)  # type: ignore[arg-type]

    def checked(*arguments: object) -> None:
        found.append("checked")
        check(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(machine, "settle_all", settle)
    monkeypatch.setattr(machine, "check", checked)
    return found


def test_a_heartbeat_without_news_settles_nothing(looks: list[str]) -> None:
    driver: Coordinator = running()
    driver.beat("n0")
    looks.clear()
    for _ in range(20):
        driver.beat("n0")
        driver.beat("n1")
    assert "settled" not in looks and len(looks) <= 1 + 40 / CHECK_MS  # the invariants: ten times a second at most
    driver.now_ms += CHECK_MS
    driver.beat("n0")
    assert looks[-1] == "checked"


def test_a_heartbeat_with_news_does(looks: list[str]) -> None:
    driver: Coordinator = running()
    driver.fire("silence/n0")
    looks.clear()
    driver.beat("n0")  # suspected a moment ago, and heard again
    assert looks == ["settled", "checked"]
