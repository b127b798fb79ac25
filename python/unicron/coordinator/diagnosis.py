"""What a symptom says: severity, signature, and who of many stalled ranks is the root. Pure functions of facts.

Silence is "unknown", never "gone"; the loudest echo is not the root; a kill needs positive evidence (DESIGN 8). The
same signature at the same (iteration, micro-batch) in a second incarnation of a rank is FATAL: the code or the data
is wrong, and no node is blamed. A plain SIGKILL says nothing about the code, so it never is a signature.
"""

from __future__ import annotations

from collections.abc import Iterable

from unicron.coordinator.incident import Incident
from unicron.coordinator.state import TaskState, WorkerState
from unicron.messages import CollectiveFailed, ExceptionRaised, WorkerLost
from unicron.types import Method, Rank, Stage


def signature_of(lost: WorkerLost, exception: ExceptionRaised | None) -> str:
    """What may not come back at the same place; '' when the cause says nothing about the code."""
    if exception is not None:
        return f"{exception.type} at {exception.where}"
    cause = lost.cause
    if lost.method == Method.EXCEPTION.value and cause:
        return f"{cause} at {lost.where}"  # its last words came after the news of its death
    if cause == "signal 9" or not cause:
        return ""
    if cause.startswith(("signal ", "exit code ")):
        return cause
    return ""


def exit_code_of(lost: WorkerLost) -> int | None:
    prefix = "exit code "
    text = lost.cause.removeprefix(prefix)
    return int(text) if lost.cause.startswith(prefix) and text.isdigit() else None


def repeated(incident: Incident, history: Iterable[Incident]) -> Incident | None:
    """The earlier incident that makes this one FATAL."""
    if not incident.signature or incident.rank < 0:
        return None
    for earlier in history:
        if (
            earlier.id != incident.id
            and earlier.task == incident.task
            and earlier.rank == incident.rank
            and earlier.worker != incident.worker
            and earlier.signature == incident.signature
            and earlier.iteration == incident.iteration
            and earlier.micro_batch == incident.micro_batch
        ):
            return earlier
    return None


def is_explained(task: TaskState, report: CollectiveFailed) -> bool:
    """Does a plan newer than the report account for it? Inside a replica only one that touched that replica does."""
    replica = task.job.layout.replica_of(report.rank)
    return any(epoch > report.epoch and (not report.inside or replica in wounded) for epoch, wounded in task.plans)


def stall_root(task: TaskState) -> WorkerState | None:
    """The member that all wait for: it does not wait itself, and another one waits (or its own excess is gross)."""
    stalled = [w for w in task.workers.values() if w.stalled and task.role_of(w.name) is not None]
    waiting = [w for w in stalled if w.stalled and w.stalled.waiting_in_collective]
    for worker in sorted(stalled, key=lambda w: w.rank):
        assert worker.stalled is not None
        if worker.stalled.waiting_in_collective:
            continue
        gross = worker.stalled.stalled_ms >= 2 * worker.stalled.budget_ms
        if any(other is not worker for other in waiting) or gross:
            return worker
    return None


def deaf_to_plan(task: TaskState) -> list[WorkerState]:
    """Members whose loop has not moved since a plan that shut every socket they could wait on.

    A loop inside a collective was freed by that, so whatever it claims to wait for, it is not others. (One that
    computes is deaf only when its own stage's statistics say that it stands still.)
    """
    plan = task.plan
    if plan is None:
        return []
    deaf = []
    for rank in plan.ranks:
        worker = task.holder(rank)
        freed = plan.layout.replica_size == 1 or plan.layout.replica_of(rank) in plan.wounded()
        if worker is None or not freed:
            continue
        if worker.stage in (Stage.COMPUTE, Stage.SAVE) and worker.stalled is None:
            continue
        if rank in task.awaiting and worker.progress == worker.progress_planned:
            deaf.append(worker)
    return deaf


def all_wait(task: TaskState) -> tuple[Rank, ...]:
    """Every member stalled inside a collective, nobody to wait for: the connections are at fault."""
    if task.plan is None:
        return ()
    for rank in task.plan.ranks:
        worker = task.holder(rank)
        if worker is None or worker.stalled is None or not worker.stalled.waiting_in_collective:
            return ()
    return task.plan.ranks
