"""Who a worker says it is: one built again for the role it was given is a member, not an understudy.

Found by killing at 1,2,2: an understudy that had guessed another role said `waiting` once more after it held one, so
its agent took it for an understudy, armed no fault in it and gave it scratch memory.
"""

from __future__ import annotations

from unicron.training.link import WorkerLink
from unicron.types import EpochPlan, Layout, Member, PlanKind


def test_a_worker_finds_itself_in_the_newest_plan() -> None:
    link = object.__new__(WorkerLink)  # without its connection: only what it was told matters here
    link.worker, link.plan = "n0.w3", None
    assert link.member() is None
    members = (Member(0, "n0", "n0.w3"), Member(1, "n0", "n0.w1"))
    link.plan = EpochPlan("t", 2, PlanKind.REPLACE, Layout(dp=2, num_micro_batches=2), (0, 1), members, (0,), (0,))
    assert link.member() == members[0]
    link.worker = "n0.w9"
    assert link.member() is None
