"""What people ask for: submit, cancel, suspend, resume, drain, inject. A refusal is one line that says what to do."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unicron.coordinator import fitness
from unicron.coordinator.demand import can_leave
from unicron.coordinator.events import FaultRequested
from unicron.coordinator.job import Job, refusal_of
from unicron.coordinator.journal import NodeChecked, NodeDrained, NodeRests, TaskAdmitted, TaskHeld
from unicron.coordinator.lifecycle import stop_task
from unicron.coordinator.placement import free_slots
from unicron.coordinator.state import NodeState, node_order
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TERMINAL, TaskPhase
from unicron.messages import ArmFault, Reply


def on_submitted(step: Step, request_id: str, job: Job) -> None:
    why = refusal_of(job) or _taken(step, job.name) or _never_fits(step, job)
    if not why and len(step.state.tasks) >= step.config.tasks_max and not _drop_oldest(step):
        why = f"{step.config.tasks_max} tasks are known and none is over; cancel one first"
    if why:
        step.answer(request_id, Reply(ok=False, error=why), why)
        return
    name = _unused_name(step, job.name)
    step.write(TaskAdmitted(name, job), f"priority {job.priority}, weight {job.weight:g}")
    step.touch(step.state.tasks[name])
    # The allocation is decided when this step settles; what came of it is in `describe`.
    step.answer(request_id, Reply(ok=True, result={"task": name}), "admitted")


def _taken(step: Step, name: str) -> str:
    task = step.state.tasks.get(name)
    if task is None or task.is_over:
        return ""
    return f"a task {name} is {task.phase.value} already: choose another name, or cancel it first"


def _never_fits(step: Step, job: Job) -> str:
    """Not now is no reason: it waits. But slots that no node of this cluster has will not come by waiting."""
    layout = job.layout
    nodes = step.state.nodes.values()  # lost and drained ones too: they may come back
    exist = sum(n.slots for n in nodes)
    least = (job.replicas_min or layout.num_replicas) * layout.replica_size
    if least > exist:
        free = sum(max(count, 0) for count in free_slots(step.state).values())
        return (
            f"{job.name} needs {least} slots, {free} are free ({exist} exist on {len(nodes)} nodes); "
            "use a smaller layout or start more agents"
        )
    return ""


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


def on_suspend(step: Step, request_id: str, name: str) -> None:
    """Its slots are given away at once; it leaves them when its state is safe."""
    task = step.state.tasks.get(name)
    error = ""
    if task is None:
        error = _no_task(step, name)
    elif not step.may(task, "suspend", "SuspendRequested"):
        error = f"task {name} is {task.phase.value}"
    elif task.is_held:
        error = f"task {name} is suspended already"
    elif task.phase is not TaskPhase.WAITING and not can_leave(task):
        error = task.cause_to_stay or (
            f"task {name} has no checkpoint.dir: its {max(task.iteration, 0)} iterations would be lost; "
            "cancel it instead"
        )
    if error or task is None:
        step.answer(request_id, Reply(ok=False, error=error), error)
        return
    step.write(TaskHeld(name, True, "suspended by a person"), "suspended by a person")
    step.touch(task)
    result = {"task": name, "was": task.phase.value}
    step.answer(request_id, Reply(ok=True, result=result), "suspended")


def on_resume(step: Step, request_id: str, name: str) -> None:
    """It wants slots again, with the age it has. One that is still leaving goes on to leave, and begins anew."""
    task = step.state.tasks.get(name)
    error = ""
    if task is None:
        error = _no_task(step, name)
    elif not step.may(task, "resume", "ResumeRequested"):
        error = f"task {name} is {task.phase.value}"
    elif not task.is_held:
        error = f"task {name} is not suspended"
    if error or task is None:
        step.answer(request_id, Reply(ok=False, error=error), error)
        return
    step.write(TaskHeld(name, False, "resumed by a person"), "resumed by a person")
    step.touch(task)
    step.answer(request_id, Reply(ok=True, result={"task": name}), "resumed")


def on_drain(step: Step, request_id: str, name: str, drained: bool) -> None:
    node = step.state.nodes.get(name)
    error = ""
    if node is None:
        known = ", ".join(sorted(step.state.nodes, key=node_order))
        error = f"no node {name!r}; {f'known: {known}' if known else 'no agent has said hello yet'}"
    elif node.drained_by_person == drained and (drained or not node.is_drained):
        error = f"node {name} is {'drained' if drained else 'not drained'} already"
    if error or node is None:
        step.answer(request_id, Reply(ok=False, error=error), error)
        return
    reason = f"{name} is {'drained' if drained else 'in use again'}: a person said so"
    if node.drained_by_person != drained:
        step.write(NodeDrained(name, drained, reason), reason)
    if not drained:
        reason = _use_again(step, node, reason)
    step.has_freed = True
    held = sum(w.node == name for t in step.state.tasks.values() for w in t.workers.values())
    step.answer(request_id, Reply(ok=True, result={"node": name, "workers": held, "why": reason}), reason)


def _use_again(step: Step, node: NodeState, reason: str) -> str:
    """A person ends a rest; what is unfit must pass its checks, where it has any."""
    if node.rest_ms:
        step.write(NodeRests(node.name, 0.0, 0), reason)
        step.cancel_timer("rest", node.name, reason)
    if node.unfit and node.can_check:
        fitness.ask(step, node, f"{node.name} is to be used again")
        return f"{reason}; it was unfit ({node.unfit}): its checks run, and it is used once they pass"
    if node.unfit:
        step.write(NodeChecked(node.name, ""), reason)
    return reason


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
    arm = ArmFault(event.task, event.rank, event.fault, event.point, event.iteration, event.micro_batch)
    step.send(worker.node, arm, f"fault asked for at rank {event.rank}")
    result = {"node": worker.node, "worker": worker.name}
    step.answer(event.request_id, Reply(ok=True, result=result), "armed")


def _no_task(step: Step, name: str) -> str:
    return no_task(name, sorted(step.state.tasks))


def no_task(name: str, known: Sequence[str]) -> str:
    if not known:
        return f"no task {name!r}: there are no tasks" if name else "there are no tasks"
    listed = ", ".join(known)
    return f"no task {name!r}; known: {listed}" if name else f"name a task: {listed}"


def job_from(arguments: dict[str, object]) -> Job:
    """A request's arguments as a Job; raises msgspec.ValidationError, which names the field."""
    return msgspec.convert(arguments, Job)
