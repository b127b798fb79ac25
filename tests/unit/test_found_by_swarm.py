"""What the simulator's swarm found in the machines: each failed here before it was mended. Seeds in the names of tests
are those of the day; histories of a seed change with the simulator."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from machines import Agent, Coordinator, pulse, running
from unicron import _core
from unicron.agent import events as agent_on
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.planned import Planned
from unicron.coordinator.state import Purpose
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.healing import actions as do
from unicron.healing import events as healing_on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record
from unicron.healing.resolve import Fetch, resolve_world
from unicron.messages import (
    AgentHeartbeat,
    AgentHello,
    AgentWelcome,
    ArenaRequest,
    ChangeLayout,
    EndWorker,
    FinishUnderstudies,
    MoveRoles,
    PublishEpoch,
    Saved,
    StartWorkers,
    StateLost,
    StopTask,
    WorkerLost,
    WorkerStalled,
    WorkerStatus,
)
from unicron.planner.cluster import Cluster, Node, Task, Workers
from unicron.planner.planner import Planner
from unicron.runtime.store_wire import split_key
from unicron.sim.checkers import Checkers, TaskChecks
from unicron.sim.worker import SimWorker
from unicron.training import ledger
from unicron.training.ledger import Ledger
from unicron.training.reshard.change import Change
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
    for worker in driver.task.workers.values():
        worker.stage = Stage.REDUCE
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


def test_a_deal_taken_with_the_state_is_not_forgotten_when_the_meeting_breaks() -> None:
    """Seed 5159: a task grew while its one replica held all micro-batches of the iteration. The joiner had taken the
    state when another died; its replica then computed a share by the newer plan, and those were counted twice."""
    layout = Layout(tp=2, dp=2, num_micro_batches=4)
    members = tuple(Member(rank, "n0", f"n0.w{rank}") for rank in range(4))
    grow = EpochPlan("t", 4, PlanKind.GROW, layout, (0, 1), members, (2, 3), (2, 3))
    again = EpochPlan("t", 5, PlanKind.REPLACE, layout, (0, 1), members, (0, 1, 2, 3), (0,))
    machine = HealingMachine(2, layout, 2)

    def step(event: healing_on.AnyEvent) -> do.AnyAction:
        (action,) = machine.step(event)
        return action

    joiners = [Record(rank, 0, Stage.STARTING, has_state=False, num_segments=2) for rank in (2, 3)]
    all_of_it = (0, 1, 2, 3)
    holders = [
        Record(rank, 7, Stage.REDUCE, begun=True, dealt=(0,), done=all_of_it, summed=True, num_segments=2)
        for rank in (0, 1)
    ]
    action = step(healing_on.Joined(grow, joiners[0]))
    while not isinstance(action, do.Settle):
        if isinstance(action, do.ExchangeInside):
            action = step(healing_on.RecordsGathered(joiners))
        elif isinstance(action, do.ExchangeWorld):
            action = step(healing_on.RecordsGathered([*holders, *joiners]))
        else:
            action = step(healing_on.Done())
    machine.step(healing_on.PlanArrived(again))
    assert isinstance(step(healing_on.Broken(True, "Connection closed", -1)), do.ExchangeInside)
    peer = msgspec.structs.replace(machine.record, rank=3)
    assert isinstance(step(healing_on.RecordsGathered([machine.record, peer])), do.RebuildInside)
    action = step(healing_on.Done())
    if isinstance(action, do.Ready):
        action = step(healing_on.IterationBegun(7))
    assert isinstance(action, do.Compute) and action.micro_batches == ()


@pytest.mark.parametrize(("outcome", "message"), [("stopped", StopTask), ("done", FinishUnderstudies)])
def test_a_node_that_was_away_hears_of_the_end_of_a_task(outcome: str, message: type) -> None:
    """Seed 5570: a task was cancelled while a node could not be reached; its workers there, which had saved and held,
    stayed until a bound, and the arenas for ever."""
    driver = running(config=CONFIG)
    assert driver.task.plan is not None
    plans = (driver.task.plan,)
    there = tuple(driver.status(w) for w in driver.task.workers.values() if w.node == "n1")
    members = sorted(driver.task.plan.members, key=lambda member: member.node, reverse=True)
    if outcome == "done":
        for member in members[:2]:  # those of n1
            driver.finished(member.worker)
    driver.disconnected("n1")
    if outcome == "stopped":
        driver.feed(on.CancelRequested("r", "t"))
    else:
        for member in members[2:]:
            driver.finished(member.worker)
    assert driver.task.is_over
    driver.feed(on.AgentMessage("n1", AgentHello("n1", 1, 2, 1, "tcp://n1:7000", "key", there, plans, "")))
    assert [order.task for order in driver.sent(message)] == ["t"]
    driver.feed(on.AgentDisconnected("n1"))
    driver.hello("n1")  # it knows nothing of the task any more
    assert driver.sent(message) == []


def test_who_waited_for_a_plan_that_was_lost_is_no_new_hang() -> None:
    """Seed 41: a coordinator died before its plan went out. Its members' agent told again, behind its hello, that all
    wait; they did so for the plan that the hello had just been answered with, and another one was made."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG)
    driver.disconnected("n0")
    driver.disconnected("n1")
    for node, workers in (("n0", ("n0.w0",)), ("n1", ("n1.w0",))):
        driver.hello(node, slots=1, knows=True)
        there = tuple(driver.status(driver.worker(name)) for name in workers)
        driver.feed(on.AgentMessage(node, AgentHello(node, 1, 1, 1, f"tcp://{node}:7000", "key", there, (), "")))
        assert [message.plan.epoch for message in driver.sent(PublishEpoch)] == [1]
    for name in ("n0.w0", "n1.w0"):
        driver.stalled(name, waiting=True, stalled_ms=5_000.0, epoch=0)
        assert driver.refusals() == ["explained"]
    assert driver.task.epoch == 1
    for name in ("n0.w0", "n1.w0"):
        driver.stalled(name, waiting=True, stalled_ms=2_000.0)
    assert driver.task.epoch == 2, "who still waits is freed"


def test_who_waited_for_a_plan_before_a_coordinator_that_stood_still_is_no_new_hang() -> None:
    """Seeds 85363, 12867: a coordinator stood still, and before it lay that everybody waits. It first heard what made
    it decide, and then took for a hang what that very plan answers: another one was made."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG)
    driver.failed("n0.w0", inside=False)
    driver.fire("diagnose/t")
    assert driver.task.epoch == 2
    for name in ("n0.w0", "n1.w0"):
        driver.stalled(name, waiting=True, stalled_ms=5_000.0, epoch=1)
        assert driver.refusals() == ["explained"]
    assert driver.task.epoch == 2
    for name in ("n0.w0", "n1.w0"):
        driver.stalled(name, waiting=True, stalled_ms=2_000.0)
    assert driver.task.epoch == 3, "who still waits is freed"


def test_what_stands_still_is_told_with_the_epoch_its_agent_knew() -> None:
    agent = Agent(heal_ms_max=500.0)
    agent.live(("n0.w0", 1, 0, False))
    told: list[int | None] = []
    for epoch in (0, 3):
        if epoch:
            members = (Member(0, "n0", "n0.w0", 1),)
            agent.order(PublishEpoch(EpochPlan("t", epoch, PlanKind.RECONNECT, Layout(), (0,), members)))
        for tick in range(20):
            now_ns = (epoch * 20 + tick) * 100_000_000
            agent.feed(agent_on.PulsesSampled(now_ns, (("n0.w0", pulse(stage=Stage.HEAL)),)))
            told += [stalled.epoch for stalled in agent.said(WorkerStalled)]
    assert told == [0, 3]


def test_an_agent_that_does_not_say_the_epoch_is_believed() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG)
    for name in ("n0.w0", "n1.w0"):
        driver.stalled(name, waiting=True, epoch=None)
    assert driver.task.epoch == 2


def test_a_member_that_never_saw_the_start_meets_the_rest_of_its_replica() -> None:
    """Seed 206: another replica's node was lost while the task started. One member of the whole replica had taken its
    role by the START, which nobody had finished, the other by the plan after it, which did not touch them: one waited
    inside the replica and one at the meeting, until every member was seen to wait."""
    layout = Layout(tp=2, dp=2, num_micro_batches=4)
    members = tuple(Member(rank, f"n{layout.replica_of(rank)}", f"w{rank}") for rank in range(layout.world_size))
    start = EpochPlan("t", 1, PlanKind.START, layout, (0, 1), members)
    gone = (2, 3)
    left = tuple(member for member in members if member.rank not in gone)
    shrink = EpochPlan("t", 2, PlanKind.SHRINK, layout, (0,), left, gone)
    early, late = HealingMachine(0, layout, 1), HealingMachine(1, layout, 1)
    early.step(healing_on.Joined(start, Record(0, 0, Stage.STARTING, num_segments=1)))
    early.step(healing_on.PlanArrived(shrink))
    (one,) = early.step(healing_on.Broken(True, "a newer epoch", -1))
    (other,) = late.step(healing_on.Joined(shrink, Record(1, 0, Stage.STARTING, has_state=False, num_segments=1)))
    assert isinstance(one, do.ExchangeInside) and isinstance(other, do.ExchangeInside)
    assert one.plan == other.plan == shrink


def test_a_task_that_was_told_to_leave_and_cannot_go_on_leaves() -> None:
    """Seed 206: it had committed nothing when its members said that their state was lost, and all were to start again;
    they had been told to save and leave, and nothing bounded that any more."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG, checkpoint_dir="/ckpt")
    driver.feed(on.SuspendRequested("s", "t"))
    assert driver.task.leaving
    driver.says(StateLost("n0.w0", 0, driver.task.epoch, 0, (0,)))
    assert not driver.task.leaving
    for worker in list(driver.task.workers):
        driver.lost(worker, "ended")
    assert driver.task.phase is TaskPhase.SUSPENDED


def test_somebody_finished_and_another_died_before_it_gave_its_account() -> None:
    """Seed 3075: the healing's bound made a plan with a worker that is gone, and the coordinator ended of it."""
    driver = running(Layout(dp=3, num_micro_batches=3), nodes=3, slots=1, config=CONFIG)
    driver.lost("n1.w0", "signal 9")
    driver.finished("n0.w0")
    driver.lost("n1.w1", "signal 9")  # its heir
    assert "heal/t" not in driver.machine.state.timers and driver.task.epoch == 2
    driver.up("n1.w2")
    assert driver.task.epoch == 3 and driver.task.plan is not None and driver.task.plan.heirs == (1,)
    driver.lost("n1.w2", "signal 9")
    driver.fire("ready/t")  # nobody else gets ready
    driver.fire("finish/t")
    assert not driver.task.is_over, "n2's member is at work behind its loop"
    driver.finished("n2.w0")
    assert driver.task.outcome == "done" and "ranks [1]" in driver.task.cause


RESTORE_EPOCH = 3
OLD_COMMIT = CommitResult(30, 2.0, 1.0, 0.0, 1.0)


def restoring(layout: Layout) -> tuple[HealingMachine, EpochPlan]:
    """Rank 0, at iteration 31, as far as the loading of the checkpoint of iteration 30."""
    ranks = tuple(range(layout.world_size))
    members = tuple(Member(rank, "n0", f"n0.w{rank}") for rank in ranks)
    plan = EpochPlan(
        "t", RESTORE_EPOCH, PlanKind.RESTORE, layout, tuple(range(layout.dp)), members, ranks, (), restore="ckpt/30"
    )
    machine = HealingMachine(0, layout, 2)
    whole = Record(0, 31, Stage.IDLE, commit=OLD_COMMIT, num_segments=2)
    records = [whole, *(Record(rank, 30, Stage.STEP, has_state=False, num_segments=2) for rank in ranks[1:])]
    (action,) = machine.step(healing_on.Joined(plan, whole))
    while not isinstance(action, do.LoadCheckpoint):
        inside = isinstance(action, do.ExchangeInside)
        if inside or isinstance(action, do.ExchangeWorld):
            wanted = layout.replica_ranks(0) if inside else ranks
            (action,) = machine.step(healing_on.RecordsGathered([records[rank] for rank in wanted]))
        else:
            (action,) = machine.step(healing_on.Done())
    return machine, plan


def test_what_is_being_loaded_over_is_no_state() -> None:
    machine, _ = restoring(Layout(dp=3, num_micro_batches=3))
    assert not machine.record.has_state and machine.record.commit is None
    machine.step(healing_on.Broken(False, "the disk is gone", -1))
    assert not machine.record.has_state
    machine, _ = restoring(Layout(dp=3, num_micro_batches=3))
    machine.step(healing_on.CheckpointLoaded(30))
    assert machine.record.has_state and machine.record.branch == RESTORE_EPOCH


def test_a_commit_of_before_the_checkpoint_is_not_stepped_with() -> None:
    """Seed 5069: rank 0 had loaded iteration 30 when the other member died on its way to it. In its arena was that
    iteration's commit, from before: rank 0 stepped with it, and no micro-batch was in its sums."""
    layout = Layout(tp=2, num_micro_batches=2)
    machine, plan = restoring(layout)
    machine.step(healing_on.CheckpointLoaded(30))
    again = msgspec.structs.replace(plan, epoch=4, kind=PlanKind.REPLACE, restore="", heirs=(1,))
    machine.step(healing_on.PlanArrived(again))
    (action,) = machine.step(healing_on.IterationBegun(30))
    assert isinstance(action, do.ExchangeInside)
    torn = Record(1, 30, Stage.STEP, has_state=False, commit=OLD_COMMIT, num_segments=2)
    (action,) = machine.step(healing_on.RecordsGathered([machine.record, torn]))
    assert isinstance(action, do.RebuildInside)
    (action,) = machine.step(healing_on.Done())
    assert isinstance(action, do.ExchangeWorld)
    (action,) = machine.step(healing_on.RecordsGathered([machine.record, torn]))
    assert isinstance(action, do.RebuildCross)
    (action,) = machine.step(healing_on.Done())
    assert isinstance(action, do.ReportStateLost)


@pytest.mark.parametrize("iteration", [30, 31, 28])
def test_who_loaded_and_who_did_not_do_not_go_on_together(iteration: int) -> None:
    """Seed 5497: two of three ranks were at iteration 20 again, from the checkpoint, and the third's heir found its
    predecessor's state of iteration 28."""
    layout = Layout(dp=3, num_micro_batches=3)
    machine, plan = restoring(layout)
    machine.step(healing_on.CheckpointLoaded(30))
    again = msgspec.structs.replace(plan, epoch=4, kind=PlanKind.REPLACE, restore="", heirs=(1,))
    loaded = [msgspec.structs.replace(machine.record, rank=rank) for rank in (0, 2)]
    commit = msgspec.structs.replace(OLD_COMMIT, iteration=iteration - 1)
    old = Record(1, iteration, Stage.REDUCE, begun=True, dealt=(0, 1, 2), commit=commit, num_segments=2)
    verdict = resolve_world(again, [loaded[0], old, loaded[1]])
    assert verdict.lost_positions == (0,)  # all load again
    verdict = resolve_world(again, [loaded[0], msgspec.structs.replace(old, has_state=False), loaded[1]])
    assert verdict.iteration == 30 and verdict.fetches == (Fetch(0, 0, (1,)),) and verdict.branch == RESTORE_EPOCH


@pytest.mark.parametrize("commit", [None, OLD_COMMIT])
def test_an_arena_says_to_which_return_its_state_belongs(commit: CommitResult | None) -> None:
    fd = _core.create_arena(_core.ARENA_HEADER_BYTES + 4096)
    try:
        _core.ArenaHeader(fd).format("digest", 4096)
        account = Ledger(fd)
        account.write(Record(0, 30, Stage.IDLE, commit=commit, branch=RESTORE_EPOCH, num_segments=2))
        assert account.read(0, 2).branch == RESTORE_EPOCH and account.read(0, 2).commit == commit
        account.set_branch(RESTORE_EPOCH + 1)
        assert account.read(0, 2).branch == RESTORE_EPOCH + 1 and account.read(0, 2).commit is None
    finally:
        os.close(fd)


def test_an_owner_that_dies_before_anything_is_in_its_arena_leaves_no_state() -> None:
    """Seed 4779: a new worker was killed between the grant of its arena and its first record; its heir took what lay
    there, nothing at all, for the whole state of iteration 0, and the others were at 36."""
    fd = _core.create_arena(_core.ARENA_HEADER_BYTES + 4096)
    try:
        Ledger.of_new_arena(fd, "digest", 4096)
        assert _core.ArenaHeader(fd).check("digest", 4096) == ""
        assert not Ledger(fd).read(0, 2).has_state
        Ledger(fd).write(Record(0, 0, Stage.STARTING, num_segments=2))  # at the start of a task all is there
        assert Ledger(fd).read(0, 2).has_state
    finally:
        os.close(fd)


def test_every_new_arena_is_made_so() -> None:
    home = Path(ledger.__file__).parent
    sources = {path.relative_to(home).as_posix(): path.read_text() for path in home.rglob("*.py")}
    assert {name for name, text in sources.items() if ".of_new_arena(" in text} == {"boundary.py", "reshard/change.py"}
    assert not [name for name, text in sources.items() if ".format(memory." in text]


ALONE = Layout(dp=1, num_micro_batches=2)


def lose(driver: Coordinator, node: str) -> None:
    driver.disconnected(node)
    driver.probed(node, "gone")
    assert driver.machine.state.nodes[node].phase is NodePhase.LOST


@pytest.mark.parametrize("restarts", [False, True])
def test_who_may_have_committed_unheard_does_not_begin_from_scratch(restarts: bool) -> None:
    """Seed 4589: a task ran 48 iterations while there was no coordinator, then its only node was lost. The next
    coordinator had heard of no iteration, and let it begin from scratch without a word."""
    driver = running(ALONE, slots=1)
    assert driver.task.placement == {0: "n0"}
    if restarts:
        driver.restart()
        driver.hello("n1", slots=1)
        driver.probed("n0", "gone")
    else:  # cut off since it began: a heartbeat from before it committed says nothing
        lose(driver, "n0")
    assert driver.task.phase is not TaskPhase.STARTING
    assert driver.task.outcome == "stopped"
    assert "nobody is left who says how far it was, and no checkpoint to return to" in driver.task.cause


@pytest.mark.parametrize(
    ("iteration", "stage", "begins"), [(0, Stage.COMPUTE, True), (0, Stage.STEP, False), (1, Stage.COMPUTE, False)]
)
def test_a_death_before_the_first_commit_shows_that_nothing_is_lost(iteration: int, stage: Stage, begins: bool) -> None:
    driver = running(ALONE, slots=1, understudies=0)
    lost = WorkerLost("n0", "t", "n0.w0", 0, 0, "process", "signal 9", "", stage, iteration, 0, 1_000, 2_000, "")
    driver.feed_fact("n0", lost)
    lose(driver, "n0")
    assert (driver.task.phase is TaskPhase.STARTING) is begins
    assert (driver.task.outcome == "stopped") is not begins
    driver.restart()
    assert (driver.task.outcome == "stopped") is not begins


def test_an_heir_that_dies_before_its_first_iteration_shows_nothing() -> None:
    driver = running(ALONE, slots=1)
    driver.lost("n0.w0", "signal 9", iteration=0)
    assert driver.task.plan is not None and driver.task.plan.kind is PlanKind.REPLACE
    driver.lost("n0.w1", "signal 9", iteration=0)
    lose(driver, "n0")
    assert driver.task.outcome == "stopped"


def test_what_the_dead_say_after_all_were_told_to_start_again_counts() -> None:
    """All waited, so all were ended; one had committed an iteration meanwhile."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, understudies=0)
    for name in ("n0.w0", "n1.w0"):
        driver.state_lost(name)
    assert driver.task.outcome == "stopped", "iteration 5 is known"
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, understudies=0)
    driver.says(StateLost("n0.w0", 0, 1, 0, (0,)))
    assert driver.task.is_restarting
    for name in ("n0.w0", "n1.w0"):
        driver.lost(name, "signal 9", iteration=1)
    assert driver.task.outcome == "stopped" and "no checkpoint to return to" in driver.task.cause


def test_heirs_alone_do_not_say_that_nothing_was_committed() -> None:
    """Seed 30119: a node came back as another life, all roles went to fresh processes, and those said that no state was
    there at iteration 0, their own: taken for the task's."""
    layout = Layout(dp=2, num_micro_batches=2)
    members = tuple(Member(rank, "n0", f"n0.w{rank}") for rank in range(2))
    plan = EpochPlan("t", 2, PlanKind.REPLACE, layout, (0, 1), members, (0, 1), (0, 1))
    fresh = [Record(rank, 0, Stage.STARTING, has_state=False, num_segments=2) for rank in range(2)]
    assert resolve_world(plan, fresh).iteration == -1
    wide = Layout(tp=2, num_micro_batches=2)
    half = [Record(0, 7, Stage.COMPUTE, num_segments=2), fresh[1]]
    verdict = resolve_world(msgspec.structs.replace(plan, layout=wide, replicas=(0,)), half)
    assert (verdict.iteration, verdict.lost_positions) == (7, (1,))
    driver = running(layout, slots=1)
    driver.says(StateLost("n0.w0", 0, 1, -1, (0,)))
    assert driver.task.outcome == "stopped" and "no checkpoint to return to" in driver.task.cause


@pytest.mark.parametrize("leaves", [False, True])
def test_no_epoch_is_made_with_who_finished_during_the_healing(leaves: bool) -> None:
    """Seed 30086: a role had moved at the boundary after the last iteration, and one finished without meeting the
    newcomer, which waited for it. The plan that was to free the newcomer had a member that was gone: the coordinator
    failed; and without that plan nothing ended the wait."""
    driver = healing()
    driver.finished("n0.w0")
    if leaves:
        driver.exited("n0.w0")
    driver.now_ms += 10.0
    driver.fire("heal/t")
    assert driver.sent(PublishEpoch) == []
    assert [order.worker for order in driver.sent(EndWorker)] == ["n1.w1"]
    driver.lost("n1.w1", "signal 9")
    driver.fire("ready/t")
    assert driver.task.outcome == "done" and "ranks [1]" in driver.task.cause


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_reached_before_the_plan_is_no_sign_that_it_was_healed(restarts: bool) -> None:
    """Seed 71440: a coordinator came back to a healing, and heard then how far the members had been long ago. It took
    that for an advance since its plan and closed the healing; an heir that never moved was waited for, for ever."""
    driver = healing()
    plan = driver.task.plan
    assert plan is not None

    def there(name: str, iteration: int, epoch: int) -> WorkerStatus:
        status = driver.status(driver.worker(name), stage=Stage.HEAL)
        return msgspec.structs.replace(status, iteration=iteration, epoch=epoch, progress=9)

    def beats(iteration: int, epoch: int) -> None:
        for node, name in (("n0", "n0.w0"), ("n1", "n1.w1")):
            beat = AgentHeartbeat(node, driver.incarnations[node], 1, (there(name, iteration, epoch),))
            driver.feed(on.AgentMessage(node, beat))

    if restarts:
        driver.restart()
        for node, name in (("n0", "n0.w0"), ("n1", "n1.w1")):
            workers = (there(name, 20, plan.epoch - 1),)
            hello = AgentHello(node, 1, 1, 1, f"tcp://{node}:7000", "key", workers, (), "")
            driver.feed(on.AgentMessage(node, hello))
    driver.now_ms += 10.0
    beats(20, plan.epoch - 1)
    beats(22, plan.epoch)
    beats(23, plan.epoch)
    for _ in range(1 + restarts):  # a node that has just come back has as long as the others had
        driver.fire("heal/t")
    assert driver.task.phase is TaskPhase.HEALING and driver.task.epoch == plan.epoch + 1, "they are told again"
    beats(23, plan.epoch + 1)
    beats(25, plan.epoch + 1)
    driver.fire("heal/t")
    assert driver.task.phase is TaskPhase.RUNNING, "only after a meeting two more iterations are committed"


def test_a_simulated_joiner_that_is_told_twice_prepares_once() -> None:
    """Seed 71520: its node came back in the middle of a move and was told of it again. The simulated joiner asked for
    its arena a second time, as no real one does, and what the leaver sent meanwhile was lost."""
    layout = Layout(num_micro_batches=2)
    former = EpochPlan("t", 1, PlanKind.START, layout, (0,), (Member(0, "n0", "n0.w0"),))
    plan = EpochPlan("t", 2, PlanKind.MOVE, layout, (0,), (Member(0, "n1", "n1.w0"),), (0,), (0,))
    asked: list[ArenaRequest] = []
    joiner = object.__new__(SimWorker)
    joiner.name, joiner.task, joiner.rank, joiner.rng = "n1.w0", "t", 0, random.Random(1)
    joiner.newest = joiner.move = joiner.machine = None
    joiner.is_waiting_role = True
    host = SimpleNamespace(ask_arena=lambda _, request: asked.append(request), hear=lambda *_: None)
    joiner.host = host  # type: ignore[assignment]
    joiner._later = lambda _, call: call()  # type: ignore[method-assign]
    for switch in (False, False, True):
        joiner.on_move(MoveRoles("t", former, plan, "drained", switch))
        assert len(asked) == 1
        joiner.is_joining = False
        joiner.arena_came()


def test_equal_plans_are_no_mistake_and_worse_ones_are() -> None:
    """Seed 5252: two tasks alike, one of which could grow. The table gave one the slots, a direct solve the other:
    reward and moves are what both promise (csrc/planner/reward.h), not who comes first."""
    flops = {2: 1.7e12, 4: 3.0e12}
    alike = [
        Task(name, Workers(2, 4, 2), flops, group=2, holds={node: 2}, required=True)
        for name, node in (("a", "n0"), ("b", "n1"))
    ]
    over = Task("over", Workers(1, 2, 1), {1: 1e12, 2: 1.7e12}, holds={"n0": 1, "n1": 1}, required=True)
    cluster = Cluster((Node("n0", 3), Node("n1", 3)), (over, *alike))
    reward = Planner(cluster, table=False).solve(("finish:over",)).reward_flop
    found = []
    for counts in ({"a": 4, "b": 2}, {"a": 2, "b": 4}, {"a": 2, "b": 2}):
        said: list[str] = []
        checkers = Checkers(SimpleNamespace(violate=said.append, count=said.index))  # type: ignore[arg-type]
        for worth in (reward, reward * 0.99):
            said.clear()
            checkers.solve_again(1, Planned(1, cluster, ("finish:over",), {**counts, "over": 0}, {}, worth))
            found.append(bool(said))
    assert sorted(found[:4]) == [False, False, False, True] and found[4:] == [True, True]  # as solved it is not asked


def test_who_stood_still_ends_its_step_after_the_others_left_without_it() -> None:
    """Seed 70250: a node stood still in the step of an iteration that all had committed. The task went on without it,
    was pre-empted and left; then the node went on and ended its step, which was taken for training."""
    said: list[str] = []
    world = SimpleNamespace(violate=said.append, count=said.count, log=lambda *_: None, ghosts=[])
    world.checkers = Checkers(world)  # type: ignore[arg-type]
    task = TaskChecks(world, "t")  # type: ignore[arg-type]
    layout = Layout(dp=2, num_micro_batches=2)
    members = tuple(Member(rank, f"n{rank}", f"n{rank}.w0") for rank in range(2))
    task.planned(EpochPlan("t", 1, PlanKind.START, layout, (0, 1), members))

    def step(name: str, iteration: int) -> list[str]:
        memory = SimpleNamespace(iteration=iteration, segments=[(0, 1)])
        worker = SimpleNamespace(
            name=name, rank=0, memory=memory, layout=layout, host=SimpleNamespace(node=name, incarnation=1)
        )
        said.clear()
        task.stepped(worker, CommitResult(iteration, 1.0, 1.0, 0.0, 1.0))  # type: ignore[arg-type]
        return said

    for name in ("n0.w0", "n1.w0"):
        assert not step(name, 6)
    task.planned(EpochPlan("t", 2, PlanKind.SHRINK, layout, (0,), members[:1], (1,)))
    assert not step("n0.w0", 7)
    task.left("it is pre-empted (saved at iteration 8)")
    assert not said and not step("n1.w0", 7)
    assert step("n1.w0", 8), "nobody committed it: it trains"
    assert step("n0.w0", 7), "it saved, and holds"
    task.planned(EpochPlan("t", 3, PlanKind.RESTORE, layout, (0,), members[:1], restore="ckpt/8"))
    assert not step("n0.w0", 8) and not step("n1.w0", 9)
    said.clear()
    task.left("it is pre-empted (saved at iteration 9)")
    assert not said, "what a stranger stepped is not the task's"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_last_word_that_comes_before_the_last_account_of_a_healing_is_not_forgotten(restarts: bool) -> None:
    """Seed 81539: the members of a task that was to leave had healed, saved and held; their agent told a coordinator
    that came back of the checkpoint before another node told of the healing. The word is said once: they held for
    ever, with their slots."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1, config=CONFIG, checkpoint_dir="/ckpt")
    driver.feed(on.SuspendRequested("s", "t"))
    driver.lost("n1.w0", "signal 9")
    assert driver.task.phase is TaskPhase.HEALING and driver.task.leaving
    if restarts:
        driver.restart()
        for node in ("n0", "n1"):
            driver.hello(node, knows=True)
    driver.says(Saved("n0.w0", 0, 30, "ckpt/30", driver.task.epoch, final=True))
    assert driver.task.phase is TaskPhase.HEALING and driver.task.checkpoint == (30, "ckpt/30")
    driver.all_healed()
    assert driver.task.phase is TaskPhase.SUSPENDED
    assert {order.worker for order in driver.sent(EndWorker)} >= {"n0.w0", "n1.w1"}


def test_who_replaces_a_member_that_died_before_the_first_epoch_completes_the_start() -> None:
    """Seed 542 and thirty others, when the last of many members became the only one whose getting up is looked at: the
    one that died was waited for, and the task was stopped because "0 of 1 workers" had not joined."""
    driver = Coordinator()
    for node in ("n0", "n1"):
        driver.hello(node)
    driver.submit(Layout(dp=4, num_micro_batches=4))
    names = [w.name for w in driver.task.workers.values() if w.purpose is Purpose.MEMBER]
    driver.up(names[0])
    assert driver.task.absent == {*names[1:]}
    driver.lost(names[-1], "signal 9")
    (order,) = driver.sent(StartWorkers)
    for name in (*names[1:-1], order.workers[0][0]):
        assert driver.task.phase is TaskPhase.STARTING
        driver.up(name)
    assert driver.task.phase is TaskPhase.RUNNING


def test_what_was_said_of_a_layout_that_was_announced_before_is_not_read_for_the_next() -> None:
    """Seed 2023: a coordinator announced a layout as epoch 3 and ended; the next one healed a failure in epoch 2 and
    announced the same layout as epoch 3. Who had left for the first one, two iterations before, was taken for there."""
    member = (Member(0, "n0", "n0.w0"),)
    epochs = [EpochPlan("t", epoch, PlanKind.REPLACE, Layout(), (0,), member) for epoch in (1, 2, 3)]
    prefixes = set()
    for former in epochs[:2]:
        change = object.__new__(Change)
        change.order = ChangeLayout("t", former, epochs[2], "wider")
        prefixes.add(change._prefix("places"))
    assert len(prefixes) == 2 and {split_key(f"{prefix}0") for prefix in prefixes} == {("t", 3)}
