"""A loop that stands still is suspected at 1.5 times the usual of its stage and told for sure at 3, with what explains
it; what is declared, and the first iteration, have bounds of their own."""

from __future__ import annotations

import pytest

from machines import Agent, pulse
from unicron.agent import events as on
from unicron.messages import (
    AgentHeartbeat,
    AgentHello,
    AskWaits,
    Finished,
    PublishEpoch,
    WorkerContinued,
    WorkerStalled,
    WorkersWait,
)
from unicron.types import Cpu, EpochPlan, Layout, Member, PlanKind, Stage

W = "n0.w0"
MS = 1_000_000
COMPUTE = int(Stage.COMPUTE)


def sampled(agent: Agent, now_ms: float, **fields: object) -> None:
    agent.feed(on.PulsesSampled(int(now_ms * MS), ((W, pulse(**fields)),)))


def learned(step_ms: float = 1000.0) -> Agent:
    """Ten micro-batches of a second each in iteration 1, after a first iteration that took longer. It is 10 s now."""
    agent = Agent()
    agent.live((W, 0, 0, False))
    intervals = ((COMPUTE, 0, 9000.0), *((COMPUTE, 1, step_ms) for _ in range(10)))
    sampled(agent, 9_900.0, iteration=1, progress=9)
    sampled(agent, 10_000.0, iteration=1, progress=10, since_ns=10_000 * MS, intervals=intervals)
    return agent


def stand(agent: Agent, first_ms: float, last_ms: float, every_ms: float = 100.0, **fields: object) -> WorkerStalled:
    """Samples while nothing moves; the last report there was. Fails if there was none."""
    found = None
    for now_ms in steps(first_ms, last_ms, every_ms):
        sampled(agent, now_ms, **{"iteration": 1, "progress": 10, **fields})
        found = next(iter(agent.said(WorkerStalled)), found)
    assert found is not None
    return found


def steps(first_ms: float, last_ms: float, every_ms: float = 100.0) -> list[float]:
    return [first_ms + every_ms * n for n in range(round((last_ms - first_ms) / every_ms) + 1)]


def quiet(agent: Agent, first_ms: float, last_ms: float, every_ms: float = 100.0, **fields: object) -> None:
    for now_ms in steps(first_ms, last_ms, every_ms):
        sampled(agent, now_ms, **{"iteration": 1, "progress": 10, **fields})
        assert not agent.said(WorkerStalled), now_ms


def test_a_stall_is_suspected_and_then_sure() -> None:
    agent = learned()
    quiet(agent, 10_100.0, 11_500.0)
    suspected = stand(agent, 11_600.0, 11_600.0, waiting=True)
    assert (suspected.is_sure, suspected.usual_ms, suspected.budget_ms) == (False, 1000.0, 1500.0)
    assert (suspected.stalled_ms, suspected.waiting_in_collective) == (1600.0, True)
    quiet(agent, 11_700.0, 13_000.0)
    sure = stand(agent, 13_100.0, 13_100.0)
    assert (sure.is_sure, sure.stalled_ms, sure.budget_ms) == (True, 3100.0, 3000.0)
    quiet(agent, 13_200.0, 20_000.0)
    sampled(agent, 20_100.0, iteration=1, progress=11, since_ns=20_050 * MS)
    assert agent.said(WorkerContinued)


def test_a_busy_machine_is_no_stall() -> None:
    """Below a second and a half nothing is one, however fast the loop is."""
    agent = learned(step_ms=1.0)
    quiet(agent, 10_100.0, 11_500.0)
    assert stand(agent, 11_600.0, 11_600.0).is_sure


def test_what_it_survived_once_is_no_stall_the_next_time() -> None:
    agent = learned()
    sampled(agent, 14_900.0, iteration=1, progress=11, intervals=((COMPUTE, 1, 4_900.0),), since_ns=14_900 * MS)
    quiet(agent, 15_000.0, 20_900.0, progress=11)
    assert not stand(agent, 21_000.0, 21_100.0, progress=11).is_sure


@pytest.mark.parametrize(
    ("ran_ms", "starved_ms", "cpu"),
    [(0.0, 0.0, Cpu.IDLE), (900.0, 0.0, Cpu.BUSY), (100.0, 900.0, Cpu.STARVED)],
)
def test_what_its_threads_did_is_told(ran_ms: float, starved_ms: float, cpu: Cpu) -> None:
    agent = learned()
    sampled(agent, 10_100.0, iteration=1, progress=10, activity=on.Activity(500.0, 50.0))
    quiet(agent, 10_200.0, 11_500.0, activity=on.Activity(500.0 + ran_ms, 50.0 + starved_ms))
    activity = on.Activity(500.0 + ran_ms, 50.0 + starved_ms)
    assert stand(agent, 11_600.0, 11_600.0, activity=activity).cpu is cpu


def test_time_that_nobody_watched_is_no_stall() -> None:
    """The agent itself was stopped, or the clock jumped: a minute between two samples counts as one second."""
    agent = learned()
    quiet(agent, 70_000.0, 70_000.0)
    sampled(agent, 70_200.0, iteration=1, progress=11, since_ns=70_100 * MS)
    assert not agent.said(WorkerStalled)
    sampled(agent, 50_000.0, iteration=1, progress=11, since_ns=70_100 * MS)  # and back
    assert not agent.said(WorkerStalled)


def test_a_new_epoch_begins_the_clock_again() -> None:
    agent = learned()
    member = Member(0, "n0", W, 0)
    agent.order(PublishEpoch(EpochPlan("t", 2, PlanKind.RECONNECT, Layout(), (0,), (member,))))
    quiet(agent, 11_900.0, 13_400.0)
    assert stand(agent, 13_500.0, 13_500.0)


def test_the_iteration_in_which_an_epoch_began_teaches_nothing() -> None:
    """Found by the detection bench: who had waited for an heir took that for usual, and did not say the next time."""
    agent = learned()
    reduce = int(Stage.REDUCE)
    here: dict[str, object] = {"iteration": 1, "progress": 11, "stage": Stage.REDUCE, "waiting": True}
    sampled(agent, 10_100.0, **here, intervals=((reduce, 1, 5.0), (reduce, 1, 6.0)))
    member = Member(0, "n0", W, 0)
    agent.order(PublishEpoch(EpochPlan("t", 2, PlanKind.RECONNECT, Layout(), (0,), (member,))))
    sampled(agent, 10_200.0, **here)
    sampled(agent, 24_000.0, iteration=1, progress=12, stage=Stage.STEP, intervals=((reduce, 1, 13_800.0),))
    again = {**here, "iteration": 2, "progress": 20}
    sampled(agent, 30_000.0, **again, since_ns=30_000 * MS)
    quiet(agent, 30_100.0, 31_500.0, **again)
    assert stand(agent, 31_600.0, 31_600.0, **again).usual_ms == 6.0


def test_first_iteration_has_a_budget_of_its_own() -> None:
    agent = Agent()
    agent.live((W, 0, 0, False))
    sampled(agent, 0.0, iteration=0, progress=10)
    quiet(agent, 1_000.0, 1_799_000.0, 1_000.0, iteration=0)
    assert stand(agent, 1_800_000.0, 1_801_000.0, 1_000.0, iteration=0).is_sure


def test_an_heirs_first_iteration_is_measured_by_its_predecessor() -> None:
    """It may take nine times the usual before it is suspect, and its bound before anybody is sure."""
    agent = learned()
    agent.live(("n0.w1", 1, 0, False))

    def heir(now_ms: float, **fields: object) -> None:
        page = pulse(**{"iteration": 1, "progress": 3, **fields})
        agent.feed(on.PulsesSampled(int(now_ms * MS), (("n0.w1", page),)))

    heir(20_000.0)
    for now_ms in steps(20_500.0, 29_000.0, 500.0):
        heir(now_ms)
        assert not agent.said(WorkerStalled), now_ms
    heir(29_500.0)
    (stalled,) = agent.said(WorkerStalled)
    assert (stalled.worker, stalled.is_sure, stalled.usual_ms) == ("n0.w1", False, 1000.0)


@pytest.mark.parametrize(("stage", "declared_ms", "bound_ms"), [
    (Stage.EVALUATE, 60_000.0, 60_000.0), (Stage.EVALUATE, 0.0, 3_600_000.0), (Stage.SAVE, 0.0, 1_800_000.0),
])  # fmt: skip
def test_declared_stages_have_their_own_bounds(stage: Stage, declared_ms: float, bound_ms: float) -> None:
    agent = learned()
    fields = {"stage": stage, "declared_ms": declared_ms, "progress": 11}
    sampled(agent, 10_100.0, iteration=1, **fields)
    quiet(agent, 11_000.0, 10_000.0 + bound_ms, 1_000.0, **fields)
    stalled = stand(agent, 11_000.0 + bound_ms, 12_000.0 + bound_ms, 1_000.0, **fields)
    assert (stalled.is_sure, stalled.budget_ms, stalled.usual_ms) == (True, bound_ms, 0.0)


def test_the_scripts_own_code_is_suspect_after_ten_seconds() -> None:
    """Others that wait and a thread that sleeps then make a verdict; without them there are two minutes."""
    agent = learned()
    idle = int(Stage.IDLE)
    sampled(agent, 10_100.0, iteration=1, progress=11, stage=Stage.IDLE, intervals=((idle, 1, 5.0), (idle, 1, 6.0)))
    quiet(agent, 11_000.0, 20_000.0, 1_000.0, progress=11, stage=Stage.IDLE)
    assert not stand(agent, 21_000.0, 21_000.0, progress=11, stage=Stage.IDLE).is_sure
    quiet(agent, 22_000.0, 130_000.0, 1_000.0, progress=11, stage=Stage.IDLE)
    assert stand(agent, 131_000.0, 132_000.0, 1_000.0, progress=11, stage=Stage.IDLE).is_sure


def test_waiting_for_a_role_has_none() -> None:
    agent = Agent()
    agent.live((W, 0, 0, True))
    quiet(agent, 0.0, 1e7, 1e6, stage=Stage.WAITING)


def test_reports_are_kept_for_a_coordinator_that_comes_back() -> None:
    agent = learned()
    agent.feed(on.CoordinatorDisconnected())
    agent.feed(on.MutexReleased(W, 9, pulse()))
    assert not agent.said(AgentHello)
    agent.feed(on.CoordinatorConnected())
    kinds = [type(a.message).__name__ for a in agent.actions if hasattr(a, "message")]
    assert kinds[0] == AgentHello.__name__
    assert "WorkerLost" in kinds


def test_who_waits_is_told_when_it_is_asked_for() -> None:
    """After 1.5 times the usual and 300 ms, long before it is a stall; who computes waits for nobody."""
    agent = learned(step_ms=100.0)
    for now_ms, waiting, told in (
        (10_100.0, True, ()),
        (10_250.0, True, ()),
        (10_350.0, True, (W,)),
        (10_400.0, False, ()),
    ):
        sampled(agent, now_ms, iteration=1, progress=10, since_ns=10_000 * MS, waiting=waiting)
        agent.order(AskWaits("t"))
        assert agent.said(WorkersWait) == [WorkersWait("n0", "t", told)], now_ms
    agent.order(AskWaits("another"))
    assert agent.said(WorkersWait) == [WorkersWait("n0", "another", ())]


def test_who_is_through_with_its_loop_waits_for_the_others() -> None:
    """A recovery is waited for in the same stage, by everybody and for long; that says nothing of a node."""
    agent = learned(step_ms=100.0)
    for declared_ms, told in ((0, ()), (240_000, (W,))):
        agent.feed(on.PulsesSampled(0, ((W, pulse(iteration=1, progress=20 + declared_ms)),)))
        heal = {"stage": Stage.HEAL, "iteration": 1, "progress": 21 + declared_ms, "waiting": True}
        for now_ms in (20_000.0 + declared_ms, 20_400.0 + declared_ms, 20_800.0 + declared_ms):
            sampled(agent, now_ms, **heal, declared_ms=declared_ms)
        agent.order(AskWaits("t"))
        assert agent.said(WorkersWait) == [WorkersWait("n0", "t", told)]


def test_what_a_new_epoch_ended_is_not_told_again() -> None:
    """Found by the swarm: all waited for a lost node, a plan without it freed them, and half a minute later the next
    coordinator heard once more that everybody waits, and broke all connections of a task that trained."""
    agent = learned()
    stand(agent, 10_100.0, 14_000.0)
    member = Member(0, "n0", W, 1)
    agent.order(PublishEpoch(EpochPlan("t", 2, PlanKind.SHRINK, Layout(), (0,), (member,))))
    agent.feed(on.CoordinatorDisconnected())
    agent.feed(on.CoordinatorConnected())
    assert not agent.said(WorkerStalled)


def test_where_a_worker_stood_when_a_plan_came_is_told_with_it() -> None:
    agent = learned()
    sampled(agent, 10_100.0, iteration=1, progress=11)
    order = PublishEpoch(EpochPlan("t", 2, PlanKind.SHRINK, Layout(), (0,), (Member(0, "n0", W, 1),)))
    agent.order(order)
    sampled(agent, 10_200.0, iteration=1, progress=14)
    agent.order(order)  # a coordinator that came back tells the same plan again
    (status,) = agent.beat().workers
    assert (status.epoch, status.progress_planned, status.progress) == (2, 11, 14)


def test_what_was_taken_back_is_not_told_again() -> None:
    """A coordinator that comes back must not end a worker for a standstill that is over."""
    agent = learned()
    stand(agent, 10_100.0, 14_000.0)
    sampled(agent, 14_100.0, iteration=1, progress=11, since_ns=14_050 * MS)
    agent.feed(on.CoordinatorDisconnected())
    agent.feed(on.CoordinatorConnected())
    assert agent.said(WorkerContinued) and not agent.said(WorkerStalled)


def test_committed_iterations_go_out_with_the_heartbeat() -> None:
    agent = learned()
    sums = (
        on.IterationSums(1, 4_000 * MS, 40, (0, 0, 10 * MS, 0)),
        on.IterationSums(2, 4_400 * MS, 44, (0, 0, 13 * MS, 0)),
        on.IterationSums(4, 5_200 * MS, 52, (0, 0, 17 * MS, 0)),
    )
    sampled(agent, 10_200.0, iteration=4, progress=60, iterations=sums)
    (pace,) = agent.beat().paces
    assert (pace.worker, pace.rank) == (W, 0)
    assert [(s.iteration, s.compute_ms, s.waits_ms[2]) for s in pace.samples] == [(2, 100.0, 3.0), (4, 100.0, 2.0)]
    assert agent.beat().paces == (), "each is told once"


@pytest.mark.parametrize("answered", [False, True])
def test_the_first_iteration_that_is_over_is_told_at_once(answered: bool) -> None:
    """Else the coordinator hears of it half a second later, and takes everybody to be on the way to the first meeting
    until then: whoever failed meanwhile made all others compute again."""
    agent = Agent()
    agent.live((W, 0, 0, False))
    agent.feed(on.BeatsAnswered(answered))
    agent.beat()
    told = []
    for number, iteration in enumerate((0, 0, 1, 1, 2)):
        sampled(agent, 1_000.0 + 20.0 * number, iteration=iteration, progress=number)
        told.append([beat.workers[0].iteration for beat in agent.said(AgentHeartbeat)])
    assert told == [[], [], [1], [], []]


def test_a_script_that_has_finished_its_training_must_leave_only_when_its_interpreter_ends() -> None:
    """An export behind the `with` block was killed after half a minute."""
    agent = learned()
    agent.say(W, Finished(W, 0, tail=True))
    sampled(agent, 10_100.0, iteration=2, progress=11, stage=Stage.EVALUATE)
    sampled(agent, 90_000.0, iteration=2, progress=11, stage=Stage.EVALUATE)
    assert f"exit/{W}" not in agent.machine.state.timers
    assert agent.beat().workers[0].stage is Stage.EVALUATE
    sampled(agent, 90_100.0, iteration=2, progress=12, stage=Stage.DONE)
    assert f"exit/{W}" in agent.machine.state.timers
