"""An agent between two coordinators that both believe they decide: the newer term counts."""

from __future__ import annotations

from machines import Agent
from unicron.agent import events as on
from unicron.agent.actions import LeaveCoordinator, SendCoordinator
from unicron.messages import AgentWelcome, EndWorker


def connected(*terms: int) -> Agent:
    agent = Agent()
    for term in terms:
        agent.feed(on.CoordinatorDisconnected())
        agent.feed(on.CoordinatorConnected())
        agent.feed(on.CoordinatorMessage(AgentWelcome(term)))
    return agent


def test_an_older_term_is_left_and_not_obeyed() -> None:
    agent = connected(2, 1)
    assert any(isinstance(action, LeaveCoordinator) for action in agent.actions)
    assert agent.machine.state.term == 2
    agent.feed(on.CoordinatorMessage(EndWorker("t", "n0.w0", "no live worker of a known task")))
    assert [a.name for a in agent.actions if hasattr(a, "name")] == ["stale_term"]
    assert not [a for a in agent.actions if not hasattr(a, "name")]


def test_the_newer_one_is_taken_again() -> None:
    agent = connected(2, 1, 3)
    assert not any(isinstance(action, LeaveCoordinator) for action in agent.actions)
    assert (agent.machine.state.term, agent.machine.state.is_stale) == (3, False)


def test_an_older_term_is_taken_when_the_newer_one_was_not_heard_for_long() -> None:
    """A journal that was lost begins at term 1 again; a coordinator whose lease ran out does not last so long."""
    agent = connected(2)
    agent.feed(on.CoordinatorDisconnected())
    agent.feed(on.CoordinatorConnected(), after_ms=agent.config.term_ms_max + 1)
    assert any(isinstance(action, SendCoordinator) for action in agent.actions)
    agent.feed(on.CoordinatorMessage(AgentWelcome(1)))
    assert (agent.machine.state.term, agent.machine.state.is_stale) == (1, False)
