"""Facts about workers: started, up, lost, exited. Handlers change facts; settle.py draws the consequences."""

from __future__ import annotations

import zlib
from typing import Any

from unicron.coordinator.classifying import classify_soon
from unicron.coordinator.diagnosis import exit_code_of, repeated, signature_of
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import TaskOnGpu, WorkersStarted
from unicron.coordinator.lifecycle import stop_task
from unicron.coordinator.state import Purpose, TaskState, WorkerState, node_order
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TaskPhase, WorkerPhase
from unicron.coordinator.unready import message_of, note_unready, same_unready
from unicron.diagnosis.counts import moment_of
from unicron.messages import (
    EndWorker,
    StartWorkers,
    TaskSpec,
    WorkerExited,
    WorkerLost,
    WorkerStatus,
    WorkerUp,
)
from unicron.types import Layout, Method, PlanKind, Rank, Severity, Stage

WORKER_TIMERS = ("end", "stop", "exception", "stall")


def spec_of(task: TaskState, layout: Layout | None = None) -> TaskSpec:
    job = task.job
    return TaskSpec(
        task=task.name,
        command=job.command,
        cwd=job.cwd,
        env=job.env,
        layout=layout or job.layout,
        log_dir=job.log_dir,
        checkpoint_dir=job.checkpoint_dir,
        checkpoint_every=job.checkpoint_every,
        stopped_grace_ms=job.stopped_grace_ms,
        stop_grace_ms=job.stop_grace_ms,
        stall_factor=job.stall_factor,
        budgets=job.budgets,
        managed=job.managed,
        restart_count=task.restart_count,
    )


def start_workers(
    step: Step, task: TaskState, wanted: list[tuple[str, Rank, Purpose]], reason: str, layout: Layout | None = None
) -> None:
    """One order a node. layout: to build for, where that is not the present one.

    Ids grow with every worker of the node, so an id is never used twice."""
    by_node: dict[str, list[tuple[Rank, Purpose]]] = {}
    for node, rank, purpose in wanted:
        by_node.setdefault(node, []).append((rank, purpose))
    homes = sorted({*task.placement.values()} or by_node, key=node_order)
    index_of = {node: index for index, node in enumerate(homes)}
    first = step.state.nodes.get(homes[0])
    # Another port at every start, so that a socket of the last one that lingers is in nobody's way.
    chance = zlib.crc32(f"{step.seed}/{task.name}/{task.restart_count}".encode())
    port = step.config.master_port_first + chance % step.config.master_port_count
    for node in sorted(by_node, key=node_order):
        number = step.state.worker_counts.get(node, 0)
        started = tuple(
            (f"{node}.w{number + i}", number + i, rank, purpose) for i, (rank, purpose) in enumerate(by_node[node])
        )
        step.write(
            WorkersStarted(
                task.name, node, tuple((n, i, r, p.value) for n, i, r, p in started),
                task.restart_count,
            ),
            reason,
        )  # fmt: skip
        order = StartWorkers(
            spec=spec_of(task, layout),
            epoch=task.epoch,
            workers=tuple((n, i, r, p is not Purpose.MEMBER) for n, i, r, p in started),
            warm_up=tuple(n for n, _, _, p in started if p is Purpose.STANDBY),
            node_rank=index_of.get(node, len(homes)),
            nnodes=max(len(homes), 1),
            master_port=0 if task.job.managed else port,
            master_address=host_of(first.store) if first else "",
            reason=reason,
        )
        step.send(node, order, reason)


def host_of(endpoint: str) -> str:
    """tcp://host:port -> host."""
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


def end_worker(step: Step, task: TaskState, worker: WorkerState, reason: str) -> None:
    """Kill with evidence. Its death is reported like any other; the order is repeated until then, bounded."""
    if worker.phase is WorkerPhase.ENDING:
        return
    worker.move("ending")
    worker.end_reason = reason
    step.send(worker.node, EndWorker(task.name, worker.name, reason), reason)
    step.set_timer("end", worker.name, step.config.end_ms, "an ended worker must be reported lost")


def forget_worker(step: Step, task: TaskState, worker: WorkerState, reason: str) -> None:
    """It is dead. If it held a role of the present plan, that role is lost."""
    for kind in WORKER_TIMERS:
        step.cancel_timer(kind, worker.name, reason)
    del task.workers[worker.name]
    rank = task.role_of(worker.name)
    if rank is not None and rank not in task.finished:
        task.lost[rank] = worker.name
    if rank is not None:
        task.reports.pop(rank, None)
        task.awaiting.discard(rank)
    step.has_freed = True
    if worker.purpose is Purpose.UNDERSTUDY and not task.is_over and not worker.end_reason:
        task.understudies_lost += 1
        step.set_timer("understudy", task.name, step.config.understudy_delay_ms, "an understudy is missing")
    step.touch(task)


def is_member(task: TaskState, worker: WorkerState) -> bool:
    """It holds a role, or is meant to from the first epoch on."""
    if task.plan is None:
        return worker.purpose is Purpose.MEMBER
    return task.role_of(worker.name) is not None


def on_worker_up(step: Step, task: TaskState, message: WorkerUp) -> None:
    """Of thousands that get up, only those are looked at closely after which there is something to do."""
    note_status(step, task, message.status)
    worker = task.workers.get(message.status.worker)
    is_spare = worker is not None and worker.purpose is Purpose.UNDERSTUDY
    if task.phase is TaskPhase.STARTING and (is_spare or task.absent):
        return
    if task.phase is TaskPhase.RUNNING and is_spare and not (task.lost or task.reports):
        return
    step.touch(task)


def note_status(step: Step, task: TaskState, status: WorkerStatus) -> None:
    worker = task.workers.get(status.worker)
    if worker is None:
        step.refuse("unknown_worker", f"{status.worker} is not a live worker of {task.name}")
        return
    if status.incarnation != worker.incarnation:
        step.refuse("stale_incarnation", f"{status.worker}: {status.incarnation}")
        return
    worker.move("ready" if status.ready else "up")
    task.was_ready = task.was_ready or status.ready
    if status.gpu and not task.on_gpu:  # whatever the coordinator was told of its cluster
        step.write(TaskOnGpu(task.name), f"{worker.name} has a GPU of {worker.node}")
    if worker.name in task.absent:  # said by WorkerUp, or by a heartbeat that came before it
        task.absent.discard(worker.name)
        if not task.absent:
            step.touch(task)
    if worker.purpose is Purpose.UNDERSTUDY and worker.phase is WorkerPhase.READY:
        task.understudies_lost = 0
    if status.stage is Stage.DONE:
        note_finished(step, task, worker)
    worker.iteration = max(worker.iteration, status.iteration)
    worker.iteration_now = status.iteration
    worker.stage = status.stage
    worker.progress = max(worker.progress, status.progress)
    if status.progress_planned is not None and task.plan is not None and status.epoch == task.plan.epoch:
        # What was known here when the plan went out may be as old as a heartbeat: what it did before is no answer.
        worker.progress_planned = status.progress_planned
    if is_member(task, worker):
        task.iteration = max(task.iteration, status.iteration)
        if worker.epoch_heard < task.epoch:  # where it stood before the plan, which is heard now
            task.heal_iteration = max(task.heal_iteration, status.iteration)
    worker.epoch_heard = max(worker.epoch_heard, status.epoch)
    if worker.stalled is not None and status.iteration > worker.stalled.iteration:
        worker.stalled = None
        step.cancel_timer("stall", worker.name, "it advances again")


def note_finished(step: Step, task: TaskState, worker: WorkerState) -> None:
    worker.move("finished")
    if is_member(task, worker):
        task.finished.add(worker.rank)
        task.awaiting.discard(worker.rank)  # of a plan that it does not meet any more
    step.touch(task)


def on_worker_exited(step: Step, task: TaskState, message: WorkerExited) -> None:
    """Exit code 0. A managed member that never said Finished left early: that is a loss, not an end."""
    worker = task.workers.get(message.worker)
    if worker is None:
        step.refuse("unknown_worker", f"{message.worker} exited, not a live worker of {task.name}")
        return
    early = (
        task.job.managed
        and task.plan is not None
        and task.role_of(worker.name) is not None
        and worker.rank not in task.finished
        and not task.is_over
    )
    if early:
        _open_for(step, task, worker, _lost_of(message, worker))
    elif is_member(task, worker) and worker.phase is not WorkerPhase.ENDING:
        note_finished(step, task, worker)
    forget_worker(step, task, worker, "exited with code 0")


def _lost_of(message: WorkerExited, worker: WorkerState) -> WorkerLost:
    return WorkerLost(
        node=message.node, task=message.task, worker=worker.name, incarnation=worker.incarnation,
        rank=worker.rank, method=Method.PROCESS.value, cause=f"exit code {message.code}",
        text="the script ended before its last iteration", stage=Stage.IDLE,
        iteration=worker.iteration, micro_batch=-1, fault_ns=0, seen_ns=0, log="",
    )  # fmt: skip


def on_worker_lost(step: Step, task: TaskState, message: WorkerLost) -> None:
    worker = task.workers.get(message.worker)
    if worker is None:
        _late_cause(step, task, message)
        return
    if message.incarnation not in (worker.incarnation, -1):  # -1: its agent never had it
        step.refuse("stale_incarnation", f"{message.worker}: {message.incarnation}")
        return
    if is_member(task, worker):
        task.iteration = max(task.iteration, message.iteration)
        _note_unbegun(task, worker, message)
    if worker.has_tail and is_member(task, worker) and _is_early(message):
        task.finished.discard(worker.rank)
    counts = not task.is_over and not task.is_restarting and worker.rank not in task.finished
    forgotten = worker.phase is WorkerPhase.ENDING and task.role_of(worker.name) is None
    incident = None
    if counts and not forgotten:
        incident = _open_for(step, task, worker, message)
    forget_worker(step, task, worker, message.cause or "its mutex was released")
    if incident is not None:
        maybe_fatal(step, task, incident, message, worker.rank)


def _is_early(lost: WorkerLost) -> bool:
    """Of one that had finished its training: is more of its script lost than the interpreter's own end? (A crash in
    there, of a library that is taken down, is nobody's loss. An exit code is the script's word.)"""
    return lost.stage is not Stage.DONE or lost.cause.startswith("exit code ") or lost.method == Method.EXCEPTION.value


def _note_unbegun(task: TaskState, worker: WorkerState, lost: WorkerLost) -> None:
    """All commit an iteration together: who died in the first before that shows that nobody has committed any. (An heir
    shows nothing: it may not have taken the state yet.)"""
    begins = task.plan is not None and task.plan.kind is PlanKind.START and task.role_of(worker.name) is not None
    if begins and lost.iteration == 0 and lost.stage < Stage.COMMIT:
        task.unbegun_epoch = task.epoch


def _open_for(step: Step, task: TaskState, worker: WorkerState, lost: WorkerLost) -> Incident:
    """The incident of this death: the one its exception, stop or stall opened, or a new one."""
    exception = worker.exception
    known: dict[str, Any] = {
        "cause": worker.end_reason or (exception.type if exception else lost.cause),
        "text": exception.text if exception else lost.text,
        "where": exception.where if exception else lost.where,
        "log": lost.log,
        "signature": "" if worker.end_reason and not exception
        else signature_of(lost, exception),
        "iteration": exception.iteration if exception else lost.iteration,
        "micro_batch": exception.micro_batch if exception else lost.micro_batch,
        "stage": exception.stage if exception else lost.stage,
    }  # fmt: skip
    reason = f"{worker.name} is dead: {lost.cause or 'cause not known yet'}"
    before = incident_of(step, task, worker.name)
    if before is not None:
        incident = step.change_incident(before, reason, **known)
        classify_soon(step, incident)
        return incident
    member = is_member(task, worker)
    opened = Incident(
        id="", task=task.name, fault="worker lost", node=worker.node, rank=worker.rank,
        severity=Severity.SEV2 if member else Severity.INFO, method=Method(lost.method),
        opened_ms=0.0, worker=worker.name, incarnation=worker.incarnation,
        detect_ms=detected_ms(step, worker.node, lost.fault_ns, lost.seen_ns),
        **known,
    )  # fmt: skip
    known_before = None if member else same_unready(step.state, opened)
    if known_before is not None:  # of many who build the same script each dies of it: one incident says so
        return step.change_incident(known_before, f"{worker.name} died of the same, and held no role")
    incident = step.open_incident(opened, reason)
    classify_soon(step, incident)
    if not member:
        incident = step.change_incident(incident, "it held no role", outcome="unaffected")
    return incident


def detected_ms(step: Step, node: str, fault_ns: int, seen_ns: int) -> float | None:
    """From the fault until the coordinator knows; None when the fault's own time is not known.

    Where agent and coordinator read one clock (one machine) that includes the message's way. Else it ends where the
    agent saw it: clocks of two machines are not compared.
    """
    if not fault_ns:
        return None
    known = step.state.nodes.get(node)
    if known is not None and known.clock and known.clock == step.config.clock:
        return max(step.now_ms - fault_ns / 1e6, 0.0)
    return (seen_ns - fault_ns) / 1e6


def incident_of(step: Step, task: TaskState, worker: str) -> Incident | None:
    """The newest incident this worker is the root of, other than what was only told."""
    for incident in reversed(step.state.incidents.values()):
        if incident.worker == worker and incident.task == task.name and not incident.is_only_told:
            return incident
    return None


def _late_cause(step: Step, task: TaskState, message: WorkerLost) -> None:
    """The mutex told of the death at once; how it died comes with the exit status, some milliseconds later."""
    incident = incident_of(step, task, message.worker)
    if incident is None or not message.cause or incident.cause:
        step.refuse("unknown_worker", f"{message.worker} is not a live worker of {task.name}")
        return
    incident = step.change_incident(
        incident,
        f"cause: {message.cause}",
        cause=message.cause,
        text=incident.text or message.text,
        where=incident.where or message.where,
        method=Method(message.method),
        signature=incident.signature or signature_of(message, None),
        log=incident.log or message.log,
    )
    classify_soon(step, incident)
    maybe_fatal(step, task, incident, message, incident.rank)


def _why_fatal(step: Step, task: TaskState, incident: Incident, lost: WorkerLost) -> str:
    """Why a restart would end the same way; '' when it may not."""
    if incident.severity is Severity.INFO:
        return ""
    code = exit_code_of(lost)
    if code is not None and code in task.job.fatal_exit_codes:
        return f"exit code {code} is fatal by the job's own words"
    if repeated(incident, step.state.incidents.values()) is None:
        return ""
    return (
        f"{incident.signature} a second time at {moment_of(incident.iteration, incident.micro_batch)}, "
        f"in another process of rank {incident.rank}"
    )


def maybe_fatal(step: Step, task: TaskState, incident: Incident, lost: WorkerLost, rank: Rank) -> None:
    """rank: the role that the dead worker had, was meant for or guessed."""
    if task.is_over:
        return
    reason = note_unready(task, incident, rank, lost.worker) or _why_fatal(step, task, incident, lost)
    if not reason:
        return
    step.change_incident(incident, reason, severity=Severity.FATAL, outcome=None)
    log = f"; log: {incident.log}" if incident.log else ""
    message = message_of(incident.text) or incident.cause
    says = f": {message}" if message and message not in reason else ""
    where = f" at {incident.where}" if incident.where and incident.where not in reason else ""
    stop_task(step, task, f"{reason}{says}{where}{log}")
