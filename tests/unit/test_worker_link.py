"""Who a worker says it is: one built again for the role it was given is a member, not an understudy.

Found by killing at 1,2,2: an understudy that had guessed another role said `waiting` once more after it held one, so
its agent took it for an understudy, armed no fault in it and gave it scratch memory.
"""

from __future__ import annotations

import pytest

from unicron.messages import ChangeLayout, LayoutReady, MoveRoles, PublishEpoch, encode
from unicron.training.link import WorkerLink
from unicron.types import EpochPlan, Layout, Member, PlanKind

LAYOUT = Layout(dp=2, num_micro_batches=2)


def plan_of(epoch: int) -> EpochPlan:
    return EpochPlan("t", epoch, PlanKind.MOVE, LAYOUT, (0, 1), (Member(0, "n0", "n0.w0"), Member(1, "n2", "n2.w0")))


def test_a_worker_finds_itself_in_the_newest_plan() -> None:
    link = object.__new__(WorkerLink)  # without its connection: only what it was told matters here
    link.worker, link.plan = "n0.w3", None
    assert link.member() is None
    members = (Member(0, "n0", "n0.w3"), Member(1, "n0", "n0.w1"))
    link.plan = EpochPlan("t", 2, PlanKind.REPLACE, Layout(dp=2, num_micro_batches=2), (0, 1), members, (0,), (0,))
    assert link.member() == members[0]
    link.worker = "n0.w9"
    assert link.member() is None


@pytest.mark.parametrize("kind", [MoveRoles, ChangeLayout])
def test_the_plan_that_an_announcement_starts_from_does_not_call_it_off(kind: type[MoveRoles | ChangeLayout]) -> None:
    """Found by the swarm (seed 16819): a joiner's node was away for a moment. When it came back it was told of the plan
    in force, which the joiner had never heard of, and the announcement was dropped: the state that the leaver sent met
    nobody, and all held until the bound of the move, 120 s."""
    link = object.__new__(WorkerLink)
    link.plan, link.change, link.move, link.told_to_hold, link.refuses_layouts = None, None, None, False, ""
    order = kind("t", plan_of(2), plan_of(3), "n1 is drained")

    def is_known() -> bool:
        return order in (link.move, link.change)

    link._take(encode(order))
    assert is_known()
    link._take(encode(PublishEpoch(plan_of(2))))
    assert link.plan == plan_of(2) and is_known()
    link._take(encode(PublishEpoch(plan_of(3))))
    assert link.plan == plan_of(3) and not is_known()


def test_a_worker_that_cannot_change_its_layout_says_so_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    link = object.__new__(WorkerLink)
    link.worker, link.plan, link.change, link.refuses_layouts = "n0.w1", None, None, "not on a GPU"
    said: list[object] = []
    monkeypatch.setattr(link, "send", said.append)
    link._take(encode(ChangeLayout("t", plan_of(2), plan_of(3), "asked for")))
    assert link.change is None
    assert said == [LayoutReady("n0.w1", -1, 3, 0, error="not on a GPU")]
