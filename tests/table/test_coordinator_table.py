"""Every phase of a task and of a node against every kind of event: taken, or refused by the name the table says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from machines import TASK, Coordinator, running
from unicron.coordinator import events as on
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.transitions import (
    NODE_POLICY,
    NODE_TRANSITIONS,
    TASK_FACTS,
    TASK_POLICY,
    TASK_TRANSITIONS,
    WORKER_TRANSITIONS,
    NodePhase,
    TaskPhase,
    UnknownTransition,
    WorkerPhase,
    next_node_phase,
    next_task_phase,
    next_worker_phase,
)
from unicron.messages import ExceptionRaised, FromWorker, LayoutReady, MoveReady
from unicron.types import Layout, Stage


def starting() -> Coordinator:
    driver = Coordinator()
    driver.hello("n0")
    driver.hello("n1")
    driver.submit(Layout(tp=2, dp=2, num_micro_batches=4))
    driver.up("n0.w0")
    return driver


def recovering() -> Coordinator:
    driver = running()
    driver.lost("n0.w2")  # the understudy first, so that nobody is there for the role
    driver.lost("n0.w0")
    return driver


def healing() -> Coordinator:
    driver = running()
    driver.lost("n0.w0")
    return driver


def waiting() -> Coordinator:
    driver = running()
    driver.saved("n0.w0", 3)  # there is something to go back to: it may wait for nodes
    for node in ("n0", "n1"):
        driver.disconnected(node)
        driver.probed(node, "gone")
    driver.hello("n1", 2, slots=1)  # too small for a replica
    return driver


def held() -> Coordinator:
    driver = waiting()
    driver.feed(on.SuspendRequested("s", TASK))
    return driver


def finishing() -> Coordinator:
    driver = running()
    for name in ("n0.w0", "n0.w1", "n1.w0", "n1.w1"):
        driver.finished(name)
    return driver


def stopping() -> Coordinator:
    driver = running()
    driver.feed(on.CancelRequested("c", TASK))
    return driver


def done() -> Coordinator:
    driver = finishing()
    for name in list(driver.task.workers):
        driver.exited(name)
    return driver


def stopped() -> Coordinator:
    driver = stopping()
    for name in list(driver.task.workers):
        driver.lost(name, "ended: cancelled")
    return driver


PHASES: dict[TaskPhase, Callable[[], Coordinator]] = {
    TaskPhase.STARTING: starting,
    TaskPhase.RUNNING: running,
    TaskPhase.RECOVERING: recovering,
    TaskPhase.HEALING: healing,
    TaskPhase.WAITING: waiting,
    TaskPhase.SUSPENDED: held,
    TaskPhase.FINISHING: finishing,
    TaskPhase.STOPPING: stopping,
    TaskPhase.DONE: done,
    TaskPhase.STOPPED: stopped,
}


def say_exception(driver: Coordinator, name: str) -> None:
    body = ExceptionRaised(name, 1, driver.task.epoch, 5, 1, Stage.COMPUTE, "E", "E: bad", "train.py:7", 1)
    driver.feed(on.AgentMessage("n1", FromWorker("n1", TASK, body, 2)))


FACTS: dict[str, Callable[[Coordinator, str], None]] = {
    "worker_up": lambda d, n: d.up(n),
    "worker_gone": lambda d, n: d.lost(n, "signal 9"),
    "worker_stopped": lambda d, n: d.stopped(n),
    "worker_stalled": lambda d, n: d.stalled(n, waiting=True),
    "collective_failed": lambda d, n: d.failed(n, inside=False),
    "exception_raised": say_exception,
    "state_lost": lambda d, n: d.state_lost(n),
    "healed": lambda d, n: d.healed(n),
    "saved": lambda d, n: d.saved(n, 4),
    "layout_ready": lambda d, n: d.says(LayoutReady(n, 0, 1, 4)),
    "move_ready": lambda d, n: d.says(MoveReady(n, 0, 1, "prepared")),
    "finished": lambda d, n: d.finished(n),
    "cancel": lambda d, n: d.feed(on.CancelRequested("c", TASK)) and None,
    "suspend": lambda d, n: d.feed(on.SuspendRequested("s", TASK)) and None,
    "resume": lambda d, n: d.feed(on.ResumeRequested("s", TASK)) and None,
    "inject": lambda d, n: d.feed(on.FaultRequested("f", TASK, 1, "kill", "compute")) and None,
}


def test_tables_are_complete() -> None:
    assert set(TASK_POLICY) == set(TaskPhase)
    assert all(set(row) == set(TASK_FACTS) for row in TASK_POLICY.values())
    assert set(NODE_POLICY) == set(NodePhase)
    assert set(PHASES) == set(TaskPhase)
    assert set(FACTS) == set(TASK_FACTS)


@pytest.mark.parametrize("phase", list(TaskPhase), ids=lambda p: p.value)
def test_scenario_reaches_phase(phase: TaskPhase) -> None:
    assert PHASES[phase]().task.phase is phase


@pytest.mark.parametrize(("phase", "fact"), list(product(TaskPhase, TASK_FACTS)), ids=str)
def test_fact_in_phase(phase: TaskPhase, fact: str) -> None:
    driver = PHASES[phase]()
    live = [n for n in driver.task.workers if n.startswith("n1")]
    FACTS[fact](driver, live[0] if live else "n1.w0")
    refusal = TASK_POLICY[phase][fact]
    if refusal:
        assert refusal in driver.refusals()
        assert driver.task.phase is phase
    driver.machine.invariants()


@pytest.mark.parametrize("phase", list(NodePhase), ids=lambda p: p.value)
def test_messages_of_a_node_in_phase(phase: NodePhase) -> None:
    driver = running()
    if phase is NodePhase.AWAITED:
        driver.restart()
    elif phase is NodePhase.SUSPECT:
        driver.disconnected("n1")
    elif phase is NodePhase.LOST:
        driver.disconnected("n1")
        driver.probed("n1", "gone")
    assert driver.machine.state.nodes["n1"].phase is phase
    driver.beat("n1")
    refusal = NODE_POLICY[phase]
    assert (refusal in driver.refusals()) == bool(refusal)
    for answer in ("alive", "unknown", "gone"):
        driver.probed("n1", answer)  # type: ignore[arg-type]
        driver.machine.invariants()
    driver.hello("n1", 2)
    assert driver.machine.state.nodes["n1"].phase is NodePhase.UP


@pytest.mark.parametrize(
    ("table", "step", "phases"),
    [
        (NODE_TRANSITIONS, next_node_phase, NodePhase),
        (WORKER_TRANSITIONS, next_worker_phase, WorkerPhase),
        (TASK_TRANSITIONS, next_task_phase, TaskPhase),
    ],
    ids=["node", "worker", "task"],
)
def test_every_pair_is_known_or_an_error(table, step, phases) -> None:  # type: ignore[no-untyped-def]
    triggers = {trigger for _, trigger in table}
    for phase, trigger in product(phases, triggers):
        if (phase, trigger) in table:
            assert step(phase, trigger) is table[(phase, trigger)]
        else:
            with pytest.raises(UnknownTransition):
                step(phase, trigger)


def test_every_phase_can_be_reached_and_left() -> None:
    into = set(TASK_TRANSITIONS.values())
    assert into == set(TaskPhase)
    assert {phase for phase, _ in TASK_TRANSITIONS} == set(TaskPhase) - {TaskPhase.DONE, TaskPhase.STOPPED}


def test_unknown_and_stale_are_refused_by_name() -> None:
    driver = running()
    driver.feed(on.TimerFired("heal/nobody"))
    assert driver.refusals() == ["stale_timer"]
    driver.feed(on.AgentDisconnected("n9"))
    assert driver.refusals() == ["unknown_node"]
    driver.hello("n1", 0)
    assert driver.refusals() == ["stale_incarnation"]
    driver.lost("n7.w7")
    assert driver.refusals() == ["no_hello"]
    driver.lost("n1.w77")
    assert driver.refusals() == ["unknown_worker"]
    driver.failed("n1.w0", inside=False, epoch=9)
    assert driver.refusals() == ["epoch_unknown"]


def test_misuse_by_the_host_is_an_error() -> None:
    driver = running()
    with pytest.raises(AssertionError, match="Started twice"):
        driver.feed(on.Started())
    with pytest.raises(AssertionError, match="unknown event"):
        driver.feed("hello")  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="time went back"):
        driver.feed(on.AgentDisconnected("n0"), after_ms=-100.0)


@pytest.mark.parametrize("clock", ["", "mine", "another"])
def test_detection_includes_the_messages_way_only_on_one_clock(clock: str) -> None:
    driver = running(clock=clock, config=CoordinatorConfig(clock="mine"))
    driver.lost("n1.w1")  # by its agent's clock: 1 ms, seen 0.5 ms later
    (incident,) = driver.machine.state.incidents.values()
    assert incident.detect_ms == (driver.now_ms - 1.0 if clock == "mine" else 0.5)
