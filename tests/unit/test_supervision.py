"""Ends with growing force, kills that do not help, deaths by the kernel's hand, and processes held on purpose."""

from __future__ import annotations

import pytest

from machines import TASK, Agent, Coordinator, pulse, running
from unicron.agent import events as on
from unicron.agent.actions import SIGKILL, SIGTERM, InspectWorker, KillWorker
from unicron.messages import (
    ChildStatus,
    EndWorker,
    StopTask,
    WorkerContinued,
    WorkerLost,
    WorkerStalled,
    WorkerStopped,
    WorkerUnkillable,
)
from unicron.types import Layout, Outcome, Severity

W = "n0.w0"
MS = 1_000_000


def living(grace_ms: int = 0) -> Agent:
    agent = Agent()
    agent.stop_grace_ms = grace_ms
    agent.live((W, 0, 0, False))
    return agent


def signals(agent: Agent) -> list[int]:
    return [action.signal for action in agent.of(KillWorker)]


# ---------------------------------------------------------------- growing force


def test_a_stopped_task_is_asked_first_and_killed_after_its_grace() -> None:
    agent = living(grace_ms=3_000)
    agent.order(StopTask(TASK, "cancelled"))
    assert signals(agent) == [SIGTERM]
    assert agent.machine.state.timers[f"kill/{W}"] == agent.now_ms + 3_000
    agent.fire(f"kill/{W}")
    assert signals(agent) == [SIGKILL]


def test_a_verdict_asks_nobody() -> None:
    agent = living(grace_ms=3_000)
    agent.order(EndWorker(TASK, W, "stalled"))
    assert signals(agent) == [SIGKILL]


def test_who_is_stopped_cannot_be_asked() -> None:
    agent = living(grace_ms=3_000)
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "stopped", 19), 1, pulse()))
    agent.order(StopTask(TASK, "cancelled"))
    assert signals(agent) == [SIGKILL]


def test_a_process_that_no_kill_ends_is_told_of() -> None:
    agent = living()
    agent.order(EndWorker(TASK, W, "stalled"))
    for _ in range(agent.config.kills_max - 1):
        assert not agent.of(InspectWorker)
        agent.fire(f"kill/{W}")
    assert agent.of(InspectWorker)
    agent.feed(on.WorkerInspected(W, "D", ""))
    (stuck,) = agent.said(WorkerUnkillable)
    assert "was killed 5 times and is still there, in uninterruptible sleep" in stuck.text
    agent.feed(on.WorkerInspected(W, "Z", ""))
    assert not agent.said(WorkerUnkillable), "it died meanwhile"


def test_a_frozen_process_is_no_fault_of_its_node() -> None:
    agent = living()
    agent.order(EndWorker(TASK, W, "cancelled"))
    for _ in range(agent.config.kills_max - 1):
        agent.fire(f"kill/{W}")
    agent.feed(on.WorkerInspected(W, "D", "its control group /x is frozen"))
    assert not agent.said(WorkerUnkillable)
    (held,) = agent.said(WorkerStopped)
    assert held.traced and "/x is frozen, and no kill ends it" in held.held
    for _ in range(agent.config.kills_max):
        agent.fire(f"kill/{W}")
    assert agent.of(InspectWorker), "it is looked at again"


def test_the_node_is_to_blame_and_the_role_is_filled() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1)
    plan = driver.task.plan
    assert plan is not None
    name, node = plan.members[1].worker, plan.members[1].node
    driver.stopped(name)
    driver.fire(f"stop/{name}")
    driver.feed_fact(node, WorkerUnkillable(node, TASK, name, 1, "process 9 is still there"))
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.severity, incident.node) == (Severity.SEV1, node)
    assert driver.machine.state.node_faults == {node: 1}
    assert driver.task.plan is not None and driver.task.plan.epoch == 2, "an understudy took the role"


# ---------------------------------------------------------------- who killed it


@pytest.mark.parametrize(("oom", "cause"), [
    (True, "out of memory (signal 9)"), (False, "signal 9"), (None, "signal 9"),
])  # fmt: skip
def test_the_kernels_kill_is_told_from_anothers(oom: bool | None, cause: str) -> None:
    agent = living()
    agent.feed(on.MutexReleased(W, 2 * MS, pulse()))
    agent.feed(on.ChildStatusSeen(ChildStatus(W, 50, "signaled", 9), 3 * MS, None, "", oom, "memory.events says so"))
    (lost,) = agent.said(WorkerLost)
    assert (lost.cause, lost.text) == (cause, "memory.events says so")


def test_who_announced_its_death_and_does_not_end_is_ended() -> None:
    """A core file takes as long as it takes: nothing of its process lives on beside the heir."""
    agent = living()
    agent.feed(on.MutexReleased(W, 2 * MS, pulse()))
    assert agent.said(WorkerLost) and not agent.of(KillWorker)
    agent.fire(f"status/{W}")
    assert [(kill.worker, kill.pid) for kill in agent.of(KillWorker)] == [(W, 50)]


# ---------------------------------------------------------------- held on purpose

DEBUGGER = "a debugger (pid 9) is attached"


def test_who_is_held_does_not_stand_still() -> None:
    agent = living()
    intervals = tuple((2, number, 100.0) for number in range(5))
    agent.feed(on.PulsesSampled(0, ((W, pulse(progress=1, intervals=intervals)),)))
    for second in range(1, 60):
        agent.feed(on.PulsesSampled(second * 1000 * MS, ((W, pulse(progress=1, held=DEBUGGER)),)))
        assert not agent.said(WorkerStalled)
        assert bool(agent.said(WorkerStopped)) == (second == 1), "once"
    agent.feed(on.PulsesSampled(61_000 * MS, ((W, pulse(progress=1)),)))
    assert agent.said(WorkerContinued)
    agent.feed(on.PulsesSampled(62_000 * MS, ((W, pulse(progress=1)),)))
    assert not agent.said(WorkerStalled), "its clock begins when it is released"


def test_a_held_worker_is_left_alone_and_this_is_said() -> None:
    driver: Coordinator = running(Layout(dp=2, num_micro_batches=4), nodes=2, slots=1, stopped_grace_ms=0)
    plan = driver.task.plan
    assert plan is not None
    name = plan.members[1].worker
    for _ in range(2):
        driver.stopped(name, traced=True, held=DEBUGGER)
        assert not driver.sent(EndWorker)
    (incident,) = driver.machine.state.incidents.values()
    assert (incident.fault, incident.severity, incident.outcome) == ("held", Severity.INFO, Outcome.UNAFFECTED)
    assert DEBUGGER in incident.cause
    driver.continued(name)
    (incident,) = driver.machine.state.incidents.values()
    assert incident.timeline[-1][1] == f"{name} runs again"
