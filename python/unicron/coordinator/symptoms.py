"""Symptoms: what members say about themselves and their collectives, and what agents see of stops and stalls."""

from __future__ import annotations

from typing import Any

import msgspec

from unicron.coordinator.classifying import classify_soon
from unicron.coordinator.diagnosis import is_explained
from unicron.coordinator.incident import Incident
from unicron.coordinator.lifecycle import stop_task
from unicron.coordinator.observing import note_going_on, note_released, observe, tell_held, tell_thread
from unicron.coordinator.starting import restart_all
from unicron.coordinator.state import TaskState, WorkerState
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import WorkerPhase
from unicron.coordinator.workers import detected_ms, end_worker, forget_worker, incident_of, is_member
from unicron.messages import (
    CollectiveFailed,
    ExceptionRaised,
    FromWorker,
    StateLost,
    WorkerContinued,
    WorkerStalled,
    WorkerStopped,
    WorkerUnkillable,
)
from unicron.types import Cpu, Method, Outcome, Severity


def speaker(step: Step, task: TaskState, name: str) -> WorkerState | None:
    worker = task.workers.get(name)
    if worker is None:
        step.refuse("unknown_worker", f"{name} is not a live worker of {task.name}")
    return worker


def member_speaks(step: Step, task: TaskState, body: Any) -> WorkerState | None:
    """The worker of a message that only a holder of the role may send, in the present epoch or an older one."""
    worker = speaker(step, task, body.worker)
    if worker is None:
        return None
    if task.role_of(worker.name) != body.rank:
        step.refuse("not_holder", f"{body.worker} does not hold rank {body.rank} of {task.name}")
        return None
    if body.epoch > task.epoch:
        step.refuse("epoch_unknown", f"{body.worker} speaks of epoch {body.epoch}, now {task.epoch}")
        return None
    return worker


def on_collective_failed(step: Step, task: TaskState, body: CollectiveFailed) -> None:
    """Wait a moment for the death that explains it; the diagnosis timer makes the report ripe."""
    if member_speaks(step, task, body) is None:
        return
    if is_explained(task, body):
        step.refuse("explained", f"epoch {task.epoch} accounts for rank {body.rank}'s report")
        return
    if not task.reports:
        task.report_ms = step.now_ms
    task.reports[body.rank] = body
    if body.late and step.state.open_incidents(task.name):
        task.reports_ripe = True  # it is explained: by what is being healed
    if not step.has_timer("diagnose", task.name) and not task.reports_ripe:
        step.set_timer("diagnose", task.name, step.config.diagnose_ms, "a death may explain it")
    step.touch(task)


def on_diagnose(step: Step, task: TaskState) -> None:
    task.reports_ripe = bool(task.reports)
    step.touch(task)


def on_exception(step: Step, task: TaskState, message: FromWorker) -> None:
    """Its last words: the process is about to unwind. If it does not leave soon, it is ended."""
    body = message.body
    assert isinstance(body, ExceptionRaised)
    worker = speaker(step, task, body.worker)
    if worker is None:
        return
    if body.thread:
        tell_thread(step, task, worker, body)
        step.touch(task)
        return
    if worker.exception is not None:
        step.refuse("duplicate", f"{worker.name} already raised {worker.exception.type}")
        return
    worker.exception = body
    if is_member(task, worker) and incident_of(step, task, worker.name) is None:
        opened = Incident(
            id="", task=task.name, fault="exception", severity=Severity.SEV2, node=worker.node,
            rank=worker.rank, method=Method.EXCEPTION, opened_ms=0.0, worker=worker.name,
            incarnation=worker.incarnation, text=body.text, where=body.where,
            iteration=body.iteration, micro_batch=body.micro_batch, stage=body.stage,
            detect_ms=detected_ms(step, worker.node, body.raised_ns, message.seen_ns),
        )  # fmt: skip
        classify_soon(step, step.open_incident(opened, f"rank {worker.rank} raised {body.type} at {body.where}"))
    delay_ms = step.config.exception_exit_ms
    step.set_timer("exception", worker.name, delay_ms, "its process must leave by itself")
    step.touch(task)


def on_state_lost(step: Step, task: TaskState, body: StateLost) -> None:
    """The survivors found no clean copy of a shard: back to a checkpoint, or stop with the cause."""
    if member_speaks(step, task, body) is None:
        return
    if body.epoch < task.epoch:
        step.refuse("stale_epoch", f"state lost in epoch {body.epoch}, now {task.epoch}")
        return
    if task.state_lost:
        step.refuse("duplicate", f"known: {task.state_lost}")
        return
    cause = f"no live copy of positions {list(body.positions)} at iteration {body.iteration}"
    task.iteration = max(task.iteration, body.iteration)
    if not step.state.open_incidents(task.name):
        opened = Incident(
            id="", task=task.name, fault="state lost", severity=Severity.SEV2, node="",
            rank=body.rank, method=Method.NOTICE, opened_ms=0.0, cause=cause,
            iteration=body.iteration,
        )  # fmt: skip
        step.open_incident(opened, cause)
    if task.checkpoint is None and (task.iteration > 0 or body.iteration < 0):  # heirs alone know nothing
        stop_task(step, task, f"{cause}, and no checkpoint to return to")
    elif task.checkpoint is None:
        restart_all(step, task, f"{cause}; nothing was committed yet")
    else:
        task.state_lost = cause
        step.touch(task)


def on_stopped(step: Step, task: TaskState, message: WorkerStopped) -> None:
    """Stopped is seen at once and ended only after its grace; never while a debugger explains it."""
    worker = speaker(step, task, message.worker)
    if worker is None:
        return
    if message.traced:
        tell_held(step, task, worker, message.held or "a debugger or a frozen cgroup holds it")
        return
    if worker.stopped_ms is None:
        worker.stopped_ms = step.now_ms
        worker.stop_detect_ms = detected_ms(step, worker.node, message.fault_ns, message.seen_ns)
    grace_ms = task.job.stopped_grace_ms
    if grace_ms == 0:
        end_stopped(step, task, worker)
    else:
        step.set_timer("stop", worker.name, grace_ms, "a stopped worker may be continued")
    step.touch(task)


def on_unkillable(step: Step, task: TaskState, message: WorkerUnkillable) -> None:
    """The kernel cannot end it: the node is to blame. Its role is filled; epochs fence what it may still do."""
    worker = speaker(step, task, message.worker)
    if worker is None:
        return
    before = incident_of(step, task, worker.name)
    if before is not None:
        step.change_incident(before, message.text, severity=Severity.SEV1, node=worker.node, text=message.text)
    else:
        opened = Incident(
            id="", task=task.name, fault="cannot be killed", severity=Severity.SEV1, node=worker.node,
            rank=worker.rank, method=Method.PROCESS, opened_ms=0.0, worker=worker.name,
            incarnation=worker.incarnation, cause=worker.end_reason, text=message.text,
            outcome=None if is_member(task, worker) and not task.is_over else Outcome.UNAFFECTED,
        )  # fmt: skip
        step.open_incident(opened, message.text)
    forget_worker(step, task, worker, message.text)


def end_stopped(step: Step, task: TaskState, worker: WorkerState) -> None:
    if worker.phase is WorkerPhase.ENDING or worker.observed:
        return
    reason = f"stopped for longer than its grace of {task.job.stopped_grace_ms} ms"
    opened = Incident(
        id="", task=task.name, fault="stopped", severity=Severity.SEV2, node=worker.node,
        rank=worker.rank, method=Method.PROCESS, opened_ms=worker.stopped_ms or step.now_ms,
        worker=worker.name, incarnation=worker.incarnation, cause=reason,
        detect_ms=worker.stop_detect_ms,
    )  # fmt: skip
    if task.job.observe_only:
        observe(step, worker, opened)
        return
    if is_member(task, worker) and not task.is_restarting:
        step.open_incident(opened, f"rank {worker.rank} is stopped")
    end_worker(step, task, worker, reason)


def on_continued(step: Step, task: TaskState, message: WorkerContinued) -> None:
    worker = speaker(step, task, message.worker)
    if worker is None:
        return
    worker.stopped_ms = None
    worker.stalled = None
    if worker.held:
        note_released(step, task, worker)
    if worker.observed:
        worker.observed = False
        note_going_on(step, task, worker)
    step.cancel_timer("stop", worker.name, "it runs again")
    step.cancel_timer("stall", worker.name, "it runs again")
    step.touch(task)


def on_stalled(step: Step, task: TaskState, message: WorkerStalled) -> None:
    """One signal of two (diagnosis.stall_root); told at 1.5 times the usual and again at 3.

    A plan begins everybody's clock anew, so what an agent said before it knew the present one is over (it lay before a
    coordinator that stood still, or is told again behind a hello). Who still stands still is told afresh."""
    worker = speaker(step, task, message.worker)
    if worker is None:
        return
    if task.plan is not None and message.epoch is not None and message.epoch < task.epoch:
        step.refuse("explained", f"{message.worker} stood still in epoch {message.epoch}, now {task.epoch}")
        return
    if worker.stalled is None:
        worker.stalled_ms = step.now_ms
    worker.stalled = message
    if message.is_sure:
        step.set_timer("stall", worker.name, message.budget_ms, "a second budget is gross")
    step.touch(task)


def on_stall_timer(step: Step, task: TaskState, worker: WorkerState) -> None:
    if worker.stalled is None:
        return
    grown_ms = worker.stalled.stalled_ms + step.now_ms - worker.stalled_ms
    worker.stalled = msgspec.structs.replace(worker.stalled, stalled_ms=grown_ms)
    worker.stalled_ms = step.now_ms
    if worker.stalled.cpu is Cpu.STARVED:  # its clock alone is enough only after several budgets
        step.set_timer("stall", worker.name, worker.stalled.budget_ms, "it had no processor")
    step.touch(task)
