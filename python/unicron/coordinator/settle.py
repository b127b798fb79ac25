"""Settle: compare a task's facts with its aim and take the next step. Called for every task whose facts changed."""

from __future__ import annotations

from unicron.coordinator.accounting import settle_health
from unicron.coordinator.accounts import close_healing, settle_leaving
from unicron.coordinator.growth import settle_width
from unicron.coordinator.lifecycle import ALL_EXITED, finish_task, settle_exits, stop_task
from unicron.coordinator.moves import settle_move
from unicron.coordinator.nodes import judge
from unicron.coordinator.recovery import settle_recovery
from unicron.coordinator.reshaping import settle_change, settle_guests
from unicron.coordinator.standbys import settle_standbys
from unicron.coordinator.starting import (
    close_started,
    end_left_out,
    restart_all,
    settle_restarting,
    settle_starting,
    settle_waiting,
    wait_for_slots,
)
from unicron.coordinator.state import TaskState
from unicron.coordinator.steering import settle_allocation, touch_all, why
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TERMINAL, NodePhase, TaskPhase

ROUNDS_MAX = 64  # a task that touches itself more often in one step is a bug


def settle_all(step: Step) -> None:
    """Wounded tasks first: their survivors wait, and need no word of the planner. Finished ones, too: whoever is over
    wants no slots. Then what the cluster shall look like, then the other tasks; and again, when one's step changed what
    is there."""
    rounds = 0
    while True:
        name = next((name for name in step.touched if _comes_first(step.state.tasks[name])), "")
        if not name:
            settle_allocation(step)
            if step.has_freed:
                step.has_freed = False
                touch_all(step)
            name = next(iter(step.touched), "")
        if not name:
            break
        del step.touched[name]
        rounds += 1
        assert rounds <= ROUNDS_MAX * max(len(step.state.tasks), 1), f"{name} does not settle"
        _settle(step, step.state.tasks[name])


def _comes_first(task: TaskState) -> bool:
    return bool(task.lost or task.finished)


def _settle(step: Step, task: TaskState) -> None:
    for node in list(step.state.nodes.values()):
        if node.phase is NodePhase.SUSPECT and task.reports:
            judge(step, node)
    if task.phase in TERMINAL:
        return
    if task.is_over:
        settle_health(step, task)
        settle_exits(step, task)
    elif task.restarts > task.job.restart_max:
        last = max(
            (i for i in step.state.incidents.values() if i.task == task.name),
            key=lambda i: i.opened_ms,
            default=None,
        )
        cause = f"; the last: {last.cause or last.fault}" if last else ""
        stop_task(step, task, f"restart.max = {task.job.restart_max} is used up{cause}")
    elif task.is_restarting:
        settle_restarting(step, task)
    elif task.phase in (TaskPhase.WAITING, TaskPhase.SUSPENDED):
        settle_waiting(step, task)
    elif _all_finished(task):
        finish_task(step, task, ALL_EXITED)
    elif task.phase is TaskPhase.STARTING:
        settle_starting(step, task)
    elif not task.job.managed:
        _settle_unmanaged(step, task)
    else:
        _settle_managed(step, task)


def _all_finished(task: TaskState) -> bool:
    return task.plan is None and bool(task.placement) and task.finished >= set(task.placement)


def _settle_unmanaged(step: Step, task: TaskState) -> None:
    """A plain torchrun script: the death of any worker ends and restarts them all, and so does another allocation."""
    if step.state.target(task.name) != task.placement:
        wait_for_slots(step, task, why(step, task))
        return
    live = {w.rank for w in task.workers.values()}
    if not live | task.finished >= set(task.placement):
        restart_all(step, task, "a worker of an unmanaged script is lost")


def _settle_managed(step: Step, task: TaskState) -> None:
    settle_recovery(step, task)
    if task.is_over or task.is_restarting:
        return
    if task.phase is TaskPhase.HEALING and not task.awaiting and not task.lost:
        close_healing(step, task, f"every member of epoch {task.epoch} committed the iteration")
    if task.phase is TaskPhase.RUNNING:
        close_started(step, task)
    if settle_leaving(step, task):
        return
    end_left_out(step, task)
    settle_guests(step, task)
    settle_change(step, task)
    settle_move(step, task)
    settle_standbys(step, task)
    settle_width(step, task)
    settle_health(step, task)
