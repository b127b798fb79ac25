"""What the simulator's swarm found in the machines: each failed here before it was mended. Seeds in the names of tests
are those of the day; histories of a seed change with the simulator."""

from __future__ import annotations

import pytest

from machines import Agent, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.healing import actions as do
from unicron.healing import events as healing_on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record
from unicron.messages import AgentHello, AgentWelcome, EndWorker
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

CONFIG = CoordinatorConfig(heal_ms_max=6_000.0, silence_ms_max=30_000.0)


def healing() -> Coordinator:
    """n1's member dies; the plan that puts its understudy there is out."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG)
    driver.lost("n1.w0", "signal 9")
    assert driver.task.phase is TaskPhase.HEALING
    return driver


def test_a_lost_node_whose_connection_lived_on_comes_back() -> None:
    """Seed 75: its heartbeats were refused for ever, because it never said hello again."""
    driver = running()
    driver.feed(on.AgentDisconnected("n1"))
    driver.probed("n1", "gone")
    assert driver.machine.state.nodes["n1"].phase is NodePhase.LOST
    driver.beat("n1")
    assert driver.refusals() == ["node_lost"]
    (welcome,) = driver.sent(AgentWelcome)
    assert welcome.again
    agent = Agent()
    agent.live(("n0.w0", 1, 0, False))
    agent.order(welcome)
    (hello,) = agent.said(AgentHello)
    assert [status.worker for status in hello.workers] == ["n0.w0"]
    driver.hello("n1")
    assert driver.machine.state.nodes["n1"].phase is NodePhase.UP


def test_an_older_life_is_not_asked_to_come_back() -> None:
    driver = running()
    driver.feed(on.AgentDisconnected("n1"))
    driver.probed("n1", "gone")
    driver.incarnations["n1"] = 0
    driver.beat("n1")
    assert driver.sent(AgentWelcome) == []


@pytest.mark.parametrize("returns", [False, True])
def test_who_was_not_heard_is_not_killed_for_standing_still(returns: bool) -> None:
    """Seed 182: the plan could not reach n1, and its understudy was ended because it had not moved since the plan."""
    driver = healing()
    driver.disconnected("n1")
    if returns:  # a moment before the bound: still not known to be deaf
        driver.now_ms += 5_000.0
        driver.hello("n1", slots=1, knows=True)
    driver.fire("heal/t")
    assert driver.sent(EndWorker) == []
    assert driver.task.phase is TaskPhase.HEALING and "heal/t" in driver.machine.state.timers


def test_who_was_heard_all_the_while_and_did_not_move_is_ended() -> None:
    driver = healing()
    driver.now_ms += 10.0
    driver.fire("heal/t")
    assert {order.worker for order in driver.sent(EndWorker)} <= {"n0.w0", "n1.w1"}
    assert driver.sent(EndWorker)


def test_a_word_to_hold_does_not_outlive_its_epoch() -> None:
    """Seed 563: a sharded task was told to leave, all voted to hold, and one died before its shard had gone round. Who
    survived held after the recovery, the heir trained on: a hang."""
    layout = Layout(dp=2, num_micro_batches=2, sharded=True)
    members = tuple(Member(rank, "n0", f"n0.w{rank}") for rank in range(2))
    first = EpochPlan("t", 1, PlanKind.START, layout, (0, 1), members, (), ())
    second = EpochPlan("t", 2, PlanKind.REPLACE, layout, (0, 1), members, (1,), (1,))
    machine = HealingMachine(0, layout, 2)

    def step(event: healing_on.AnyEvent) -> do.AnyAction:
        (action,) = machine.step(event)
        return action

    fresh = [Record(rank, 0, Stage.STARTING, num_segments=2) for rank in range(2)]
    action = step(healing_on.Joined(first, fresh[0]))
    while not isinstance(action, do.Ready):
        gathers = isinstance(action, (do.ExchangeInside, do.ExchangeWorld))
        action = step(healing_on.RecordsGathered(fresh) if gathers else healing_on.Done())
    action = step(healing_on.IterationBegun(0))
    while not isinstance(action, do.Commit):
        action = step(healing_on.Done())
    assert isinstance(step(healing_on.CommitDone(CommitResult(0, 2.0, 1.0, 0.0, 1.0, hold=2.0))), do.Step)
    assert isinstance(step(healing_on.Done()), do.Gather)
    machine.step(healing_on.PlanArrived(second))
    assert isinstance(step(healing_on.Broken(False, "Connection closed", -1)), do.ExchangeWorld)
    heir = Record(1, 1, Stage.GATHER, num_segments=2, gathered=False)
    action = step(healing_on.RecordsGathered([machine.record, heir]))
    while not isinstance(action, do.EndIteration):
        action = step(healing_on.Done())
    assert action.commit.hold == 0.0
