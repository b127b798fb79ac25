"""The last iteration heals like any other: nobody leaves before all have its commit."""

from __future__ import annotations

import msgspec
import pytest

from machines import Coordinator, running
from unicron.coordinator.lifecycle import ALL_FINISHED
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record, decode_record, encode_record
from unicron.messages import EndWorker, WorkerLost
from unicron.types import Cpu, EpochPlan, Layout, Member, PlanKind, Stage

LAST = 5
COMMIT = CommitResult(LAST, 64.0, 1.0, 0.0, 5.0)


def plan(layout: Layout, epoch: int, kind: PlanKind, *heirs: int, restore: str = "") -> EpochPlan:
    members = tuple(Member(r, "n0", f"n0.w{r + 10 * epoch if r in heirs else r}") for r in range(layout.world_size))
    replicas = tuple(range(layout.num_replicas))
    made = EpochPlan("t", epoch, kind, layout, replicas, members, heirs, heirs)
    return msgspec.structs.replace(made, restore=restore)


class Task:
    """All members, each carried on until it waits for the others."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.machines: dict[int, HealingMachine] = {}
        self.actions: dict[int, do.AnyAction] = {}
        start = plan(layout, 1, PlanKind.START)
        for rank in range(layout.world_size):
            self.join(rank, start, Record(rank, LAST, Stage.IDLE, num_segments=2))
        self.meet()
        assert all(isinstance(action, do.Ready) for action in self.actions.values())

    def join(self, rank: int, new: EpochPlan, record: Record) -> None:
        self.machines[rank] = HealingMachine(rank, self.layout, 2)
        self.step(rank, on.Joined(new, record))

    def step(self, rank: int, event: on.AnyEvent) -> do.AnyAction:
        (self.actions[rank],) = self.machines[rank].step(event)
        return self.actions[rank]

    def train(self, *ranks: int) -> None:
        """The last iteration, undisturbed."""
        for rank in ranks:
            assert isinstance(self.step(rank, on.IterationBegun(LAST)), do.Compute)
            for _ in range(3):  # compute, tie, reduce
                self.step(rank, on.Done())
            action = self.step(rank, on.CommitDone(COMMIT))
            if isinstance(action, do.Confirm):
                self.step(rank, on.Confirmed(COMMIT))
            assert isinstance(self.step(rank, on.Done()), do.EndIteration)

    def arrived(self, new: EpochPlan, *ranks: int) -> None:
        for rank in ranks:
            self.machines[rank].step(on.PlanArrived(new))

    def meet(self) -> None:
        """Exchanges and rebuilds, until nobody is in one that has everybody it is for."""
        while self._build() or self._exchange():
            pass

    def _build(self) -> bool:
        building = [r for r, a in self.actions.items() if isinstance(a, (do.RebuildInside, do.RebuildCross))]
        for rank in building:
            self.step(rank, on.Done())
        return bool(building)

    def _exchange(self) -> bool:
        for kind in (do.ExchangeInside, do.ExchangeWorld):
            waiting = {r: self.machines[r].record for r, a in self.actions.items() if isinstance(a, kind)}
            replica = self.layout.replica_ranks(self.layout.replica_of(min(waiting))) if waiting else ()
            members = replica if kind is do.ExchangeInside else tuple(self.machines)
            if waiting and set(members) <= set(waiting):
                for rank in members:
                    self.step(rank, on.RecordsGathered([waiting[mate] for mate in members]))
                return True
        return False


@pytest.mark.parametrize("layout", [Layout(dp=2, num_micro_batches=4), Layout(pp=2, dp=2, num_micro_batches=4)])
def test_who_is_through_with_the_loop_meets_an_heir_and_computes_nothing(layout: Layout) -> None:
    task = Task(layout)
    others = range(1, layout.world_size)
    task.train(*range(layout.world_size))
    for rank in others:
        action = task.step(rank, on.LoopEnded())
        assert isinstance(action, do.AwaitOthers) and not action.healed
    lost = plan(layout, 2, PlanKind.REPLACE, 0)
    task.arrived(lost, *others)
    for rank in others:
        action = task.step(rank, on.Broken(inside=False, text="a newer epoch"))
        assert isinstance(action, (do.ExchangeInside, do.ExchangeWorld))
    task.join(0, lost, Record(0, LAST + 1, Stage.IDLE, num_segments=2, commit=COMMIT))
    task.meet()
    assert isinstance(task.actions[0], do.Ready) and task.actions[0].iteration == LAST + 1
    if layout.pp == 2:  # it mended its replica first; its script's loop is over at once, and it meets
        assert isinstance(task.step(0, on.LoopEnded()), do.ExchangeWorld)
        task.meet()
    else:
        task.step(0, on.LoopEnded())
    waits = [action for action in task.actions.values() if isinstance(action, do.AwaitOthers)]
    assert len(waits) == layout.world_size and all(action.healed and action.plan == lost for action in waits)
    assert all(isinstance(task.step(rank, on.Done()), do.Over) for rank in range(layout.world_size))


def test_who_is_taken_back_to_a_checkpoint_at_the_end_does_the_iterations_again() -> None:
    task = Task(Layout(dp=2, num_micro_batches=4))
    task.train(0, 1)
    task.step(1, on.LoopEnded())
    back = plan(task.layout, 2, PlanKind.RESTORE, 0, restore="there")
    task.arrived(back, 1)
    task.step(1, on.Broken(inside=False, text="a newer epoch"))
    task.join(0, back, Record(0, 0, Stage.STARTING, has_state=False, num_segments=2))
    task.meet()
    for rank in (0, 1):
        assert isinstance(task.actions[rank], do.LoadCheckpoint)
        task.step(rank, on.CheckpointLoaded(LAST))
    assert isinstance(task.actions[0], do.Ready), "its script begins there"
    again = task.actions[1]
    assert isinstance(again, do.Compute) and again.iteration == LAST
    for _ in range(3):
        task.step(1, on.Done())
    task.step(1, on.CommitDone(COMMIT))
    ended = task.step(1, on.Done())
    assert isinstance(ended, do.AwaitOthers) and ended.healed


def test_who_does_not_wait_at_the_end_has_not_said_so() -> None:
    """0.5.0 leaves at once: others do not wait for it."""
    assert not Record(0, 0, Stage.IDLE).waits_at_end
    known = decode_record(encode_record(Record(0, 0, Stage.IDLE, waits_at_end=True)))
    assert known.waits_at_end


def test_a_node_that_falls_silent_when_others_have_finished_is_lost() -> None:
    """Nobody is left who could say that it waits for it: the task ran for ever."""
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1, understudies=0)
    driver.finished("n0.w0")
    driver.exited("n0.w0")
    driver.disconnected("n1")
    driver.probed("n1", "unknown")
    begun_ms, bound_ms = driver.now_ms, driver.machine.config.silence_ms_max
    while driver.machine.state.nodes["n1"].phase is not NodePhase.LOST and driver.now_ms < begun_ms + 3 * bound_ms:
        timers = driver.machine.state.timers
        due = min((at, name) for name, at in timers.items() if not name.startswith("silence/n0"))
        driver.beat("n0")
        driver.fire(due[1])
    assert driver.machine.state.nodes["n1"].phase is NodePhase.LOST


@pytest.mark.parametrize("layout", [Layout(dp=2, num_micro_batches=4), Layout(pp=2, dp=2, num_micro_batches=4)])
def test_an_heir_of_who_was_lost_behind_its_loop_meets_nobody(layout: Layout) -> None:
    lost = plan(layout, 2, PlanKind.REPLACE, 0)
    machine = HealingMachine(0, layout, 2)
    record = Record(0, LAST + 1, Stage.IDLE, num_segments=2, commit=COMMIT)
    (action,) = machine.step(on.Joined(lost, record))
    if isinstance(action, do.Ready):
        (action,) = machine.step(on.LoopEnded())
    assert isinstance(action, (do.ExchangeInside, do.ExchangeWorld)) and action.plan == lost
    (action,) = machine.step(on.OthersLeft())
    assert isinstance(action, do.Over) and action.healed
    assert machine.plan == lost and not machine.healing


def test_who_could_not_hear_that_all_leave_does_not_wait_for_them() -> None:
    task = Task(Layout(dp=2, num_micro_batches=4))
    task.train(0, 1)
    lost = plan(task.layout, 2, PlanKind.REPLACE, 0)
    task.step(1, on.LoopEnded())
    task.arrived(lost, 1)
    assert isinstance(task.step(1, on.Broken(inside=False, text="the store does not answer")), do.ExchangeWorld)
    action = task.step(1, on.OthersLeft())
    assert isinstance(action, do.Over) and action.healed


# ------------------------------------------------------------ what the coordinator makes of it


def behind_the_loop(*, understudies: int = 1) -> Coordinator:
    """Two nodes, a member each; the first has finished and is gone."""
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1, understudies=understudies)
    driver.finished("n0.w0")
    driver.exited("n0.w0")
    return driver


def test_who_is_lost_when_others_have_finished_has_an_heir() -> None:
    driver = behind_the_loop()
    driver.lost("n1.w0")
    new = driver.task.plan
    assert new is not None and new.epoch == 2 and new.heirs == (1,) and driver.task.awaiting == {1}
    heir = new.members[1].worker
    driver.healed(heir)
    assert driver.task.phase is TaskPhase.RUNNING
    driver.finished(heir)
    assert driver.task.outcome == "done" and driver.task.cause == ALL_FINISHED


def test_heirs_behind_the_loop_are_tried_a_few_times() -> None:
    driver = behind_the_loop()
    driver.lost("n1.w0")
    for _ in range(20):
        if driver.task.is_over:
            break
        plan_now = driver.task.plan
        assert plan_now is not None
        if not driver.task.lost:
            driver.lost(plan_now.members[1].worker)
        for name in list(driver.task.workers):
            if driver.worker(name).phase.value in ("ordered", "started", "up"):
                driver.up(name)
    assert driver.task.outcome == "done" and "ranks [1]" in driver.task.cause
    assert driver.task.epoch == 1 + driver.machine.config.last_heirs_max


def test_a_node_that_is_lost_behind_the_loop_leaves_nothing_to_run_the_rest_with() -> None:
    driver = behind_the_loop()
    driver.disconnected("n1")
    driver.probed("n1", "gone")
    assert driver.task.outcome == "done" and "ranks [1]" in driver.task.cause


@pytest.mark.parametrize("stage", [Stage.IDLE, Stage.EVALUATE])
def test_who_is_at_work_of_its_own_is_not_deaf(stage: Stage) -> None:
    """A last evaluation, or one that its script said is long: an heir waits for it, and nobody is ended for it."""
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1, understudies=1)
    driver.worker("n0.w0").stage = stage
    driver.lost("n1.w0")
    assert driver.task.plan is not None and driver.task.plan.heirs == (1,)
    for _ in range(10):
        driver.now_ms += 10.0
        driver.fire("heal/t")
        assert driver.sent(EndWorker) == [] and driver.task.phase is TaskPhase.HEALING and driver.task.epoch == 2
    stage_of = driver.worker("n0.w0")
    driver.stalled("n0.w0", waiting=False, stage=stage, is_sure=True, cpu=Cpu.IDLE)
    assert [order.worker for order in driver.sent(EndWorker)] == ["n0.w0"], stage_of


def test_who_is_still_at_work_behind_its_loop_is_waited_for() -> None:
    driver = running(Layout(dp=3, num_micro_batches=6), nodes=3, slots=1, understudies=0)
    driver.worker("n2.w0").stage = Stage.EVALUATE
    driver.finished("n0.w0")
    driver.disconnected("n1")
    driver.probed("n1", "gone")
    for _ in range(10):
        driver.fire("finish/t")
        assert not driver.task.is_over
    driver.finished("n2.w0")
    assert driver.task.outcome == "done"


# ------------------------------------------------------------ what follows the script's block


def both_finished(stage: Stage) -> Coordinator:
    """Two members have said that they finished; how their processes end is to come."""
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1, understudies=1)
    for name in ("n0.w0", "n1.w0"):
        driver.finished(name, tail=True)
        driver.worker(name).stage = stage
    assert not driver.task.is_over
    return driver


def died(driver: Coordinator, name: str, cause: str, stage: Stage) -> None:
    worker = driver.worker(name)
    lost = WorkerLost(
        worker.node, "t", name, worker.incarnation, worker.rank, "process", cause, "", stage, 6, -1, 1, 2, "",
    )  # fmt: skip
    driver.feed_fact(worker.node, lost)


@pytest.mark.parametrize(
    ("cause", "stage", "is_lost"),
    [
        ("signal 9", Stage.EVALUATE, True),
        ("exit code 7", Stage.EVALUATE, True),
        ("exit code 7", Stage.DONE, True),  # sys.exit(7): the interpreter came to its own end
        ("signal 11", Stage.DONE, False),  # a library that crashes when it is taken down
    ],
)
def test_how_a_process_ends_says_how_its_script_did(cause: str, stage: Stage, is_lost: bool) -> None:
    driver = both_finished(stage)
    driver.exited("n0.w0")
    assert not driver.task.is_over
    died(driver, "n1.w0", cause, stage)
    if not is_lost:
        assert driver.task.outcome == "done" and driver.task.cause == ALL_FINISHED
        return
    assert not driver.task.is_over and driver.task.plan is not None and driver.task.plan.heirs == (1,)
    heir = driver.task.plan.members[1].worker
    driver.healed(heir)
    driver.finished(heir, tail=True)
    assert not driver.task.is_over
    driver.exited(heir)
    assert driver.task.outcome == "done" and driver.task.cause == ALL_FINISHED


def test_a_tail_has_its_own_time() -> None:
    driver = both_finished(Stage.EVALUATE)
    driver.exited("n0.w0")
    for _ in range(20):
        driver.fire("finish/t")
        assert not driver.task.is_over and driver.sent(EndWorker) == []
    driver.worker("n1.w0").stage = Stage.DONE
    driver.fire("finish/t")
    assert driver.task.outcome == "done", "the interpreter does not end: that has a bound"


def test_an_older_worker_finishes_when_it_says_so() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1)
    driver.finished("n0.w0")
    driver.finished("n1.w0")
    assert driver.task.outcome == "done"
