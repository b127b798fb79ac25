"""A loop that stands still for three times the usual of its stage is reported, once, with what explains it."""

from __future__ import annotations

from machines import Agent, pulse
from unicron.agent import events as on
from unicron.messages import AgentHello, PublishEpoch, WorkerContinued, WorkerStalled
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

W = "n0.w0"
MS = 1_000_000


def sampled(agent: Agent, now_ms: float, **fields: object) -> None:
    agent.feed(on.PulsesSampled(int(now_ms * MS), ((W, pulse(**fields)),)))


def learned() -> Agent:
    """Ten micro-batches of 1 s each."""
    agent = Agent()
    agent.live((W, 0, 0, False))
    for number in range(11):
        sampled(agent, 1000.0 * number, progress=number, since_ns=1000 * number * MS)
    return agent


def test_stall_after_three_times_the_usual() -> None:
    agent = learned()
    sampled(agent, 12_900.0, progress=10, since_ns=10_000 * MS)
    assert not agent.said(WorkerStalled)
    sampled(agent, 13_100.0, progress=10, since_ns=10_000 * MS, waiting=True)
    (stalled,) = agent.said(WorkerStalled)
    assert (stalled.stalled_ms, stalled.budget_ms, stalled.waiting_in_collective) == (3100.0, 3000.0, True)
    sampled(agent, 14_000.0, progress=10, since_ns=10_000 * MS)
    assert not agent.said(WorkerStalled), "once is enough"
    sampled(agent, 14_100.0, progress=11, since_ns=14_050 * MS)
    assert agent.said(WorkerContinued)


def test_a_new_epoch_begins_the_clock_again() -> None:
    agent = learned()
    member = Member(0, "n0", W, 0)
    agent.order(PublishEpoch(EpochPlan("t", 2, PlanKind.RECONNECT, Layout(), (0,), (member,))))
    sampled(agent, 13_100.0, progress=10, since_ns=10_000 * MS)
    sampled(agent, 15_000.0, progress=10, since_ns=10_000 * MS)
    assert not agent.said(WorkerStalled)
    sampled(agent, 16_200.0, progress=10, since_ns=10_000 * MS)
    assert agent.said(WorkerStalled)


def test_first_iteration_has_a_budget_of_its_own() -> None:
    agent = Agent()
    agent.live((W, 0, 0, False))
    sampled(agent, 0.0, progress=1)
    sampled(agent, 60_000.0, progress=1)
    assert not agent.said(WorkerStalled)


def test_waiting_for_a_role_has_none() -> None:
    agent = Agent()
    agent.live((W, 0, 0, True))
    for now_ms in (0.0, 1e9):
        sampled(agent, now_ms, progress=1, stage=Stage.WAITING)
    assert not agent.said(WorkerStalled)


def test_reports_are_kept_for_a_coordinator_that_comes_back() -> None:
    agent = learned()
    agent.feed(on.CoordinatorDisconnected())
    agent.feed(on.MutexReleased(W, 9, pulse()))
    assert not agent.said(AgentHello)
    agent.feed(on.CoordinatorConnected())
    kinds = [type(a.message).__name__ for a in agent.actions if hasattr(a, "message")]
    assert kinds[0] == AgentHello.__name__
    assert "WorkerLost" in kinds
