"""What the swarm found when sharded tasks with buddies lost nodes: each failed here before it was mended."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from machines import Agent, Coordinator, running
from unicron.agent.actions import SendWorker
from unicron.coordinator import events as on
from unicron.coordinator.actions import SendAgent
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.layout_change import slots_for
from unicron.coordinator.placement import held_slots
from unicron.coordinator.state import Purpose
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.messages import AgentHello, AgentWelcome, EndWorker, LayoutReady, PublishEpoch
from unicron.types import EpochPlan, Layout, Member, PlanKind

CONFIG = CoordinatorConfig(heal_ms_max=6_000.0, silence_ms_max=30_000.0)


def test_a_standby_beside_the_role_it_was_built_for_has_a_slot_of_its_own() -> None:
    """1317: the role was to move away from there, and the slot of the one that stood by was given to another."""
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=3, slots=1, config=CONFIG, standbys=1)
    standby = next(w for w in driver.task.workers.values() if w.purpose is Purpose.STANDBY)
    driver.task.placement[standby.rank] = standby.node
    assert held_slots(driver.task).count(standby.node) == 2


def test_a_change_of_layout_whose_place_is_lost_is_called_off() -> None:
    """1197: it had not been announced, and its newcomers were started on a node that was gone."""
    small, wide = Layout(dp=2, num_micro_batches=4), Layout(pp=2, dp=2, num_micro_batches=4)
    driver = running(small, nodes=4, slots=1, config=CONFIG, layouts=(small, wide))
    driver.feed(on.ReshapeRequested("r2", "t", {"tp": 1, "pp": 2, "dp": 2}))
    assert driver.task.change is not None and "n3" in driver.task.change.placement.values()
    driver.disconnected("n3")
    driver.probed("n3", "gone")
    assert driver.task.change is None and "n3, where roles were to go, is lost" in driver.task.change_refused


def test_slots_that_shall_go_to_another_task_are_no_place_for_a_layout() -> None:
    """191: a role was to move off them, and the new layout was placed there all the same: more roles than slots."""
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=3, slots=1, config=CONFIG)
    state, task = driver.machine.state, driver.task
    other = msgspec.structs.replace(task.job, name="u")
    state.tasks["u"] = type(task)(name="u", job=other)
    targets = {**state.allocation.targets, "u": {0: "n1"}}
    state.allocation = msgspec.structs.replace(state.allocation, targets=targets)
    assert slots_for(state, task) == {"n0": 1, "n2": 1}


def test_a_node_whose_roles_went_elsewhere_hears_so_when_it_is_back() -> None:
    """100725: it was cut off, not dead, and kept their arenas; a role came back to it and found a state of long ago."""
    layout = Layout(dp=4, num_micro_batches=4, sharded=True, buddy=True)
    driver = running(layout, nodes=4, slots=1, config=CONFIG)
    before = driver.task.plan
    assert before is not None
    driver.disconnected("n3")
    driver.probed("n3", "gone")
    assert driver.task.epoch == 2 and driver.task.placement[3] == "n0"
    hello = AgentHello("n3", 1, 1, 1, "tcp://n3:7000", "key", (), (before,), "")
    driver.feed(on.AgentMessage("n3", hello))
    told = [message.plan for message in driver.sent(PublishEpoch)]
    assert told == [driver.task.plan], "its agent drops the arena of a role that has a home elsewhere"


def test_who_is_being_ended_hears_of_no_plan_in_which_another_has_its_role() -> None:
    """401634: its node was cut off and is back; it took the plan for its own before the kill was through."""
    agent = Agent()
    agent.live(("n0.w0", 1, 0, False))
    layout = Layout(dp=2, num_micro_batches=4)
    members = (Member(0, "n1", "n1.w0"), Member(1, "n2", "n2.w0"))
    plan = EpochPlan("t", 4, PlanKind.REPLACE, layout, (0, 1), members, (0,), (0,))
    agent.order(EndWorker("t", "n0.w0", "no live worker of a known task"))
    agent.order(PublishEpoch(plan))
    assert agent.of(SendWorker) == []


def test_a_layout_is_not_decided_while_a_node_does_not_hear() -> None:
    """400756: after a jump of the clock both were suspected; the plan was sent to nobody, and nobody sent it again."""
    small, wide = Layout(dp=2, num_micro_batches=4), Layout(tp=2, num_micro_batches=4)
    driver = running(small, nodes=2, slots=1, config=CONFIG, layouts=(small, wide))
    driver.feed(on.ReshapeRequested("r2", "t", {"tp": 2, "pp": 1, "dp": 1}))
    change = driver.task.change
    assert change is not None and change.plan is not None
    driver.fire("silence/n1")
    for name in ("n0.w0", "n1.w0"):
        rank = next(m.rank for m in change.plan.members if m.worker == name)
        driver.says(LayoutReady(name, rank, change.plan.epoch, 7, "", "d"))
    assert driver.task.epoch == 1, "n1 would not hear of it"
    driver.beat("n1")
    assert driver.task.epoch == 2 and {a.node for a in driver.actions if isinstance(a, SendAgent)} >= {"n0", "n1"}


def gone_silent(answer: Literal["gone", "unknown"], checkpoint: bool, standbys: int = 0) -> Coordinator:
    """All of a task, shards and copies, lived on n0; n1 has room for it."""
    layout = Layout(dp=2, num_micro_batches=4, sharded=True, buddy=True)
    driver = running(layout, nodes=2, slots=2, config=CONFIG, checkpoint_dir="ckpt", standbys=standbys)
    assert set(driver.task.placement.values()) == {"n0"}
    if checkpoint:
        driver.saved("n0.w0", 5)
    driver.lost("n0.w0", "signal 9")
    driver.disconnected("n0")
    while driver.machine.state.nodes["n0"].phase is not NodePhase.LOST:
        driver.probed("n0", answer)
        if answer == "unknown":
            driver.fire("verdict/n0")
    return driver


@pytest.mark.parametrize("standbys", [0, 1])
def test_a_state_that_may_be_whole_on_a_silent_node_is_waited_for_where_there_is_no_other(standbys: int) -> None:
    """400433, had it had no checkpoint: its roles got homes elsewhere at once, found nothing there, and the task was
    stopped for good, two seconds before its node was back."""
    driver = gone_silent("unknown", False, standbys)
    task = driver.task
    assert any(w.purpose is Purpose.STANDBY for w in task.workers.values()) == bool(standbys)
    assert task.phase is TaskPhase.RECOVERING and set(task.placement.values()) == {"n0"}
    assert "ready/t" in driver.machine.state.timers, "not for ever"
    driver.hello("n0")
    driver.all_up()
    plan = driver.task.plan
    assert plan is not None and (plan.kind, plan.heirs) == (PlanKind.REPLACE, (0, 1))
    assert {m.node for m in plan.members} == {"n0"}, "their arenas are there"


def test_it_is_not_waited_for_longer_than_a_worker_may_take_to_come() -> None:
    driver = gone_silent("unknown", checkpoint=False)
    driver.fire("ready/t")
    assert driver.task.outcome == "stopped" and "no checkpoint to return to" in driver.task.cause


@pytest.mark.parametrize(("answer", "checkpoint"), [("gone", False), ("unknown", True)])
def test_a_state_that_is_gone_or_saved_is_not_waited_for(answer: Literal["gone", "unknown"], checkpoint: bool) -> None:
    driver = gone_silent(answer, checkpoint)
    assert set(driver.task.placement.values()) == {"n1"}


def test_a_node_that_was_silent_hears_what_it_missed() -> None:
    """701601: its agent stood still while a change of layout was called off. Its connection lived on, so with its next
    heartbeat it was up again, and nobody sent it the plan: the others waited in it until the bound of a healing."""
    small, tall = Layout(dp=2, num_micro_batches=4), Layout(tp=2, num_micro_batches=4)
    driver = running(small, nodes=2, slots=1, config=CONFIG, layouts=(small, tall))
    before = driver.task.plan
    driver.feed(on.ReshapeRequested("r2", "t", {"tp": 2, "pp": 1, "dp": 1}))
    assert driver.task.change is not None and driver.task.change.plan is not None
    driver.fire("silence/n1")
    driver.beat("n1")
    assert driver.machine.state.nodes["n1"].phase is NodePhase.UP, "it missed nothing"
    driver.fire("silence/n1")
    driver.fire("layout/t")
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.RECONNECT
    assert [a.node for a in driver.actions if isinstance(a, SendAgent) and isinstance(a.message, PublishEpoch)] == [
        "n0"
    ]
    driver.beat("n1")
    assert [message.again for message in driver.sent(AgentWelcome)] == [True]
    assert driver.machine.state.nodes["n1"].phase is NodePhase.SUSPECT and "verdict/n1" in driver.machine.state.timers
    known = tuple(driver.status(w) for w in driver.task.workers.values() if w.node == "n1")
    assert before is not None
    driver.feed(on.AgentMessage("n1", AgentHello("n1", 1, 1, 1, "tcp://n1:7000", "key", known, (before,), "")))
    assert driver.machine.state.nodes["n1"].phase is NodePhase.UP
    assert [message.plan for message in driver.sent(PublishEpoch)] == [plan]
