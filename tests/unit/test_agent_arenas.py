"""An arena is granted to an adopter only when nothing of its former owner can write any more."""

from __future__ import annotations

from machines import Agent, pulse
from unicron.agent import events as on
from unicron.agent.actions import DropArena, GrantArena, LookAtOwner
from unicron.messages import ArenaRequest, ChildStatus, PublishEpoch, StopTask
from unicron.types import EpochPlan, Layout, Member, PlanKind

OWNER, HEIR = "n0.w0", "n0.w1"


def ask(agent: Agent, worker: str, rank: int, *, adopt: bool, digest: str = "d") -> None:
    request = ArenaRequest("t", worker, rank, 4096, digest, adopt)
    agent.feed(on.ArenaRequested(f"r-{worker}-{adopt}", request))


def with_heir() -> Agent:
    """The owner has the role's arena; its understudy has been named heir; the owner is dying."""
    agent = Agent()
    agent.live((OWNER, 0, 0, False), (HEIR, 1, 0, True))
    ask(agent, OWNER, 0, adopt=False)
    ask(agent, HEIR, 0, adopt=False)
    agent.feed(on.MutexReleased(OWNER, 9, pulse()))
    layout = Layout(dp=1)
    plan = EpochPlan("t", 2, PlanKind.REPLACE, layout, (0,), (Member(0, "n0", HEIR, 1),), (0,), (0,))
    agent.order(PublishEpoch(plan))
    return agent


def test_adopter_waits_until_the_owner_is_gone() -> None:
    agent = with_heir()
    ask(agent, HEIR, 0, adopt=True)
    assert not agent.of(GrantArena)
    assert [a.worker for a in agent.of(LookAtOwner)] == [OWNER]
    agent.feed(on.OwnerLooked(OWNER, gone=False))
    assert not agent.of(GrantArena)
    agent.feed(on.OwnerLooked(OWNER, gone=True))
    (grant,) = agent.of(GrantArena)
    assert (grant.arena, grant.worker, grant.create, grant.refused) == (f"{OWNER}#1", HEIR, False, "")
    assert [a.arena for a in agent.of(DropArena)] == [f"{HEIR}#2"], "its scratch is of no use any more"


def test_exit_status_is_evidence_too() -> None:
    agent = with_heir()
    ask(agent, HEIR, 0, adopt=True)
    agent.feed(on.ChildStatusSeen(ChildStatus(OWNER, 50, "signaled", 9), 9, pulse()))
    assert [a.worker for a in agent.of(GrantArena)] == [HEIR]


def test_owner_that_does_not_go_is_waited_for_with_a_bound() -> None:
    agent = with_heir()
    ask(agent, HEIR, 0, adopt=True)
    for _ in range(1000):
        agent.fire(f"look/{OWNER}")
        if agent.of(GrantArena):
            break
    (grant,) = agent.of(GrantArena)
    assert grant.create
    assert "not gone after 5000 ms" in grant.refused


def test_another_layout_is_refused_by_name() -> None:
    agent = with_heir()
    ask(agent, HEIR, 0, adopt=True, digest="other")
    (grant,) = agent.of(GrantArena)
    assert grant.create
    assert grant.refused == "the last arena has another layout"


def test_no_earlier_arena() -> None:
    agent = Agent()
    agent.live((HEIR, 1, 1, False))
    ask(agent, HEIR, 1, adopt=True)
    (grant,) = agent.of(GrantArena)
    assert grant.refused == "no earlier arena on this node"


def test_arena_of_another_role_is_refused() -> None:
    agent = with_heir()
    ask(agent, HEIR, 1, adopt=True)
    assert not agent.of(GrantArena)


def test_arenas_of_an_ended_task_are_dropped() -> None:
    agent = with_heir()
    agent.order(StopTask("t", "over"))
    for number, name in enumerate((OWNER, HEIR)):
        agent.feed(on.ChildStatusSeen(ChildStatus(name, 50 + number, "signaled", 9), 9, pulse()))
    assert not agent.machine.state.arenas
