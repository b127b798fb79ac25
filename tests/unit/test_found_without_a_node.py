"""What the swarm found when sharded tasks with buddies lost nodes: each failed here before it was mended."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from machines import Agent, Coordinator, running
from several import Cluster
from unicron.agent.actions import SendWorker
from unicron.coordinator import events as on
from unicron.coordinator.actions import SendAgent
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.layout_change import slots_for
from unicron.coordinator.placement import held_slots
from unicron.coordinator.state import Purpose
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.messages import (
    AgentHello,
    AgentWelcome,
    EndWorker,
    FromWorker,
    LayoutReady,
    PublishEpoch,
    WorkerUp,
)
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

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


@pytest.mark.parametrize("has_begun", [False, True])
def test_who_was_left_out_of_the_start_is_ended_by_a_coordinator_that_comes_back(has_begun: bool) -> None:
    """605111: the order to end it was lost with its giver. It waited for a role on the slot its replica had to have to
    come back, for ever."""
    driver = Coordinator(CONFIG)
    for number in range(4):
        driver.hello(f"n{number}", slots=1)
    driver.submit(Layout(pp=2, dp=2, num_micro_batches=4))
    assert driver.task.placement == {0: "n0", 2: "n1", 1: "n2", 3: "n3"}
    for name in ("n0.w0", "n1.w0") if has_begun else ():
        driver.up(name)
    driver.disconnected("n3")
    driver.probed("n3", "gone")
    assert driver.task.phase is (TaskPhase.RUNNING if has_begun else TaskPhase.STARTING)
    driver.restart()
    for node in ("n0", "n1", "n2"):
        driver.hello(node, slots=1, knows=True)
    left_out = driver.worker("n2.w0")
    driver.feed_fact("n2", WorkerUp("n2", driver.status(left_out, stage=Stage.WAITING)))
    assert left_out.end_reason == "its replica cannot start"


def test_where_a_wider_layout_is_to_go_nobody_stands_by() -> None:
    """703043: the node that came back stood by for another task, and the one that was to be wide again waited for its
    slot until it gave up."""
    cluster = Cluster(nodes=6, slots=1)
    sharded = Layout(dp=3, num_micro_batches=6, sharded=True, buddy=True)
    cluster.run("t", 3, layout=sharded, replicas_min=0)
    cluster.run("u", 2, replicas_min=0, standbys=1)
    state, task = cluster.machine.state, cluster.tasks()["t"]
    assert state.allocation.standbys == {"u": ("n5",)} and set(task.placement.values()) == {"n0", "n1", "n2"}
    cluster.lose("n5")
    cluster.lose("n2")
    change, former = task.change, task.plan
    assert change is not None and change.plan is not None and former is not None and change.layout.dp == 2
    for member in former.members:
        rank = next((m.rank for m in change.plan.members if m.worker == member.worker), -1)
        cluster.feed_fact(member.node, FromWorker(member.node, "t", LayoutReady(member.worker, rank, 3, 7, "", "d"), 1))
    cluster.bring_up()
    assert task.job.layout.dp == 2
    cluster.hello("n5", incarnation=2, slots=1)
    cluster.bring_up()
    assert state.allocation.layouts["t"] == sharded and state.allocation.standbys == {}
    assert task.change is not None and task.change.plan is not None, "announced: its newcomer is there"
    assert {m.node for m in task.change.plan.members} == {"n0", "n1", "n5"}


def test_a_person_s_layout_goes_nowhere_where_another_task_is_stood_by_for() -> None:
    cluster = Cluster(nodes=5, slots=1)
    cluster.run("t", 2, replicas_min=0)
    cluster.run("u", 2, standbys=1)
    state = cluster.machine.state
    assert state.allocation.standbys == {"u": ("n4",)}
    assert slots_for(state, cluster.tasks()["t"]) == {"n0": 1, "n1": 1}
    assert slots_for(state, cluster.tasks()["u"]) == {"n2": 1, "n3": 1, "n4": 1}


def test_one_that_hangs_while_it_saves_is_ended_before_all_are() -> None:
    """601356: its loop stood still while it held for a layout that was called off. Saving may take long, so nobody
    ended it; after three tries all would have been, and with no checkpoint that is the end of the task."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG)
    driver.lost("n1.w0", "signal 9")

    def look(number: int, who_saves: str) -> None:
        for name in (who_saves, "n1.w1"):
            worker, moves = driver.worker(name), name == "n1.w1"
            status = driver.status(worker, stage=Stage.HEAL if moves else Stage.SAVE)
            status = msgspec.structs.replace(status, progress=number if moves else 0)
            driver.feed_fact(worker.node, WorkerUp(worker.node, status))
        driver.fire("heal/t")

    assert driver.task.epoch == 2
    for number in (1, 2):
        look(number, "n0.w0")
        assert driver.task.epoch == 2 + number, "an heir at iteration 0 does not catch up while another stands still"
        assert driver.sent(EndWorker) == [], "it may be saving"
    look(3, "n0.w0")
    assert [order.worker for order in driver.sent(EndWorker)] == ["n0.w0"]
    assert not driver.task.is_over
    driver.lost("n0.w0", "signal 9")
    assert driver.task.epoch == 5 and driver.task.plan is not None and driver.task.plan.heirs == (0,)
    look(4, "n0.w1")
    assert driver.task.cause.startswith("ranks [0, 1] did not heal in 4 tries"), "once"
