"""A task leaves its slots and loses nothing: told to save, it stops at the same iteration boundary everywhere.

A suspension by a person, a pre-emption, and a move to other nodes when no replica can stay. The members agree by their
commit on the iteration after which they save and hold (training/session.py); their last word is Saved(final) in the
present epoch. Until then nothing is given up: a failure meanwhile heals as ever, and they are told again. Rejected: an
iteration named by the coordinator; some rank may have passed it before it hears.
"""

from __future__ import annotations

from unicron.coordinator.demand import can_leave
from unicron.coordinator.journal import TaskHeld, TaskLeaves, TaskStays
from unicron.coordinator.plans import Decision, publish
from unicron.coordinator.starting import wait_for_slots
from unicron.coordinator.state import TaskState
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TaskPhase
from unicron.messages import SaveAndHold
from unicron.types import PlanKind


def leave(step: Step, task: TaskState, reason: str) -> None:
    """Give up all its slots as soon as its state is safe. Only in phases that hold slots."""
    if task.leaving:
        return
    if not task.job.managed or task.plan is None or task.phase is TaskPhase.STARTING:
        wait_for_slots(step, task, reason)  # nothing was committed since its checkpoint
        return
    if task.phase is not TaskPhase.RUNNING:
        return  # settled again when the recovery is over
    if not can_leave(task):
        return
    step.write(TaskLeaves(task.name, reason), reason)
    task.decided_ms = step.now_ms
    tell(step, task)
    step.set_timer("leave", task.name, step.config.leave_ms_max, "its checkpoint must become complete")


def tell(step: Step, task: TaskState, only: str = "") -> None:
    """Told again after whatever may have lost the first order: a new epoch, a node's return, our own restart."""
    for node in [only] if only else task.nodes():
        step.send(node, SaveAndHold(task.name, task.leaving), task.leaving)


def is_last_word(task: TaskState, epoch: int) -> bool:
    """Everybody saved and holds: nobody has trained on, because no newer epoch was decided."""
    return bool(task.leaving) and task.phase is TaskPhase.RUNNING and epoch == task.epoch and not task.lost


def on_leave_timeout(step: Step, task: TaskState) -> None:
    """It could not save: it stays, and whoever holds is freed by a new epoch."""
    seconds = step.config.leave_ms_max / 1000
    reason = f"no checkpoint became complete within {seconds:g} s: it keeps its slots"
    step.write(TaskStays(task.name, reason), reason)
    if task.is_held:
        step.write(TaskHeld(task.name, False, reason), reason)
    task.cause_to_stay = reason
    if task.phase is TaskPhase.RUNNING and task.plan is not None and not task.lost and not task.finished:
        members = {m.rank: m.worker for m in task.plan.members}
        publish(step, task, Decision(PlanKind.RECONNECT, members, (), (), reason))
    step.touch(task)
