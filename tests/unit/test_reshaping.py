"""The coordinator brings a task into another layout: asked, announced, decided; and called off by whatever happens
before everybody has it."""

from __future__ import annotations

from typing import Any

import pytest

from machines import TASK, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.actions import Answer
from unicron.coordinator.layout_change import place_layout, seats, slots_for
from unicron.coordinator.layout_times import missing_share, reachable_layouts
from unicron.coordinator.state import Purpose
from unicron.coordinator.transitions import TaskPhase, WorkerPhase
from unicron.messages import ChangeLayout, EndWorker, LayoutReady, PublishEpoch, StartWorkers, StateLost
from unicron.types import Layout, PlanKind

SMALL = Layout(dp=2, num_micro_batches=4)
WIDE = Layout(pp=2, dp=2, num_micro_batches=4)
TALL = Layout(tp=2, num_micro_batches=4)


def at_work(layouts: tuple[Layout, ...] = (SMALL, WIDE, TALL), **fields: Any) -> Coordinator:
    return running(SMALL, layouts=layouts, **fields)


def ask(driver: Coordinator, layout: Layout) -> Any:
    wanted = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp}
    driver.feed(on.ReshapeRequested("r2", TASK, wanted))
    return next(a.reply for a in driver.actions if isinstance(a, Answer))


def joined(driver: Coordinator) -> None:
    for worker in list(driver.task.workers.values()):
        if worker.purpose is Purpose.JOINER:
            driver.up(worker.name)


def ready(driver: Coordinator, *, error: str = "", only: int = 99) -> None:
    """Everybody who takes part, or the first few of them, says that it has the new layout."""
    change = driver.task.change
    assert change is not None and change.plan is not None and driver.task.plan is not None
    names = [m.worker for m in driver.task.plan.members]
    names += [m.worker for m in change.plan.members if m.worker not in names]
    epoch = change.plan.epoch
    for name in names[:only]:
        rank = next((m.rank for m in change.plan.members if m.worker == name), -1)
        parts = {"move": 0.5}
        driver.says(LayoutReady(name, rank, epoch, 7, error, "d", 9, 800, 100, 200, 300, parts))


def test_from_two_workers_to_four() -> None:
    driver = at_work()
    before = driver.task.plan
    reply = ask(driver, WIDE)
    assert reply.ok and reply.result["estimated_s"] > 0
    orders = driver.sent(StartWorkers)
    assert {o.spec.layout for o in orders} == {WIDE}, "newcomers build for the layout that comes"
    assert sorted(rank for o in orders for _, _, rank, waits in o.workers if waits) == [1, 3]
    assert not driver.sent(ChangeLayout), "nobody is disturbed before they are ready"
    joined(driver)
    announced = driver.sent(ChangeLayout)[0]
    assert announced.former == before and announced.plan.layout == WIDE and announced.plan.epoch == 2
    assert driver.task.plan == before and driver.task.phase is TaskPhase.RUNNING
    ready(driver)
    (plan, *_) = [m.plan for m in driver.sent(PublishEpoch)]
    assert plan == announced.plan and plan.kind is PlanKind.RESHAPE and plan.touched == (0, 1, 2, 3)
    assert (driver.task.job.layout, driver.task.phase) == (WIDE, TaskPhase.HEALING)
    assert driver.task.placement == driver.machine.state.target(TASK)
    assert before is not None
    assert {m.worker for m in before.members} < {m.worker for m in plan.members}, "nobody who can stay goes"
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING
    assert driver.machine.state.transitions_s["reshape"][0] == 1
    facts = driver.task.job, driver.task.plan, driver.task.placement
    driver.restart()
    assert (driver.task.job, driver.task.plan, driver.task.placement) == facts, "the journal knows it"


def test_from_four_workers_to_two_the_others_leave_when_it_is_decided() -> None:
    driver = running(WIDE, layouts=(WIDE, TALL))
    assert ask(driver, TALL).ok
    change = driver.task.change
    assert change is not None and change.plan is not None, "nobody has to come: announced at once"
    ready(driver, only=3)
    assert driver.task.change is not None and not driver.sent(EndWorker), "one that leaves still serves"
    ready(driver)
    assert driver.task.job.layout == TALL and len(driver.task.placement) == 2
    members = {w.name for w in driver.task.workers.values() if w.phase is not WorkerPhase.ENDING}
    assert members == {m.worker for m in driver.task.plan.members}  # type: ignore[union-attr]


@pytest.mark.parametrize("announced", [False, True])
def test_a_death_before_the_decision_calls_it_off(announced: bool) -> None:
    driver = at_work()
    ask(driver, WIDE)
    if announced:
        joined(driver)
        ready(driver, only=3)
    name = driver.task.plan.members[0].worker  # type: ignore[union-attr]
    driver.lost(name, "signal 9")
    driver.all_up()
    plan = driver.task.plan
    assert plan is not None and (plan.layout, plan.epoch, plan.kind) == (SMALL, 2, PlanKind.REPLACE)
    if announced:
        assert plan.touched == (0, 1), "all go back, wherever they are"
        assert driver.task.change is None and "called off" in driver.task.change_refused
        joiners = [w for w in driver.task.workers.values() if w.purpose is Purpose.JOINER]
        assert all(w.phase is WorkerPhase.ENDING for w in joiners)
    else:
        assert driver.task.change is not None, "nothing was announced: it goes on after the recovery"


def test_where_all_end_the_change_ends_too() -> None:
    """Its newcomers and its bound are gone; it must not go on by itself when the task has started again."""
    driver = at_work()
    ask(driver, WIDE)
    driver.says(StateLost("n0.w0", 0, driver.task.epoch, 0, (0,)))
    assert driver.task.is_restarting
    assert driver.task.change is None and "called off" in driver.task.change_refused


def test_a_death_after_the_decision_heals_in_the_new_layout() -> None:
    driver = at_work()
    ask(driver, WIDE)
    joined(driver)
    ready(driver)
    name = driver.task.plan.members[0].worker  # type: ignore[union-attr]
    driver.lost(name, "signal 9")
    for _ in range(2):
        driver.all_up()
    plan = driver.task.plan
    assert plan is not None and (plan.layout, plan.epoch, plan.kind) == (WIDE, 3, PlanKind.REPLACE)
    assert plan.touched == (0, 1, 2, 3), "the change was not healed yet"


def test_a_joiner_that_dies_after_the_announcement_calls_it_off() -> None:
    driver = at_work()
    ask(driver, WIDE)
    joined(driver)
    joiner = next(w.name for w in driver.task.workers.values() if w.purpose is Purpose.JOINER)
    driver.lost(joiner, "signal 9")
    plan = driver.task.plan
    assert plan is not None and (plan.layout, plan.kind, plan.touched) == (SMALL, PlanKind.RECONNECT, (0, 1))
    assert joiner in driver.task.change_refused
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING


@pytest.mark.parametrize("how", ["error", "timeout", "differ"])
def test_what_cannot_be_taken_over_is_called_off(how: str) -> None:
    driver = at_work()
    ask(driver, TALL)
    if how == "error":
        ready(driver, error="LayoutsDiffer: param/x", only=1)
    elif how == "differ":
        for number, member in enumerate(driver.task.plan.members):  # type: ignore[union-attr]
            driver.says(LayoutReady(member.worker, member.rank, 2, 7, digest=f"d{number}"))
    else:
        driver.fire(f"layout/{TASK}")
    plan = driver.task.plan
    assert plan is not None and (plan.layout, plan.kind) == (SMALL, PlanKind.RECONNECT)
    assert driver.task.change is None and driver.task.change_refused
    assert f"layout/{TASK}" not in driver.machine.state.timers


def test_a_coordinator_that_comes_back_sends_them_back() -> None:
    driver = at_work()
    ask(driver, TALL)
    members = [m.worker for m in driver.task.plan.members]  # type: ignore[union-attr]
    driver.restart()
    for node in ("n0", "n1"):
        driver.hello(node, knows=True)
    assert driver.task.change is None
    driver.says(LayoutReady(members[0], 0, 2, 7))
    plan = driver.task.plan
    assert plan is not None and (plan.layout, plan.kind) == (SMALL, PlanKind.RECONNECT)
    assert plan.epoch > 2, "no epoch means two plans"


def test_refusals_say_what_to_do() -> None:
    driver = at_work((SMALL, TALL, Layout(dp=4, num_micro_batches=4), Layout(tp=2, dp=4, num_micro_batches=4)))
    assert "may take 1,1,2, 2,1,1" in ask(driver, Layout(tp=4)).error
    assert "has this layout already" in ask(driver, SMALL).error
    assert "needs 8 slots, there are 4" in ask(driver, Layout(tp=2, dp=4)).error
    assert ask(driver, TALL).ok
    assert "is going over to 2,1,1 already" in ask(driver, Layout(dp=4)).error
    plain = running(SMALL)
    assert "names no layouts" in ask(plain, TALL).error


def test_estimates_come_from_what_was_measured() -> None:
    driver = at_work()
    known = {(x["tp"], x["pp"], x["dp"]): x for x in reachable_layouts(driver.machine.state, driver.task)}
    assert known.keys() == {(2, 1, 1), (1, 2, 2)} and all(x["basis"] == "prior" and x["fits"] for x in known.values())
    ask(driver, TALL)
    ready(driver)
    driver.all_healed()
    (move,) = driver.task.moves
    assert (move["from"], move["to"], move["bytes_cross"]) == ("1,1,2", "2,1,1", 300)
    bases = {x["basis"] for x in reachable_layouts(driver.machine.state, driver.task)}
    assert bases == {"modelled"}


def test_missing_share_counts_what_no_process_has() -> None:
    assert missing_share(SMALL, TALL) == 0.0, "every half lies in a whole copy"
    assert missing_share(TALL, SMALL) == 1.0, "two processes lack a half each"
    assert missing_share(TALL, WIDE) == pytest.approx(1.5), "two keep a quarter each, two newcomers lack a half each"


def test_a_replica_stays_in_a_node_and_members_keep_their_nodes() -> None:
    driver = at_work()
    slots = slots_for(driver.machine.state, driver.task)
    placement = place_layout(WIDE, slots)
    assert placement is not None
    for replica in range(2):
        assert len({placement[rank] for rank in WIDE.replica_ranks(replica)}) == 1
    assert place_layout(Layout(dp=5), slots) is None
    ask(driver, WIDE)
    change = driver.task.change
    assert change is not None
    taken, missing = seats(change, {"n0": ["a", "b"]})
    assert len(taken) == 2 and len(missing) == 2 and set(missing.values()) == {"n1"}


def test_a_change_that_fails_while_a_report_is_judged_is_called_off_afterwards() -> None:
    driver = at_work()
    ask(driver, TALL)
    name = driver.task.plan.members[0].worker  # type: ignore[union-attr]
    driver.failed(name, inside=False, epoch=1)
    driver.fire(f"layout/{TASK}")
    assert driver.task.change is None or driver.task.change.failed
    for _ in range(4):
        if f"diagnose/{TASK}" in driver.machine.state.timers:
            driver.fire(f"diagnose/{TASK}")
    plan = driver.task.plan
    assert driver.task.change is None and plan is not None
    assert (plan.layout, plan.epoch, plan.touched) == (SMALL, 2, (0, 1))


# ---------------------------------------------------------------- the planner's choice

BIG = Layout(tp=2, dp=3, num_micro_batches=6)
STATED = {1: 1e12, 2: 2e12, 6: 9e12}


def told_what_it_earns(earns: dict[int, float]) -> Coordinator:
    """Four slots, a task on two of them that could go over to six."""
    small = Layout(dp=2, num_micro_batches=6)
    return running(small, layouts=(small, BIG), throughput=earns)


def test_the_planner_takes_a_task_over_to_another_layout_when_slots_come() -> None:
    driver = told_what_it_earns(STATED)
    before = driver.task.placement
    driver.hello("n2")
    change = driver.task.change
    assert change is not None and change.layout == BIG and len(change.placement) == 6
    decided = driver.machine.state.allocation
    assert decided.layouts == {TASK: BIG} and "goes over to another layout, on 6 slots" in decided.reason
    assert driver.task.placement == before, "its roles are the present layout's until everybody has the other"
    joined(driver)
    ready(driver)
    assert driver.task.job.layout == BIG and driver.machine.state.allocation.layouts == {}
    driver.all_healed()
    driver.machine.invariants()
    assert driver.task.phase is TaskPhase.RUNNING and driver.task.change is None


@pytest.mark.parametrize("earns", [{1: 1e12, 2: 2e12, 6: 1.5e12}, {1: 1e12, 2: 2e12}, {}])
def test_it_stays_where_it_earns_more_or_nobody_knows(earns: dict[int, float]) -> None:
    driver = told_what_it_earns(earns)
    driver.hello("n2")
    assert driver.task.change is None and not driver.machine.state.allocation.layouts


def test_a_change_that_was_called_off_is_not_begun_again_by_the_same_decision() -> None:
    driver = told_what_it_earns(STATED)
    driver.hello("n2")
    joined(driver)
    ready(driver, error="out of memory")
    driver.all_healed()
    assert driver.task.change is None and "out of memory" in driver.task.change_refused
    driver.beat("n0")
    assert driver.task.change is None


def test_the_choice_outlives_the_coordinator() -> None:
    driver = told_what_it_earns(STATED)
    driver.hello("n2")
    driver.restart()
    for node in ("n0", "n1", "n2"):
        driver.hello(node, knows=node != "n2")
    assert driver.task.change is not None and driver.task.change.layout == BIG
