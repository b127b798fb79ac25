"""What people ask for: submit, cancel, inject. Every refusal is one line that says what to do."""

from __future__ import annotations

import msgspec

from unicron.coordinator.events import FaultRequested
from unicron.coordinator.job import Job, refusal_of
from unicron.coordinator.journal import TaskAdmitted
from unicron.coordinator.lifecycle import stop_task
from unicron.coordinator.placement import free_slots, place_replicas
from unicron.coordinator.starting import start_all
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TERMINAL
from unicron.messages import ArmFault, Reply


def on_submitted(step: Step, request_id: str, job: Job) -> None:
    why = refusal_of(job)
    free = free_slots(step.state)
    placed = place_replicas(job.layout, tuple(range(job.layout.dp)), dict(free)) if not why else {}
    if not why and len(placed) < job.layout.world_size:
        exist = sum(n.slots for n in step.state.nodes.values())
        why = (
            f"{job.name} needs {job.layout.world_size} slots, {sum(free.values())} are free "
            f"({exist} exist on {len(free)} nodes); use a smaller layout or start more agents"
        )
    if not why and len(step.state.tasks) >= step.config.tasks_max and not _drop_oldest(step):
        why = f"{step.config.tasks_max} tasks are known and none is over; cancel one first"
    if why:
        step.answer(request_id, Reply(ok=False, error=why), why)
        return
    name = _unused_name(step, job.name)
    step.write(TaskAdmitted(name, job, placed), f"{len(placed)} slots are free for it")
    start_all(step, step.state.tasks[name], "the task is admitted")
    step.answer(request_id, Reply(ok=True, result={"task": name}), "admitted")


def _unused_name(step: Step, wanted: str) -> str:
    name, number = wanted, 1
    while name in step.state.tasks:
        number += 1
        name = f"{wanted}-{number}"
    return name


def _drop_oldest(step: Step) -> bool:
    over = next((t.name for t in step.state.tasks.values() if t.phase in TERMINAL), None)
    if over is not None:
        del step.state.tasks[over]
    return over is not None


def on_cancel(step: Step, request_id: str, name: str) -> None:
    task = step.state.tasks.get(name)
    if task is None:
        step.answer(request_id, Reply(ok=False, error=_no_task(step, name)), "unknown task")
        return
    if not step.may(task, "cancel", "CancelRequested"):
        error = f"task {name} is {task.phase.value} already"
        step.answer(request_id, Reply(ok=False, error=error), error)
        return
    stop_task(step, task, "cancelled")
    step.answer(request_id, Reply(ok=True, result={"task": name}), "cancelled")


def on_fault(step: Step, event: FaultRequested) -> None:
    task = step.state.tasks.get(event.task)
    error = ""
    if task is None:
        error = _no_task(step, event.task)
    elif not step.may(task, "inject", "FaultRequested"):
        error = f"task {event.task} is {task.phase.value}"
    elif task.holder(event.rank) is None:
        error = f"task {event.task} has no live worker with rank {event.rank}"
    if error or task is None:
        step.answer(event.request_id, Reply(ok=False, error=error), error)
        return
    worker = task.holder(event.rank)
    assert worker is not None
    arm = ArmFault(
        event.task, event.rank, event.fault, event.point, event.iteration, event.micro_batch
    )
    step.send(worker.node, arm, f"fault asked for at rank {event.rank}")
    result = {"node": worker.node, "worker": worker.name}
    step.answer(event.request_id, Reply(ok=True, result=result), "armed")


def _no_task(step: Step, name: str) -> str:
    known = ", ".join(sorted(step.state.tasks)) or "none"
    return f"no task {name}; known: {known}"


def job_from(arguments: dict[str, object]) -> Job:
    """A request's arguments as a Job; raises msgspec.ValidationError, which names the field."""
    return msgspec.convert(arguments, Job)
