"""Whole nodes that stand by: decided, started, adopted when a node is lost, and asked for when there is none."""

from __future__ import annotations

import msgspec
import pytest

from machines import Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.deciding import failures_of, transitions_of
from unicron.coordinator.standing_by import Odds, is_worth_it, standbys_for
from unicron.coordinator.state import Purpose, WorkerState
from unicron.coordinator.transitions import TaskPhase
from unicron.messages import EndWorker, StartWorkers
from unicron.types import Layout, PlanKind

WIDE = Layout(tp=2, dp=2, num_micro_batches=4)


def standing(nodes: int = 3, standbys: int = 1, **fields: object) -> Coordinator:
    """Two nodes train, the others stand by; everybody is ready."""
    driver = running(WIDE, nodes=nodes, standbys=standbys, **fields)  # type: ignore[arg-type]
    driver.all_up()
    return driver


def standbys(driver: Coordinator) -> list[WorkerState]:
    return [w for w in driver.task.workers.values() if w.purpose is Purpose.STANDBY]


def lose(driver: Coordinator, node: str) -> None:
    driver.disconnected(node)
    driver.probed(node, "gone")


def test_a_free_node_stands_by_with_all_roles_of_a_node() -> None:
    driver = standing()
    assert driver.machine.state.allocation.standbys == {"t": ("n2",)}
    assert [(w.node, w.rank) for w in standbys(driver)] == [("n2", 0), ("n2", 1)]


def test_nobody_stands_by_who_was_not_asked_for() -> None:
    driver = standing(standbys=0)
    assert not standbys(driver) and not driver.machine.state.allocation.standbys


def test_state_without_a_copy_cannot_be_helped() -> None:
    sharded = Layout(tp=2, dp=2, num_micro_batches=4, sharded=True)
    driver = running(sharded, nodes=3, standbys=1)
    assert not driver.machine.state.allocation.standbys


def test_a_node_that_is_too_small_does_not_stand_by() -> None:
    driver = running(WIDE, nodes=2, standbys=1)
    driver.hello("n2", slots=1)
    assert not driver.machine.state.allocation.standbys


def test_a_lost_node_is_replaced_by_the_one_that_stands_by() -> None:
    driver = standing()
    names = {w.name for w in standbys(driver)}
    lose(driver, "n1")
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.REPLACE and plan.replicas == (0, 1)
    assert plan.layout == WIDE
    assert {m.worker for m in plan.members if m.rank in plan.heirs} == names
    assert {m.node for m in plan.members} == {"n0", "n2"}
    (incident,) = driver.machine.state.open_incidents("t")
    assert "standbys on n2" in plan.reason and "spend standbys" in plan.reason, plan.reason
    assert "go on without the lost slots would be worth" in plan.reason
    assert any("spend standbys" in text for _, text in incident.timeline)
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING
    assert driver.machine.state.target("t") == {m.rank: m.node for m in plan.members}
    assert "standby" in driver.machine.state.transitions_s, "what it takes is learned apart"


def test_a_coordinator_that_comes_back_knows_where_the_roles_went() -> None:
    driver = standing()
    lose(driver, "n1")
    before = (driver.task.plan, driver.machine.state.allocation)
    driver.restart()
    assert (driver.task.plan, driver.machine.state.allocation) == before


def test_a_standby_that_is_not_ready_yet_is_waited_for() -> None:
    driver = running(WIDE, nodes=3, standbys=1)
    lose(driver, "n1")
    assert driver.task.phase is TaskPhase.RECOVERING
    for worker in standbys(driver):
        driver.up(worker.name)
    assert driver.task.plan is not None and driver.task.plan.kind is PlanKind.REPLACE


def test_asked_for_when_there_is_none_the_task_shrinks() -> None:
    driver = standing()
    lose(driver, "n2")
    lose(driver, "n1")
    assert driver.task.plan is not None and driver.task.plan.kind is PlanKind.SHRINK


def test_a_standby_node_lost_while_it_adopts() -> None:
    driver = standing()
    lose(driver, "n1")
    lose(driver, "n2")
    plan = driver.task.plan
    assert plan is not None and plan.kind is PlanKind.SHRINK and plan.replicas == (0,)
    assert set(plan.touched) == {0, 1, 2, 3}, "a failure during a recovery wounds everybody"


def test_a_standby_process_that_dies_while_it_adopts_is_started_anew() -> None:
    driver = standing()
    lose(driver, "n1")
    plan = driver.task.plan
    assert plan is not None
    heir = next(m for m in plan.members if m.rank in plan.heirs)
    driver.lost(heir.worker, "signal 9")
    assert driver.task.phase is TaskPhase.HEALING or driver.sent(StartWorkers)


def test_adopted_while_another_adoption_runs() -> None:
    driver = standing(nodes=4, standbys=2)
    assert driver.machine.state.allocation.standbys == {"t": ("n2", "n3")}
    lose(driver, "n1")
    first = driver.task.plan
    assert first is not None and first.kind is PlanKind.REPLACE
    home = next(m.node for m in first.members if m.rank in first.heirs)
    lose(driver, home)
    second = driver.task.plan
    assert second is not None and second.kind is PlanKind.REPLACE and second.epoch == first.epoch + 1
    assert {m.node for m in second.members} == {"n0", "n2", "n3"} - {home}
    driver.all_healed()
    assert driver.task.phase is TaskPhase.RUNNING


def test_slots_that_another_task_wants_do_not_stand_by() -> None:
    driver = standing()
    names = {w.name for w in standbys(driver)}
    from unicron.coordinator import events as on
    from unicron.coordinator.job import Job

    driver.feed(on.TaskSubmitted("r", Job("other", ("train.py",), Layout(tp=2, num_micro_batches=1))))
    assert {order.worker for order in driver.sent(EndWorker)} == names
    assert not driver.machine.state.allocation.standbys


@pytest.mark.parametrize(("standby_s", "spends"), [(15.0, True), (1e9, False)])
def test_a_standby_is_spent_when_that_is_worth_more(standby_s: float, spends: bool) -> None:
    driver = standing()
    state = driver.machine.state
    times = msgspec.structs.replace(transitions_of(state), standby_s=standby_s)
    is_worth, why = is_worth_it(state, driver.task, [2, 3], Odds(failures_of(state), times))
    assert is_worth is spends, why


def test_who_stood_by_stays_where_it_is() -> None:
    driver = standing(nodes=4)
    state = driver.machine.state
    assert standbys_for(state, state.allocation.nodes, state.allocation.targets) == {"t": ("n2",)}


def test_a_standby_that_another_nodes_roles_move_to_is_not_spent_twice() -> None:
    """Found by the swarm: its slots got the drained node's roles, and those of a node that was lost meanwhile."""
    driver = standing()
    driver.feed(on.DrainRequested("r", "n0", drained=True))
    assert set(driver.machine.state.target("t").values()) == {"n1", "n2"}
    lose(driver, "n1")
    assert driver.machine.state.target("t") == {0: "n2", 1: "n2"}, "n2 has two slots, and n0 shall be free"


def moving(homes: dict[str, int], target: dict[int, str]) -> Coordinator:
    """A task of single ranks, some of whose roles shall live elsewhere; their standbys there are not ready yet.
    homes: node -> slots; the first of them are the task's."""
    driver = Coordinator()
    for node, slots in homes.items():
        driver.hello(node, slots=slots)
    driver.submit(Layout(dp=len(target), num_micro_batches=len(target)), checkpoint_dir="/ckpt")
    driver.all_up()
    state = driver.machine.state
    state.allocation = msgspec.structs.replace(state.allocation, targets={"t": target})
    driver.hello("n0", slots=homes["n0"], knows=True)  # so that the task is looked at
    return driver


def test_a_slot_taken_by_a_standby_is_not_meant_for_another_role_any_more() -> None:
    """Found by the swarm (seed 60698): three roles lost their node, two of them were about to move to a slot each. The
    first two took both; the third was still meant for one of them, so that the task was believed to have survived
    whole, and lost all its slots because it did not fit."""
    driver = moving({"n0": 3, "n1": 1, "n2": 1, "n3": 1}, {0: "n0", 1: "n2", 2: "n3", 3: "n1"})
    assert sorted((w.node, w.rank) for w in standbys(driver)) == [("n2", 1), ("n3", 2)]
    lose(driver, "n0")
    assert driver.machine.state.target("t") == {0: "n2", 1: "n3", 3: "n1"}
    for worker in standbys(driver):
        driver.up(worker.name)
    plan = driver.task.plan
    assert plan is not None and {m.rank: m.node for m in plan.members} == {0: "n2", 1: "n3", 3: "n1"}


def test_a_standby_is_not_spent_on_a_slot_that_a_task_without_target_holds() -> None:
    """Found by the swarm (seed 60698): what a task shall hold was taken from it while its roles moved to a standby that
    was not ready yet; the standby was spent a second time, on its other lost role: two roles on one slot."""
    driver = moving({"n0": 2, "n1": 1, "n2": 1}, {0: "n0", 1: "n2", 2: "n1"})
    assert [(w.node, w.rank) for w in standbys(driver)] == [("n2", 1)]
    lose(driver, "n0")
    assert driver.task.placement == {0: "n2", 1: "n0", 2: "n1"}
    driver.feed(on.SuspendRequested("r", "t"))
    assert not driver.machine.state.target("t")
    driver.hello("n1", slots=1, knows=True)
    assert driver.task.placement == {0: "n2", 1: "n0", 2: "n1"}
