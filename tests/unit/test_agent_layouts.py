"""Arenas of a layout that is announced stand beside the present ones until a plan decides which are the task's."""

from __future__ import annotations

import pytest

from machines import Agent
from unicron.agent import events as on
from unicron.agent.actions import DropArena, GrantArena, SendWorker
from unicron.messages import ArenaRequest, ChangeLayout, PublishEpoch
from unicron.types import EpochPlan, Layout, Member, PlanKind

FIRST, SECOND = "n0.w0", "n0.w1"
OLD = EpochPlan("t", 1, PlanKind.START, Layout(dp=2), (0, 1), (Member(0, "n0", FIRST), Member(1, "n0", SECOND, 1)))
NEW = EpochPlan(
    "t", 2, PlanKind.RESHAPE, Layout(tp=2), (0,), (Member(0, "n0", SECOND, 1), Member(1, "n0", FIRST)), (0, 1)
)


def announced() -> Agent:
    """Both hold an arena of their role and have asked for one of the other role in the layout that comes."""
    agent = Agent()
    agent.live((FIRST, 0, 0, False), (SECOND, 1, 1, False))
    agent.order(PublishEpoch(OLD))
    for worker, rank in ((FIRST, 0), (SECOND, 1)):
        agent.feed(on.ArenaRequested(worker, ArenaRequest("t", worker, rank, 4096, "old", False)))
    agent.order(ChangeLayout("t", OLD, NEW, "asked for"))
    assert {a.worker for a in agent.of(SendWorker)} == {FIRST, SECOND}
    for worker, rank in ((FIRST, 1), (SECOND, 0)):
        agent.feed(on.ArenaRequested(worker, ArenaRequest("t", worker, rank, 8192, "new", False, epoch=2)))
        assert [(a.rank, a.nbytes) for a in agent.of(GrantArena)] == [(rank, 8192)]
        assert not agent.of(DropArena), "what may be gone back to stays"
    return agent


def test_the_decision_makes_them_the_tasks_own() -> None:
    agent = announced()
    agent.order(PublishEpoch(NEW))
    assert {a.arena for a in agent.of(DropArena)} == {f"{FIRST}#1", f"{SECOND}#2"}
    roles = {rank: agent.machine.state.arenas[arena].digest for (_, rank), arena in agent.machine.state.roles.items()}
    assert roles == {0: "new", 1: "new"}
    assert agent.machine.state.workers[FIRST].rank == 1


def test_any_other_plan_drops_them() -> None:
    agent = announced()
    back = EpochPlan("t", 2, PlanKind.RECONNECT, OLD.layout, (0, 1), OLD.members, (0, 1))
    agent.order(PublishEpoch(back))
    assert {a.arena for a in agent.of(DropArena)} == {f"{FIRST}#3", f"{SECOND}#4"}
    assert {a.digest for a in agent.machine.state.arenas.values()} == {"old"}
    assert not agent.machine.state.staged and not agent.machine.state.changes


def test_a_plan_that_came_after_the_decision_says_it_too() -> None:
    agent = announced()
    later = EpochPlan("t", 3, PlanKind.REPLACE, NEW.layout, (0,), NEW.members, (0, 1), (0,))
    agent.order(PublishEpoch(later))
    assert {a.digest for a in agent.machine.state.arenas.values()} == {"new"}


@pytest.mark.parametrize("epoch", [1, 3])
def test_an_arena_of_what_is_not_announced_is_refused(epoch: int) -> None:
    agent = announced()
    agent.feed(on.ArenaRequested("r", ArenaRequest("t", FIRST, 0, 4096, "x", False, epoch=epoch)))
    assert not agent.of(GrantArena)
