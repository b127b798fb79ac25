"""A script that cannot be built stops at the second start; nothing is healed before all are up; what is not known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from machines import TASK, Coordinator, running
from unicron.coordinator.journal import JOURNAL_VERSION, TaskEnded, decode_entry
from unicron.coordinator.unready import message_of
from unicron.messages import ExceptionRaised, WorkerLost
from unicron.runtime.views import incident_view
from unicron.types import Layout, Outcome, Severity, Stage

WORDS = (
    'Traceback (most recent call last):\n  File "t.py", line 4, in build\n    assert wide\nAssertionError: hidden 65'
)


def _starting(**fields: Any) -> Coordinator:
    driver = Coordinator()
    for node in ("n0", "n1"):
        driver.hello(node, slots=1)
    driver.submit(Layout(dp=2, num_micro_batches=4), **fields)
    return driver


def _join_all(driver: Coordinator) -> None:
    for name in list(driver.task.workers):
        driver.up(name, ready=False)


def _dies(driver: Coordinator, name: str, text: str = WORDS) -> None:
    driver.says(
        ExceptionRaised(name, driver.rank_of(name), 0, 0, -1, Stage.STARTING, "AssertionError", text, "t.py:4", 1)
    )
    driver.lost(name, cause="exit code 1", iteration=0, micro_batch=-1)


def _incidents(driver: Coordinator) -> list[Any]:
    return list(driver.machine.state.incidents.values())


def _workers(driver: Coordinator, rank: int) -> list[str]:
    return [w.name for w in driver.task.workers.values() if w.rank == rank]


def test_the_second_identical_exception_before_anybody_was_ready_stops_the_task() -> None:
    driver = _starting(understudies=0)
    _dies(driver, "n0.w0")
    assert not driver.task.is_over
    (again,) = _workers(driver, 0)
    _dies(driver, again)
    assert driver.task.outcome == "stopped"
    reason = "rank 0 raised AssertionError before it was ready, twice at the same place: the script is wrong"
    assert driver.task.cause.startswith(f"{reason}: AssertionError: hidden 65 at t.py:4; log: ")
    (fatal,) = [i for i in _incidents(driver) if i.severity is Severity.FATAL]
    assert fatal.worker == again and all(i.node and i.outcome is Outcome.STOPPED for i in _incidents(driver))


def test_a_worker_without_a_role_counts_and_makes_no_incident_of_its_own() -> None:
    """Its members joined and a plan came out; then they die in their build, and so do all that shall take the roles."""
    driver = _starting()
    _join_all(driver)
    assert driver.task.plan is not None
    for name in ("n0.w0", "n0.w1", "n1.w0", "n1.w1"):
        _dies(driver, name)
    assert not driver.task.is_over and len(_incidents(driver)) == 2
    _dies(driver, _workers(driver, 1)[0])
    assert "rank 1 raised AssertionError before it was ready, twice" in driver.task.cause
    assert [i.severity for i in _incidents(driver)] == [Severity.SEV2, Severity.FATAL]
    assert "and held no role" in " ".join(text for i in _incidents(driver) for _, text in i.timeline)


def test_those_that_started_together_are_one_moment() -> None:
    driver = _starting()
    _dies(driver, "n0.w0")
    _dies(driver, "n0.w1")  # an understudy that guessed rank 0, too
    assert not driver.task.is_over


def test_other_words_are_another_failure_and_a_worker_that_was_ready_shows_that_the_script_is_right() -> None:
    driver = _starting()
    _join_all(driver)
    _dies(driver, "n0.w0")
    _dies(driver, "n0.w1")
    _dies(driver, next(w for w in _workers(driver, 0)), WORDS + " and more")
    assert not driver.task.is_over
    driver.up("n1.w0")
    _dies(driver, next(w for w in _workers(driver, 0)), WORDS + " and more")
    assert not driver.task.is_over


def test_nothing_is_healed_before_every_member_has_built_its_script() -> None:
    driver = _starting(understudies=0)
    driver.lost("n0.w0", cause="signal 9", iteration=0, micro_batch=-1)
    _join_all(driver)
    assert driver.task.plan is not None and _incidents(driver)[0].is_open
    ready = list(driver.task.workers)
    driver.up(ready[0])
    assert _incidents(driver)[0].is_open
    driver.up(ready[1])
    assert _incidents(driver)[0].outcome is Outcome.HEALED


def test_of_a_traceback_the_exceptions_own_lines_are_said() -> None:
    assert message_of(WORDS) == "AssertionError: hidden 65" and message_of("ValueError: bad") == "ValueError: bad"
    assert message_of("") == ""


def test_what_a_plain_scripts_restart_cost_is_not_known() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), nodes=1, managed=False)
    driver.lost("n0.w0", cause="exit code 3")
    driver.lost("n0.w1", cause="signal 9")
    driver.all_up()
    (incident,) = _incidents(driver)
    view = incident_view(incident, driver.machine.state, driver.now_ms)
    assert view["outcome"] == "healed" and view["lost_ms"] is None and view["iterations_lost"] is None
    assert "they train on when the script has loaded its own checkpoint" in view["timeline"][-1][1]


def test_the_cost_of_what_is_only_told_is_not_known_and_that_of_a_healing_is() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1)
    driver.lost("n0.w1", cause="signal 9")  # an understudy
    driver.lost("n1.w0", cause="signal 9")
    driver.all_healed()
    told, healed = (incident_view(i, driver.machine.state, driver.now_ms) for i in _incidents(driver))
    assert told["lost_ms"] is None and healed["lost_ms"] == 200.0 and healed["iterations_lost"] == 0


@pytest.mark.parametrize(("interrupted_ms", "lost_ms"), [((300.0, 0.0), 200.0), ((90.0, 0.0), 0.0), ((0.0, 0.0), None)])
def test_an_iteration_that_was_over_before_its_fault_cost_nothing(
    interrupted_ms: tuple[float, float], lost_ms: float | None
) -> None:
    """The second of them is an heir's: it has committed nothing before, and knows no usual iteration."""
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1)
    driver.lost("n1.w0", cause="signal 9")
    assert driver.task.plan is not None
    for member, took, usual in zip(driver.task.plan.members, interrupted_ms, (100.0, 0.0), strict=True):
        driver.healed(member.worker, times_ms=(took, usual))
    (incident,) = _incidents(driver)
    assert incident.lost_ms == lost_ms
    assert incident_view(incident, driver.machine.state, driver.now_ms)["lost_ms"] == lost_ms


def test_a_kill_of_which_the_kernel_is_cleared_was_one_by_hand() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1)
    for name, text in (("n1.w0", "said before\nmemory: the kernel killed nothing for memory"), ("n0.w0", "")):
        worker = driver.worker(name)
        lost = WorkerLost(
            worker.node, TASK, name, worker.incarnation, worker.rank, "process", "signal 9", text, Stage.COMPUTE, 5, 1,
            0, 1, "",
        )  # fmt: skip
        driver.feed_fact(worker.node, lost)
    driver.fire("classify/i1")
    driver.fire("classify/i2")
    cleared, unknown = (incident_view(i, driver.machine.state, driver.now_ms) for i in _incidents(driver))
    assert cleared["meaning"] == "killed by hand (SIGKILL)" and "for memory, or by hand" in unknown["meaning"]
    assert (cleared["text"], cleared["memory"]) == ("said before", "the kernel killed nothing for memory")
    assert (unknown["text"], unknown["memory"]) == ("", "")


def test_the_last_iteration_of_a_task_that_is_over_outlives_the_coordinator() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1)
    for name in ("n0.w0", "n1.w0"):
        driver.worker(name).iteration = 200
        driver.up(name)
        driver.finished(name)
    assert driver.task.iteration == 200
    driver.restart()
    assert driver.task.iteration == 200 and driver.task.outcome == "done"


def test_what_is_heard_after_the_end_outlives_the_coordinator_too() -> None:
    from unicron.coordinator import events as on

    driver = running(Layout(dp=2, num_micro_batches=4), slots=1)
    driver.feed(on.CancelRequested("c", TASK))
    for name in list(driver.task.workers):
        driver.lost(name, cause="signal 15", iteration=921)
    driver.restart()
    assert driver.task.iteration == 921 and driver.task.outcome == "stopped"


def test_a_failure_after_the_start_is_not_closed_by_it() -> None:
    driver = running(Layout(dp=2, num_micro_batches=4), slots=1)
    driver.raised("n1.w0")
    assert _incidents(driver)[0].is_open


def test_journals_from_before_are_read() -> None:
    """An end without its iteration."""
    ended = msgspec.msgpack.encode({"entry": "TaskEnded", "task": TASK, "outcome": "done", "cause": "over"})
    assert decode_entry(bytes((JOURNAL_VERSION,)) + ended) == TaskEnded(TASK, "done", "over", -1)
