"""Every phase of a worker's life against every fact its agent may learn: taken, or refused by the table's name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from machines import Agent, pulse
from unicron.agent import events as on
from unicron.agent.actions import KillWorker
from unicron.agent.transitions import FACTS, POLICY, TRANSITIONS, Phase, UnknownTransition, next_phase
from unicron.messages import (
    AgentWelcome,
    ArmFault,
    ChildStatus,
    EndWorker,
    ExceptionRaised,
    Finished,
    FinishUnderstudies,
    StopTask,
    WorkerExited,
    WorkerHello,
    WorkerLost,
)
from unicron.types import Stage

W = "n0.w0"


def ordered() -> Agent:
    agent = Agent()
    agent.feed(on.CoordinatorConnected())
    agent.start((W, 0, 0, False))
    return agent


def forked() -> Agent:
    agent = ordered()
    agent.feed(on.WorkerForked(W, 50))
    return agent


def joined() -> Agent:
    agent = forked()
    agent.join(W)
    return agent


def ready() -> Agent:
    agent = joined()
    agent.ready(W)
    return agent


def finished() -> Agent:
    agent = ready()
    agent.say(W, Finished(W, 0))
    return agent


def dying() -> Agent:
    agent = ready()
    agent.feed(on.MutexReleased(W, 9_000_000, pulse(fault_ns=8_500_000)))
    return agent


def gone() -> Agent:
    agent = dying()
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "signaled", 9), 9, pulse()))
    return agent


PHASES: dict[Phase, Callable[[], Agent]] = {
    Phase.ORDERED: ordered,
    Phase.FORKED: forked,
    Phase.JOINED: joined,
    Phase.READY: ready,
    Phase.FINISHED: finished,
    Phase.DYING: dying,
    Phase.GONE: gone,
}

EVENTS: dict[str, on.Event] = {
    "forked": on.WorkerForked(W, 50),
    "fork_failed": on.ForkFailed(W, "no memory"),
    "joined": on.WorkerJoined(WorkerHello("t", W, 0, 50), 50),
    "said": on.WorkerMessage(W, Finished(W, 0), 1),
    "disconnected": on.WorkerDisconnected(W),
    "released": on.MutexReleased(W, 9_000_000, pulse()),
    "status": on.ChildStatusSeen(ChildStatus(W, 50, "exited", 3), 9, pulse()),
}


def test_tables_are_complete() -> None:
    assert set(POLICY) == set(PHASES) == set(Phase)
    assert all(set(row) == set(FACTS) == set(EVENTS) for row in POLICY.values())


@pytest.mark.parametrize(("phase", "fact"), list(product(Phase, FACTS)), ids=str)
def test_fact_in_phase(phase: Phase, fact: str) -> None:
    agent = PHASES[phase]()
    assert agent.machine.state.workers[W].phase is phase
    agent.feed(EVENTS[fact])
    refusal = POLICY[phase][fact]
    names = [a.name for a in agent.actions if hasattr(a, "name")]
    assert (refusal in names) if refusal else True
    if refusal:
        assert agent.machine.state.workers[W].phase is phase


@pytest.mark.parametrize("phase", list(Phase), ids=str)
@pytest.mark.parametrize(
    "message",
    [
        EndWorker("t", W, "evidence"),
        StopTask("t", "over"),
        FinishUnderstudies("t", "over"),
        ArmFault("t", 0, "kill", "now", -1),
        AgentWelcome(3),
    ],
    ids=lambda m: type(m).__name__,
)
def test_order_in_phase(phase: Phase, message: object) -> None:
    agent = PHASES[phase]()
    agent.order(message)
    agent.machine.invariants()


def test_every_pair_is_known_or_an_error() -> None:
    for phase, trigger in product(Phase, {t for _, t in TRANSITIONS}):
        if (phase, trigger) in TRANSITIONS:
            next_phase(phase, trigger)
        else:
            with pytest.raises(UnknownTransition):
                next_phase(phase, trigger)


def test_death_is_told_twice_first_at_once_then_with_its_cause() -> None:
    agent = dying()
    (lost,) = agent.said(WorkerLost)
    assert (lost.cause, lost.stage, lost.iteration, lost.micro_batch) == ("", Stage.COMPUTE, 5, 1)
    assert lost.seen_ns - lost.fault_ns == 500_000
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "signaled", 11), 70_000_000, pulse()))
    (again,) = agent.said(WorkerLost)
    assert again.cause == "signal 11"
    assert again.seen_ns == lost.seen_ns


def test_last_words_read_after_the_mutex_become_the_cause() -> None:
    agent = dying()
    words = ExceptionRaised(W, 0, 1, 5, 1, Stage.COMPUTE, "ValueError", "bad", "train.py:3", 1)
    agent.say(W, words)
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "exited", 1), 9, pulse()))
    (lost,) = agent.said(WorkerLost)
    assert (lost.method, lost.cause, lost.where) == ("exception", "ValueError", "train.py:3")


def test_finished_worker_that_exits_is_no_loss() -> None:
    agent = finished()
    agent.feed(on.MutexReleased(W, 9, pulse(stage=Stage.DONE)))
    assert not agent.said(WorkerLost)
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "exited", 0), 9, pulse()))
    assert [m.code for m in agent.said(WorkerExited)] == [0]


def test_exit_code_of_unmanaged_workers() -> None:
    agent = Agent()
    agent.feed(on.CoordinatorConnected())
    agent.start((W, 0, 0, False), ("n0.w1", 1, 1, False), managed=False)
    for number, name in enumerate((W, "n0.w1")):
        agent.feed(on.WorkerForked(name, 50 + number))
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "exited", 0), 9, None))
    assert agent.said(WorkerExited)
    agent.feed(on.ChildStatusSeen(ChildStatus("n0.w1", 51, "exited", 7), 9, None))
    assert [m.cause for m in agent.said(WorkerLost)] == ["exit code 7"]


def test_order_to_end_is_carried_out_once_there_is_a_process() -> None:
    agent = ordered()
    agent.order(EndWorker("t", W, "not needed"))
    assert not agent.of(KillWorker)
    agent.feed(on.WorkerForked(W, 50))
    (kill,) = agent.of(KillWorker)
    assert (kill.pid, kill.reason) == (50, "not needed")
    agent.fire(f"kill/{W}")
    assert agent.of(KillWorker), "repeated until it is seen dead"


def test_process_that_comes_too_late_is_killed() -> None:
    agent = ordered()
    agent.fire(f"fork/{W}")
    assert agent.said(WorkerLost)
    agent.feed(on.WorkerForked(W, 50))
    assert agent.of(KillWorker)


def test_strangers_are_refused() -> None:
    agent = forked()
    for hello, peer in (
        (WorkerHello("t", "n0.w9", 0, 50), 50),
        (WorkerHello("t", W, 4, 50), 50),
        (WorkerHello("t", W, 0, 50), 51),
    ):
        agent.feed(on.WorkerJoined(hello, peer))
        assert next(a.name for a in agent.actions if hasattr(a, "name")) in (
            "unknown_worker", "stale_incarnation", "wrong_process"
        )  # fmt: skip


def test_end_of_an_unknown_worker_is_answered() -> None:
    agent = Agent()
    agent.feed(on.CoordinatorConnected())
    agent.order(EndWorker("t", "n0.w5", "evidence"))
    assert [m.cause for m in agent.said(WorkerLost)] == ["no such worker here"]
