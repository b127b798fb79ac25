"""What a recovery cost, by its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unicron.training.account import Account


class Link(SimpleNamespace):
    worker = "n0.w0"

    def send(self, message: Any) -> None:
        self.sent = message


@pytest.mark.parametrize(("phase", "is_told"), [("AwaitPlan", True), ("Compute", False)])
def test_the_wait_for_a_plan_is_a_part_although_no_healing_has_begun(phase: str, is_told: bool) -> None:
    link = Link()
    plan = SimpleNamespace(epoch=2, wounded=tuple)
    machine: Any = SimpleNamespace(healing=False, rank=0, replica=0, plan=plan)
    groups: Any = SimpleNamespace(kept=lambda: 0)
    account = Account(link, machine, groups)  # type: ignore[arg-type]
    with account.measure(phase):
        pass
    account.committed(7)
    account.healed(7)
    assert (phase in link.sent.phases_ms) == is_told
