"""Ends of a task: done, stopped, and the last exits, which are awaited with a bound."""

from __future__ import annotations

from unicron.coordinator.journal import TaskEnded
from unicron.coordinator.state import TaskState, node_order
from unicron.coordinator.step import Step
from unicron.messages import FinishUnderstudies, StopTask
from unicron.types import Outcome

#: How a task ends of which nothing more is to be said.
ALL_FINISHED, ALL_EXITED = "every member finished its last iteration", "every worker ended with exit code 0"
TASK_TIMERS = ("diagnose", "ready", "join", "joiner", "heal", "understudy", "leave", "layout", "move", "finish")


def stop_task(step: Step, task: TaskState, cause: str) -> None:
    """No recovery will help (or a person said so). The cause is what a person reads first."""
    if task.is_over and task.outcome == "stopped":
        return
    step.write(TaskEnded(task.name, "stopped", cause, task.iteration), cause)
    step.move_task(task, "stop")
    for node in _everywhere(step):
        tell_over(step, task, node)
    for incident in step.state.open_incidents(task.name):
        step.change_incident(incident, "the task is stopped", outcome=Outcome.STOPPED)
    _await_exits(step, task, cause)


def finish_task(step: Step, task: TaskState, reason: str) -> None:
    step.write(TaskEnded(task.name, "done", reason, task.iteration), reason)
    step.move_task(task, "done")
    for node in _everywhere(step):
        tell_over(step, task, node)
    for incident in step.state.open_incidents(task.name):
        step.change_incident(incident, "the task is done", outcome=Outcome.UNAFFECTED)
    _await_exits(step, task, reason)


def tell_over(step: Step, task: TaskState, node: str) -> None:
    """At its end, and later to a node that was away then and still has workers or a plan of it."""
    message = StopTask if task.outcome == "stopped" else FinishUnderstudies
    step.send(node, message(task.name, task.cause), task.cause)


def _everywhere(step: Step) -> list[str]:
    """Also nodes where nobody of the task lives any more: their agents still keep its arenas."""
    return sorted(step.state.nodes, key=node_order)


def _await_exits(step: Step, task: TaskState, reason: str) -> None:
    cancel_timers(step, task, reason)
    delay_ms = step.config.finish_ms_max + (task.job.stop_grace_ms if task.outcome == "stopped" else 0)
    step.set_timer("finish", task.name, delay_ms, "until the last worker is gone")
    step.touch(task)


def cancel_timers(step: Step, task: TaskState, reason: str) -> None:
    for kind in TASK_TIMERS:
        step.cancel_timer(kind, task.name, reason)


def settle_exits(step: Step, task: TaskState) -> None:
    """FINISHING or STOPPING: over when nobody is left."""
    if not task.workers:
        if task.iteration > task.iteration_ended:
            ended = TaskEnded(task.name, task.outcome, task.cause, task.iteration)
            step.write(ended, f"the last of it got to iteration {task.iteration}")
        cancel_timers(step, task, "no worker is left")
        step.move_task(task, "emptied")
