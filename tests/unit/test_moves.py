"""Roles move to other nodes between two iterations: asked, announced, switched, decided; and called off by whatever
happens before every joiner has its state."""

from __future__ import annotations

from typing import Any

import pytest

from machines import TASK, Agent, Coordinator, running
from unicron.agent.actions import DropArena, SendWorker
from unicron.agent.events import ArenaRequested
from unicron.coordinator import events as on
from unicron.coordinator.moves import RoleMove
from unicron.coordinator.state import Purpose
from unicron.coordinator.transitions import TaskPhase
from unicron.healing import actions as do
from unicron.healing import events as tell
from unicron.healing.machine import HealingMachine, Phase
from unicron.healing.record import Record
from unicron.messages import ArenaRequest, EndWorker, MoveReady, MoveRoles, PublishEpoch, StateLost
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

WIDE = Layout(tp=2, dp=2, num_micro_batches=4)


def drained(nodes: int = 3, node: str = "n1", **fields: Any) -> Coordinator:
    """One of the two nodes that train is drained, and the joiners are ready."""
    driver = running(WIDE, nodes=nodes, **fields)
    driver.feed(on.DrainRequested("d", node, True))
    for worker in list(driver.task.workers.values()):
        if worker.purpose is Purpose.STANDBY:
            driver.up(worker.name)
    return driver


def move_of(driver: Coordinator) -> RoleMove:
    assert driver.task.moving is not None
    return driver.task.moving


def say(driver: Coordinator, phase: str, *, only: int = 99, error: str = "", iteration: int = 7) -> None:
    """Everybody who has a part in it, or the first few of them."""
    move, plan = move_of(driver), driver.task.plan
    assert plan is not None
    names = [m.worker for m in plan.members] if phase == "prepared" else []
    names += [m.worker for m in move.plan.members if m.rank in move.plan.heirs]
    for name in names[:only]:
        driver.says(MoveReady(name, 0, move.plan.epoch, phase, iteration, joiners_of(move.plan), error))


def joiners_of(plan: EpochPlan) -> tuple[str, ...]:
    return tuple(m.worker for m in plan.members if m.rank in plan.heirs)


def test_a_drained_node_is_left_without_a_rollback() -> None:
    driver = drained()
    (order, *_) = driver.sent(MoveRoles)
    assert order.plan.kind is PlanKind.MOVE and order.plan.heirs == order.plan.touched == (2, 3)
    assert not order.switch and {m.node for m in order.plan.members} == {"n0", "n2"}
    leavers = {m.worker for m in order.former.members if m.rank in (2, 3)}
    say(driver, "prepared", only=5)
    assert not driver.sent(MoveRoles), "somebody's groups do not stand yet"
    say(driver, "prepared")
    assert move_of(driver).is_switching
    say(driver, "moved", only=1)
    assert driver.task.phase is TaskPhase.RUNNING and driver.task.epoch == 1
    say(driver, "moved")
    plan = driver.task.plan
    assert plan is not None and plan == order.plan and driver.task.moving is None
    assert {o.plan.epoch for o in driver.sent(PublishEpoch)} == {plan.epoch}
    assert not driver.sent(EndWorker), "leavers leave by themselves"
    for name in leavers:
        driver.exited(name)
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.fault, incident.severity, incident.outcome) == ("move", "INFO", "healed")
    assert "n1 is drained" in incident.cause
    assert not {w.name for w in driver.task.workers.values()} & leavers
    assert driver.task.restarts == 0, "nothing failed"


def test_a_leaver_that_stays_is_ended() -> None:
    driver = drained()
    move = move_of(driver)
    say(driver, "prepared")
    say(driver, "moved")
    leaver = next(w for w in driver.task.workers.values() if w.node == "n1" and w.rank == move.plan.heirs[0])
    driver.fire(f"end/{leaver.name}")
    assert [o.worker for o in driver.sent(EndWorker)] == [leaver.name]


@pytest.mark.parametrize("phase", ["announced", "switching"])
def test_a_leaver_that_dies_in_the_middle_is_an_unplanned_failure(phase: str) -> None:
    driver = drained()
    move = move_of(driver)
    if phase == "switching":
        say(driver, "prepared")
        say(driver, "moved", only=1)
    plan = driver.task.plan
    assert plan is not None
    leaver = next(m.worker for m in plan.members if m.rank == 3)
    joiners = {m.worker for m in move.plan.members if m.rank in move.plan.heirs}
    driver.lost(leaver, "signal 9")
    assert driver.task.moving is None
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.REPLACE and plan.heirs == (3,)
    assert plan.epoch > move.plan.epoch, "what was met under the announced number is of the move"
    assert next(m.node for m in plan.members if m.rank == 3) == "n1"
    assert {o.worker for o in driver.sent(EndWorker)} == joiners
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING


def test_a_joiner_that_dies_calls_the_move_off() -> None:
    driver = drained()
    say(driver, "prepared")
    joiner = move_of(driver).plan.member(3)
    assert joiner is not None
    driver.lost(joiner.worker, "signal 9")
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.RECONNECT and plan.touched == ()
    assert driver.task.moving is None


def test_what_cannot_be_prepared_is_said_and_nobody_is_disturbed() -> None:
    driver = drained()
    say(driver, "prepared", only=1, error="OSError: no")
    assert driver.task.moving is None and driver.task.epoch == 1
    assert driver.sent(EndWorker) and not driver.sent(PublishEpoch)


def test_undrained_in_the_middle_everything_stays() -> None:
    driver = drained()
    say(driver, "prepared")
    driver.feed(on.DrainRequested("u", "n1", False))
    target = driver.machine.state.target(TASK)
    assert len(target) == 4


def test_a_move_has_a_bound() -> None:
    driver = drained()
    driver.fire(f"move/{TASK}")
    assert driver.task.moving is None and driver.task.epoch == 1


def test_a_coordinator_that_comes_back_frees_who_holds() -> None:
    driver = drained()
    move = move_of(driver)
    say(driver, "prepared")
    driver.restart()
    assert driver.task.moving is None
    for node in ("n0", "n1", "n2"):
        driver.hello(node, knows=True)
    name = next(m.worker for m in move.plan.members if m.rank == 0)
    driver.says(MoveReady(name, 0, move.plan.epoch, "held", 7, joiners_of(move.plan)))
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.RECONNECT and plan.epoch > move.plan.epoch


def test_what_was_said_of_another_plan_does_not_count() -> None:
    driver = drained()
    move = move_of(driver)
    plan = driver.task.plan
    assert plan is not None
    for name in (*(m.worker for m in plan.members), *joiners_of(move.plan)):
        driver.says(MoveReady(name, 0, move.plan.epoch, "prepared", -1, ("n2.w77",)))
    assert not move.prepared and not move.is_switching


def test_two_nodes_move_at_once() -> None:
    driver = running(WIDE, nodes=4)
    for node in ("n0", "n1"):
        driver.feed(on.DrainRequested(node, node, True))
    for worker in list(driver.task.workers.values()):
        if worker.purpose is Purpose.STANDBY:
            driver.up(worker.name)
    assert move_of(driver).plan.heirs == (0, 1, 2, 3)
    say(driver, "prepared")
    say(driver, "moved")
    plan = driver.task.plan
    assert plan is not None and {m.node for m in plan.members} == {"n2", "n3"}


def test_without_a_free_node_replicas_leave_as_before() -> None:
    driver = drained(nodes=2)
    plan = driver.task.plan
    assert driver.task.moving is None
    assert plan is not None and plan.kind is PlanKind.SHRINK and plan.replicas == (0,)


@pytest.mark.parametrize("starts_again", [False, True])
def test_where_all_end_the_move_ends_too(starts_again: bool) -> None:
    """Found by the swarm (seed 70837): a node was lost in the middle of a move, and with it shards of the state, so
    that no plan came that would have called the move off: a move without a bound, of a task that has no workers."""
    sharded = Layout(tp=2, dp=2, num_micro_batches=4, sharded=True)
    driver = running(sharded, nodes=3, checkpoint_dir="/ckpt")
    driver.feed(on.DrainRequested("d", "n1", True))
    driver.all_up()
    move = move_of(driver)
    if starts_again:
        driver.says(StateLost("n0.w0", 0, driver.task.epoch, 0, (0,)))
    else:
        driver.saved("n0.w0", 5)
        driver.disconnected("n0")
        driver.probed("n0", "gone")
    assert driver.task.is_restarting is starts_again and driver.task.plan is None
    assert driver.task.moving is None and driver.task.epoch_floor >= move.plan.epoch


# ------------------------------------------------------------ agents


def plans() -> tuple[EpochPlan, EpochPlan]:
    layout = Layout(dp=2, num_micro_batches=4)
    before = (Member(0, "n0", "n0.w0"), Member(1, "n1", "n1.w0"))
    after = (Member(0, "n2", "n2.w0"), Member(1, "n0", "n0.w1"))
    return (
        EpochPlan(TASK, 1, PlanKind.START, layout, (0, 1), before),
        EpochPlan(TASK, 2, PlanKind.MOVE, layout, (0, 1), after, (0, 1), (0, 1)),
    )


def test_an_agent_keeps_the_joiners_arena_and_drops_the_leavers() -> None:
    former, plan = plans()
    agent = Agent()
    agent.live(("n0.w0", 0, 0, False), ("n0.w1", 1, 1, True))
    agent.order(PublishEpoch(former))
    agent.feed(ArenaRequested("a", ArenaRequest(TASK, "n0.w0", 0, 100, "d", False)))
    agent.order(MoveRoles(TASK, former, plan, "drained"))
    assert {a.worker for a in agent.of(SendWorker)} == {"n0.w0", "n0.w1"}
    agent.feed(ArenaRequested("b", ArenaRequest(TASK, "n0.w1", 1, 100, "d", False)))
    state = agent.machine.state
    leavers, joiners = (next(a.id for a in state.arenas.values() if a.owner == w) for w in ("n0.w0", "n0.w1"))
    agent.order(PublishEpoch(plan))
    assert [a.arena for a in agent.of(DropArena)] == [leavers], "whoever comes back must not find it"
    assert state.roles == {(TASK, 1): joiners}
    agent.order(MoveRoles(TASK, former, plan, "drained"))
    assert not agent.of(SendWorker), "it is over"


# ------------------------------------------------------------ workers


def test_everybody_meets_on_entering_the_iteration() -> None:
    """Also whole replicas of several ranks: all hold at the boundary, so nobody computes beside another's meeting."""
    layout = Layout(tp=2, dp=2, num_micro_batches=4)
    members = tuple(Member(rank, f"n{rank // 2}", f"w{rank}") for rank in range(4))
    machine = HealingMachine(0, layout, 1)
    start = EpochPlan(TASK, 1, PlanKind.START, layout, (0, 1), members)
    machine.plan, machine.phase, machine._inside_done = start, Phase.BETWEEN, 1
    machine.record = Record(0, 5, Stage.IDLE, num_segments=1)
    machine.step(tell.PlanArrived(EpochPlan(TASK, 2, PlanKind.MOVE, layout, (0, 1), members, (2, 3), (2, 3))))
    (action,) = machine.step(tell.IterationBegun(5))
    assert isinstance(action, do.ExchangeWorld)
