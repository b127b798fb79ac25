"""What is told and left alone.

A thread: an exception ended a thread beside the loop's. The process lives on, and may soon wait for that thread.

Held: a debugger or a frozen control group explains why a worker stands still.

Observe only: what would have been ended for standing still is told, and left alone (job field observe_only).

A detector that is new to a task is first watched. The incident is INFO, for it changed nothing; what really died is
healed as ever.
"""

from __future__ import annotations

import msgspec

from unicron.coordinator.classifying import classify_soon
from unicron.coordinator.incident import Incident
from unicron.coordinator.state import TaskState, WorkerState
from unicron.coordinator.step import Step
from unicron.messages import ExceptionRaised
from unicron.types import Method, Outcome, Severity

MARK = "observed only"


def observe(step: Step, worker: WorkerState, incident: Incident) -> None:
    """Once until the worker goes on."""
    if worker.observed:
        return
    worker.observed = True
    reason = f"{MARK}: {worker.name} would have been ended: {incident.cause}"
    told = msgspec.structs.replace(
        incident, severity=Severity.INFO, cause=reason, outcome=Outcome.UNAFFECTED, is_only_told=True,
        worker=worker.name, incarnation=worker.incarnation,
    )  # fmt: skip
    step.open_incident(told, reason)


def note_going_on(step: Step, task: TaskState, worker: WorkerState) -> None:
    """Ending it would have been wrong."""
    for incident in reversed(step.state.incidents.values()):
        is_about = incident.task == task.name and incident.worker == worker.name
        if is_about and incident.is_only_told and incident.cause.startswith(MARK):
            step.change_incident(incident, f"{worker.name} went on by itself")
            return


def tell_held(step: Step, task: TaskState, worker: WorkerState, why: str) -> None:
    """Once, until it is released."""
    if worker.held:
        return
    cause = f"rank {worker.rank} stands still because {why}; it is left alone"
    incident = Incident(
        id="", task=task.name, fault="held", severity=Severity.INFO, node=worker.node, rank=worker.rank,
        method=Method.PROCESS, opened_ms=0.0, worker=worker.name, incarnation=worker.incarnation, cause=cause,
        iteration=worker.iteration, stage=worker.stage, outcome=Outcome.UNAFFECTED, is_only_told=True,
    )  # fmt: skip
    worker.held = step.open_incident(incident, cause).id


def note_released(step: Step, task: TaskState, worker: WorkerState) -> None:
    incident = step.state.incidents.get(worker.held)
    worker.held = ""
    if incident is not None and incident.task == task.name:
        step.change_incident(incident, f"{worker.name} runs again")


def tell_thread(step: Step, task: TaskState, worker: WorkerState, body: ExceptionRaised) -> None:
    """The first of each worker."""
    if worker.thread_exception is not None:
        step.refuse("duplicate", f"{worker.name} already lost thread {worker.thread_exception.thread}")
        return
    worker.thread_exception = body
    cause = f"{body.type} ended thread {body.thread} of rank {worker.rank}; its process lives on"
    incident = Incident(
        id="", task=task.name, fault="thread", severity=Severity.INFO, node=worker.node, rank=worker.rank,
        method=Method.EXCEPTION, opened_ms=0.0, worker=worker.name, incarnation=worker.incarnation, cause=cause,
        text=body.text, where=body.where, iteration=body.iteration, micro_batch=body.micro_batch, stage=body.stage,
        outcome=Outcome.UNAFFECTED, is_only_told=True,
    )  # fmt: skip
    classify_soon(step, step.open_incident(incident, cause))
