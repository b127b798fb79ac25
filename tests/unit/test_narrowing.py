"""A sharded task whose shards have buddies loses nodes for good: its roles become guests, it goes on narrower, and is
wide again when there are slots. With every reason why it waits instead, and everything that may come between.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from machines import TASK, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.demand import demand_of, least_slots
from unicron.coordinator.invariants import placed_slots
from unicron.coordinator.journal import WorkersStarted, decode_entry
from unicron.coordinator.layout_change import slots_for
from unicron.coordinator.layout_times import estimated_s
from unicron.coordinator.narrowing import layout_of, narrows, widths
from unicron.coordinator.state import Purpose
from unicron.coordinator.transitions import TaskPhase, WorkerPhase
from unicron.messages import ChangeLayout, EndWorker, LayoutReady, MoveReady, StartWorkers, WorkerUp, announced_name
from unicron.runtime.views import describe_view
from unicron.sim.checkers import Checkers
from unicron.types import Layout, Outcome, PlanKind

FOUR = Layout(dp=4, num_micro_batches=10, sharded=True, buddy=True)
PIPES = Layout(pp=2, dp=2, num_micro_batches=6, sharded=True, buddy=True, buddy_every=3)


def at_work(layout: Layout = FOUR, *, spares: int = 0, **fields: Any) -> Coordinator:
    return running(layout, nodes=layout.dp + spares, slots=layout.replica_size, **fields)


def lose(driver: Coordinator, *nodes: str) -> None:
    for node in nodes:
        driver.disconnected(node)
        driver.probed(node, "gone")


def healed(driver: Coordinator) -> None:
    driver.all_up()
    driver.all_healed()


def taken_over(driver: Coordinator, error: str = "") -> None:
    """Everybody who takes part has the announced layout."""
    change = driver.task.change
    assert change is not None and change.plan is not None and driver.task.plan is not None
    names = dict.fromkeys(m.worker for m in (*driver.task.plan.members, *change.plan.members))
    epoch = change.plan.epoch
    for name in names:
        rank = next((m.rank for m in change.plan.members if m.worker == name), -1)
        driver.says(LayoutReady(name, rank, epoch, 7, error, "d", 9, 800, 100, 200, 300, {"move": 0.5}))


def moved(driver: Coordinator) -> None:
    move = driver.task.moving
    assert move is not None and driver.task.plan is not None
    joiners = tuple(m.worker for m in move.plan.members if m.rank in move.plan.heirs)
    for name in dict.fromkeys(m.worker for m in (*driver.task.plan.members, *move.plan.members)):
        driver.says(MoveReady(name, driver.rank_of(name), move.plan.epoch, "prepared", -1, joiners))
    for name in joiners:
        driver.says(MoveReady(name, driver.rank_of(name), move.plan.epoch, "moved", 9, joiners))


def ended(driver: Coordinator) -> None:
    """Those who were told to."""
    for worker in list(driver.task.workers.values()):
        if worker.phase is WorkerPhase.ENDING:
            driver.exited(worker.name)


def narrowed(layout: Layout = FOUR, lost: str = "", **fields: Any) -> Coordinator:
    driver = at_work(layout, **fields)
    lose(driver, lost or f"n{layout.dp - 1}")
    healed(driver)
    taken_over(driver)
    healed(driver)
    return driver


def dp(driver: Coordinator) -> int:
    return driver.task.job.layout.dp


def pending(driver: Coordinator) -> int | None:
    layout = driver.machine.state.allocation.layouts.get(TASK)
    return None if layout is None else layout.dp


def facts(driver: Coordinator) -> tuple[Any, ...]:
    task = driver.task
    return task.job, task.plan, task.placement, task.guests, task.wide, driver.machine.state.allocation


# -------------------------------------------------------------------- the way


def test_a_lost_role_becomes_a_guest_and_the_interrupted_iteration_ends_with_everybody() -> None:
    driver = at_work()
    lose(driver, "n3")
    plan = driver.task.plan
    assert plan is not None and (plan.kind, plan.replicas, plan.heirs) == (PlanKind.REPLACE, (0, 1, 2, 3), (3,))
    assert driver.task.guests == {3: "n0"} and driver.task.placement[3] == "n0" and "as guests" in plan.reason
    assert placed_slots(driver.machine.state) == {"n0": 1, "n1": 1, "n2": 1}, "a guest is on no slot"
    assert pending(driver) == 3 and driver.machine.state.target(TASK) == {0: "n0", 1: "n1", 2: "n2"}
    assert driver.task.change is None, "first the iteration ends"
    healed(driver)
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.outcome, incident.missing_slots) == (Outcome.RESIZED, 1)


def test_then_at_once_its_layout_has_one_replica_less_and_the_guest_leaves_by_itself() -> None:
    driver = at_work()
    lose(driver, "n3")
    healed(driver)
    change = driver.task.change
    assert change is not None and change.plan is not None, "nobody has to come: announced at once"
    guest = driver.task.plan.member(3).worker  # type: ignore[union-attr]
    assert change.layout == layout_of(driver.task, 3) and guest not in {m.worker for m in change.plan.members}
    taken_over(driver)
    assert dp(driver) == 3 and driver.task.job.layout.buddy and driver.task.guests == {}
    assert driver.task.wide is not None and driver.task.wide.layout == FOUR
    assert driver.task.workers[guest].phase is WorkerPhase.ENDING
    assert guest not in {order.worker for order in driver.sent(EndWorker)}, "it leaves with exit code 0"
    assert f"end/{guest}" in driver.machine.state.timers, "... or is ended"
    healed(driver)
    assert driver.task.phase is TaskPhase.RUNNING and pending(driver) is None
    assert [(move["from"], move["to"]) for move in driver.task.moves] == [("1,1,4,sharded", "1,1,3,sharded")]


def test_a_guest_that_is_slow_to_leave_is_on_no_slot() -> None:
    """Seed 603688: it hung when its role was gone, and was ended by force. Nobody had been started on its node while it
    was a guest, so the checker took it for one more on its slots."""
    driver, said = at_work(), list[str]()
    world = SimpleNamespace(violate=said.append, count=said.count, log=lambda *_: None, hosts={})
    checkers, read = Checkers(world), 0  # type: ignore[arg-type]

    def look() -> None:
        nonlocal read
        for data in driver.journal[read:]:
            checkers.journaled_by(decode_entry(data), ("c", 1), driver.machine)
        read = len(driver.journal)

    look()
    lose(driver, "n3")
    look()
    healed(driver)
    taken_over(driver)
    look()
    guest = next(w for w in driver.task.workers.values() if w.phase is WorkerPhase.ENDING)
    world.hosts = {"n0": SimpleNamespace(workers={w: SimpleNamespace(name=w, alive=True) for w in driver.task.workers})}
    started = WorkersStarted(TASK, "n0", (), 0)
    checkers.journaled_by(started, ("c", 1), driver.machine)
    assert not said and checkers.guests == {guest.name}
    checkers.guests.clear()
    checkers.journaled_by(started, ("c", 1), driver.machine)
    assert said == [f"{['n0.w0', guest.name]} on the 1 slots of n0"], "of anybody else it would be one too many"


def test_it_is_wide_again_when_the_node_is_back() -> None:
    driver = narrowed(replicas_min=2, replicas_unit=1)
    assert driver.task.job.replicas_min == 0, "as after any change of layout"
    driver.hello("n3", incarnation=2, slots=1)
    assert pending(driver) == 4
    assert {order.spec.layout for order in driver.sent(StartWorkers)} == {FOUR}, "newcomers build for the wide layout"
    driver.all_up()
    assert driver.sent(ChangeLayout), "announced when they are ready"
    taken_over(driver)
    healed(driver)
    assert driver.task.job.layout == FOUR and driver.task.wide is None and driver.task.job.replicas_min == 2
    assert driver.task.placement == {0: "n0", 1: "n1", 2: "n2", 3: "n3"}
    (incident,) = driver.machine.state.incidents.values()
    assert incident.healthy_ms is not None, "nothing is missing any more"


def test_the_journal_knows_every_stage() -> None:
    driver = at_work()
    stages = (
        lambda: lose(driver, "n3"), lambda: healed(driver), lambda: taken_over(driver), lambda: healed(driver),
        lambda: driver.hello("n3", 2, 1), driver.all_up, lambda: taken_over(driver),
    )  # fmt: skip
    for stage in stages:
        stage()
        before = facts(driver)
        twin = Coordinator()
        twin.journal = list(driver.journal)
        twin.restart()
        assert facts(twin) == before


def test_a_coordinator_that_comes_back_goes_on_with_it() -> None:
    driver = at_work()
    lose(driver, "n3")
    driver.all_up()
    driver.restart()
    for node in ("n0", "n1", "n2"):
        driver.hello(node, slots=1, knows=True)
    assert driver.task.guests == {3: "n0"}
    driver.all_healed()
    taken_over(driver)
    assert dp(driver) == 3


@pytest.mark.parametrize("every", [0, 3])
def test_two_replicas_become_one_which_has_no_buddy_and_two_again_which_have(every: int) -> None:
    layout = Layout(dp=2, num_micro_batches=4, sharded=True, buddy=True, buddy_every=every)
    driver = narrowed(layout)
    narrow = driver.task.job.layout
    assert (narrow.dp, narrow.buddy, narrow.buddy_every, narrow.sharded) == (1, False, 0, True)
    driver.hello("n1", incarnation=2, slots=1)
    driver.all_up()
    taken_over(driver)
    assert driver.task.job.layout == layout


def test_of_pipelines_those_who_stay_keep_their_place_and_the_guests_leave() -> None:
    driver = at_work(PIPES)
    stayers = [m.worker for m in driver.task.plan.members if m.node == "n0"]  # type: ignore[union-attr]
    lose(driver, "n1")
    assert len(driver.task.lost) == 2, "one understudy is there for two roles"
    healed(driver)
    assert driver.task.guests == {1: "n0", 3: "n0"}
    taken_over(driver)
    assert [m.worker for m in driver.task.plan.members] == stayers  # type: ignore[union-attr]


def test_where_a_slot_is_free_nobody_is_a_guest() -> None:
    driver = at_work(spares=1)
    lose(driver, "n3")
    assert driver.task.guests == {} and driver.task.placement[3] == "n4" and pending(driver) is None


def test_guests_are_spread() -> None:
    driver = at_work(Layout(dp=5, num_micro_batches=5, sharded=True, buddy=True))
    lose(driver, "n2", "n4")
    assert driver.task.guests == {2: "n0", 4: "n1"}
    healed(driver)
    assert driver.task.change is not None and driver.task.change.layout.dp == 3


# -------------------------------------------------------------------- what may come between


def test_a_node_that_is_back_before_takes_its_role_by_a_move() -> None:
    driver = at_work()
    lose(driver, "n3")
    driver.all_up()
    driver.hello("n3", incarnation=2, slots=1)
    assert pending(driver) is None and driver.machine.state.target(TASK)[3] == "n3"
    healed(driver)
    driver.all_up()
    moved(driver)
    healed(driver)
    assert driver.task.guests == {} and driver.task.placement[3] == "n3" and dp(driver) == 4
    assert not driver.task.moves and driver.task.wide is None


def test_a_node_that_is_back_while_all_hold_sends_them_back_first() -> None:
    driver = at_work()
    lose(driver, "n3")
    healed(driver)
    driver.hello("n3", incarnation=2, slots=1)
    plan = driver.task.plan
    assert plan is not None and (plan.kind, plan.layout.dp, plan.touched) == (PlanKind.RECONNECT, 4, (0, 1, 2, 3))
    assert "n3 joined" in driver.task.change_refused and driver.task.guests == {3: "n0"}
    healed(driver)
    driver.all_up()
    moved(driver)
    assert driver.task.placement[3] == "n3"


def test_the_guest_s_host_is_lost_too() -> None:
    driver = at_work()
    lose(driver, "n3")
    healed(driver)
    lose(driver, "n0")
    assert driver.task.guests == {0: "n1", 3: "n2"}, driver.task.waits_why
    healed(driver)
    assert driver.task.change is not None and driver.task.change.layout.dp == 2
    taken_over(driver)
    healed(driver)
    assert driver.task.placement == {0: "n1", 1: "n2"}
    driver.hello("n0", incarnation=2, slots=1)
    assert pending(driver) == 3
    driver.hello("n3", incarnation=2, slots=1)
    assert pending(driver) == 4, "and so the change to three is off"
    ended(driver)
    driver.all_up()
    taken_over(driver)
    assert driver.task.job.layout == FOUR


def test_a_death_in_the_change_heals_and_it_is_tried_again() -> None:
    driver = at_work()
    lose(driver, "n3")
    healed(driver)
    for _ in range(driver.config.join_tries_max + 2):
        driver.lost(driver.task.plan.members[1].worker, "signal 9")  # type: ignore[union-attr]
        assert driver.task.change is None and dp(driver) == 4
        driver.all_up()
        healed(driver)
        assert driver.task.change is not None and driver.task.change.plan is not None
        driver.fire(f"understudy/{TASK}")
        driver.all_up()
    taken_over(driver)
    assert dp(driver) == 3


def test_what_cannot_be_taken_over_is_tried_some_times_and_the_guests_stay() -> None:
    driver = at_work()
    lose(driver, "n3")
    healed(driver)
    for _ in range(driver.config.join_tries_max):
        taken_over(driver, error="LayoutsDiffer: param/x")
        healed(driver)
    assert driver.task.change is None and driver.task.guests == {3: "n0"}
    assert "LayoutsDiffer" in driver.task.change_refused and driver.task.phase is TaskPhase.RUNNING
    driver.hello("n3", incarnation=2, slots=1)
    driver.all_up()
    moved(driver)
    assert driver.task.guests == {}, "the node's return ends it"


def test_a_person_s_order_is_not_undone() -> None:
    two = layout_of(at_work().task, 2)
    driver = narrowed(layouts=(FOUR, two))
    driver.feed(on.ReshapeRequested("r2", TASK, {"tp": 1, "pp": 1, "dp": 2}))
    taken_over(driver)
    healed(driver)
    assert driver.task.job.layout.dp == 2 and driver.task.wide is None
    driver.hello("n3", incarnation=2, slots=1)
    assert pending(driver) is None


def test_a_standby_of_the_present_layout_makes_room_for_a_newcomer() -> None:
    driver = narrowed(standbys=1)
    driver.hello("n3", incarnation=2, slots=1)
    driver.all_up()
    driver.hello("n4", slots=1)
    driver.all_up()
    purposes = Counter((w.node, w.purpose) for w in driver.task.workers.values() if w.phase is not WorkerPhase.ENDING)
    assert purposes[("n3", Purpose.JOINER)] + purposes[("n4", Purpose.JOINER)] == 1


def test_a_drained_node_narrows_it_between_two_iterations() -> None:
    driver = at_work()
    driver.feed(on.DrainRequested("d", "n1", True))
    assert driver.task.change is not None and driver.task.change.layout.dp == 3
    assert "n1" not in driver.task.change.placement.values() and not driver.task.guests
    taken_over(driver)
    healed(driver)
    assert set(driver.task.placement.values()) == {"n0", "n2", "n3"}
    assert not driver.machine.state.incidents


def test_too_few_for_what_it_needs_saves_and_leaves() -> None:
    driver = at_work(replicas_min=4, checkpoint_dir="c")
    lose(driver, "n3")
    healed(driver)
    assert driver.task.leaving and not driver.machine.state.target(TASK), "nothing was lost, and it waits"


def test_without_a_way_to_save_it_goes_on_below_what_it_needs() -> None:
    driver = narrowed(replicas_min=4)
    assert dp(driver) == 3


def test_where_all_start_again_it_waits_for_the_slots_of_its_layout() -> None:
    """Its target is what it was to change its layout from: too few roles to start with."""
    driver = at_work(checkpoint_dir="c", understudies=0)
    driver.saved("n0.w0", 5)
    lose(driver, "n3")
    driver.fire(f"ready/{TASK}")  # nobody is ready in time to be the guest
    assert driver.task.phase is TaskPhase.WAITING and pending(driver) == 3
    ended(driver)
    assert driver.task.phase is TaskPhase.WAITING and not driver.task.workers and driver.task.guests == {}
    driver.hello("n3", incarnation=2, slots=1)
    assert driver.task.phase is TaskPhase.STARTING and len(driver.task.placement) == 4


def test_a_successor_that_knows_of_no_change_sends_back_who_says_that_it_holds() -> None:
    """Its predecessor told some of the members, and the others hold because these say so, and know nothing."""
    driver = at_work()
    lose(driver, "n3")
    healed(driver)
    change = driver.task.change
    assert change is not None and change.plan is not None
    holds = LayoutReady("n0.w0", 0, change.plan.epoch, -1, digest=announced_name(change.plan))
    driver.says(holds)
    assert driver.task.change is change and not change.ready, "it is known"
    driver.restart()
    for node in ("n0", "n1", "n2"):
        driver.hello(node, slots=1, knows=True)
    again = driver.task.change
    assert again is not None and again.plan is not None and again.plan.epoch == holds.epoch
    driver.says(holds)
    assert driver.task.change is again, "the same members under the same number: nothing is lost"
    other = msgspec.structs.replace(change.plan, members=change.plan.members[:-1])
    driver.says(msgspec.structs.replace(holds, digest=announced_name(other)))
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.RECONNECT and plan.epoch >= holds.epoch


def test_a_guest_that_gets_the_slot_beside_it_is_none_any_more() -> None:
    driver = at_work(Layout(dp=2, num_micro_batches=4, sharded=True, buddy=True))
    lose(driver, "n1")
    driver.all_up()
    assert driver.task.guests == {1: "n0"}
    driver.hello("n0", slots=2, knows=True)  # its agent offers one slot more
    healed(driver)
    assert driver.task.guests == {} and driver.task.placement == {0: "n0", 1: "n0"} and dp(driver) == 2
    before = facts(driver)
    driver.restart()
    assert facts(driver) == before


def test_slots_in_places_where_its_groups_do_not_fit_are_a_narrower_layout() -> None:
    """Six slots for three groups of two, three on each node."""
    layout = Layout(tp=2, dp=3, num_micro_batches=6, sharded=True, buddy=True)
    driver = running(layout, nodes=3, slots=3)
    node = next(iter(driver.task.placement.values()))
    driver.feed(on.DrainRequested("d", node, True))
    assert pending(driver) == 2 and len(driver.machine.state.target(TASK)) == 4
    taken_over(driver)
    healed(driver)
    assert dp(driver) == 2 and node not in driver.task.placement.values()


# -------------------------------------------------------------------- why it waits


def waits(driver: Coordinator) -> str:
    assert driver.task.guests == {} and driver.task.lost and driver.task.phase is TaskPhase.RECOVERING
    view = describe_view(driver.task, driver.machine.state, {}, driver.now_ms)
    assert view["why"] == driver.task.waits_why
    return driver.task.waits_why


def test_on_gpus_it_waits() -> None:
    driver = at_work(config=CoordinatorConfig(gpu="H100"))
    lose(driver, "n3")
    assert "ranks [3] wait for a node" in waits(driver) and "on CPUs only" in waits(driver)
    driver.hello("n3", incarnation=2, slots=1)
    healed(driver)
    assert driver.task.placement[3] == "n3" and driver.task.waits_why == ""


@pytest.mark.parametrize("instances", [1, 2])
def test_on_gpus_of_which_the_coordinator_was_not_told_it_waits(instances: int) -> None:
    """A guest finds none that is free: its heirs ended one after the other, and with them the task."""
    layout = FOUR if instances == 1 else msgspec.structs.replace(FOUR, buddy=False, instances=instances)
    driver = at_work(layout)
    worker = next(worker for worker in driver.task.workers.values() if worker.node == "n0")
    status = msgspec.structs.replace(driver.status(worker), gpu=True)
    driver.feed(on.AgentMessage(worker.node, WorkerUp(worker.node, status)))
    lose(driver, "n3")
    assert "ranks [3] wait for a node" in waits(driver) and "on CPUs only" in waits(driver)
    driver.restart()
    assert driver.task.on_gpu
    driver.hello("n3", incarnation=2, slots=1)
    healed(driver)
    assert driver.task.placement[3] == "n3" and not driver.task.guests


def test_with_the_holder_of_the_copy_gone_it_waits() -> None:
    driver = at_work()
    driver.disconnected("n0")
    driver.disconnected("n3")
    driver.probed("n0", "gone")
    driver.probed("n3", "gone")
    assert "ranks [3] is gone, too" in driver.task.waits_why


def test_without_a_whole_replica_it_waits() -> None:
    layout = Layout(pp=2, dp=2, num_micro_batches=4, sharded=True, buddy=True)
    driver = running(layout, nodes=4, slots=1)
    lose(driver, "n3")
    lose(driver, "n0")
    assert "no replica is whole" in driver.task.waits_why or driver.task.guests


def test_with_every_other_node_drained_it_waits() -> None:
    driver = at_work(Layout(dp=2, num_micro_batches=4, sharded=True, buddy=True))
    driver.feed(on.DrainRequested("d", "n0", True))
    lose(driver, "n1")
    assert "no other node of the task is up" in waits(driver)


def test_without_buddies_nothing_is_different_and_the_reason_says_what_would_help() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4, sharded=True), nodes=2, slots=1, checkpoint_dir="c")
    driver.saved("n0.w0", 5)
    lose(driver, "n1")
    assert driver.task.phase is TaskPhase.WAITING and not narrows(driver.task)
    reason = driver.machine.state.tasks[TASK]
    assert reason.placement == {}


# -------------------------------------------------------------------- numbers


def test_widths_are_what_survives_and_more() -> None:
    driver = at_work()
    assert [widths(driver.task, held) for held in (0, 1, 3, 4)] == [[4], [1, 2, 3, 4], [3, 4], [4]]
    driver = running(Layout(dp=5, num_micro_batches=5, sharded=True, buddy=True), nodes=5, slots=1,
                     replicas_min=1, replicas_unit=2)  # fmt: skip
    assert [widths(driver.task, held) for held in (0, 2, 4)] == [[5], [2, 3, 5], [4, 5]]


def test_what_a_task_has_to_give_to_others_is_no_place_for_its_new_layout() -> None:
    driver = at_work()
    state = driver.machine.state
    assert slots_for(state, driver.task) == dict.fromkeys(("n0", "n1", "n2", "n3"), 1)
    lose(driver, "n3")
    assert slots_for(state, driver.task) == dict.fromkeys(("n0", "n1", "n2"), 1), "a guest's place is no slot"


def test_a_part_that_is_told_longer_than_the_whole_makes_no_negative_time() -> None:
    """Workers say how long the moving took, by their own clocks; the planner refuses a time below nothing."""
    driver = narrowed()  # held some milliseconds, of which half a second was the moving
    known = estimated_s(driver.machine.state, driver.task, FOUR)
    assert known.basis == "modelled" and known.seconds >= 0.0


def test_what_is_admitted_can_be_planned() -> None:
    """Also where what it holds is counted to others: it was admitted for the width that survives, and the planner was
    told that it needs all (found by the swarm)."""
    driver = at_work()
    demand = demand_of(driver.task, {}, 3, 1, {3: 10.0})
    assert (demand.workers.min, demand.least, demand.relayout_s) == (3, 3, {3: 10.0})
    assert least_slots(driver.task, 3) == 3 and demand.waf(3) > 0
