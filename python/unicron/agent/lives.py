"""Lives of workers: started, joined, heard, ended, dead.

A death is reported on the first positive evidence, with what the pulse page says about where it happened. How it
died often comes later (the kernel releases the mutex some 50 ms before the exit status is there), so the same
report is then sent again with the cause. Exit code 0 is an end, anything else a loss.
"""

from __future__ import annotations

from unicron.agent import arenas
from unicron.agent.actions import (
    SIGTERM,
    ExecWorker,
    ForkWorker,
    InspectWorker,
    KillWorker,
    ReleaseSlot,
    SendWorker,
    WatchWorker,
    WelcomeWorker,
)
from unicron.agent.environment import fork_of, log_folder
from unicron.agent.events import (
    ChildStatusSeen,
    MutexReleased,
    Pulse,
    WorkerForked,
    WorkerInspected,
    WorkerJoined,
    WorkerMessage,
)
from unicron.agent.state import Worker
from unicron.agent.step import Step
from unicron.agent.transitions import Phase
from unicron.messages import (
    ExceptionRaised,
    Finished,
    FromWorker,
    PublishEpoch,
    StartWorkers,
    WorkerContinued,
    WorkerExited,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
    WorkerUnkillable,
    WorkerWelcome,
    cut,
)
from unicron.types import Method, Stage

PULSE_BYTES = 4096
GONE_KEPT_MAX = 64
OUT_OF_MEMORY = "out of memory"


def start_workers(step: Step, order: StartWorkers) -> None:
    spec = order.spec
    if spec.task in step.state.ended:
        step.refuse("task_over", f"{spec.task}: {step.state.ended[spec.task]}")
        return
    step.state.specs[spec.task] = spec
    for name, incarnation, rank, waiting in order.workers:
        if name in step.state.workers:
            step.refuse("duplicate", f"{name} was started before")
            continue
        alive = sum(w.phase is not Phase.GONE for w in step.state.workers.values())
        if alive >= step.config.workers_max:
            step.refuse("too_many_workers", f"{name}: {alive} live here")
            continue
        logs = log_folder(spec, incarnation, rank)
        worker = Worker(
            name=name,
            task=spec.task,
            incarnation=incarnation,
            rank=rank,
            waiting=waiting,
            slot=step.state.free_slot(),
            managed=spec.managed,
            log=f"{logs}/stderr.log" if logs else "",
            stall_factor=spec.stall_factor,
            warms_up=name in order.warm_up,
        )
        step.state.workers[name] = worker
        fork = fork_of(order, name, incarnation, rank, step.config.node, step.config.socket)
        kind = ForkWorker if spec.managed else ExecWorker
        step.actions.append(kind(fork, worker.slot, order.reason or "ordered"))
        step.set_timer("fork", name, step.config.fork_ms_max, "its process must exist")


def on_forked(step: Step, event: WorkerForked) -> None:
    worker = step.find(event.worker, "forked")
    if worker is None:
        return
    worker.pid = event.pid
    worker.move("forked")
    step.cancel_timer("fork", worker.name, "its process exists")
    if worker.phase is Phase.GONE:  # given up for late: it must not run unseen
        worker.end_reason = worker.end_reason or "its process came too late"
        step.actions.append(KillWorker(worker.name, worker.pid, worker.end_reason))
    elif worker.is_dead:
        return
    elif worker.end_reason:
        _kill(step, worker)
    elif not worker.managed:
        step.report_up(worker, "a process that will never join")


def on_fork_failed(step: Step, name: str, text: str) -> None:
    worker = step.find(name, "fork_failed")
    if worker is not None:
        _report_lost(step, worker, None, 0, f"could not start: {text}")
        _gone(step, worker, "it never was")


def on_joined(step: Step, event: WorkerJoined) -> None:
    hello = event.hello
    worker = step.find(hello.worker, "joined")
    if worker is None:
        return
    if (hello.task, hello.incarnation) != (worker.task, worker.incarnation):
        step.refuse("stale_incarnation", f"{hello.worker} of {hello.task}: {hello.incarnation}")
        return
    if event.peer_pid != hello.pid or worker.pid not in (0, hello.pid):
        step.refuse("wrong_process", f"{hello.worker}: pid {event.peer_pid}, not {worker.pid}")
        return
    worker.pid = hello.pid
    worker.is_connected = True
    worker.move("joined")
    step.cancel_timer("fork", worker.name, "it said hello")
    spec = step.state.specs[worker.task]
    welcome = WorkerWelcome(
        node=step.config.node,
        pulse_slot=worker.slot,
        pulse_bytes=PULSE_BYTES,
        store_secret="",
        store_public="",
        layout=spec.layout,
        rank=worker.rank,
        waiting=worker.waiting,
        checkpoint_dir=spec.checkpoint_dir,
        checkpoint_every=spec.checkpoint_every,
        warm_up=worker.warms_up,
    )
    step.actions.append(WelcomeWorker(worker.name, welcome, "it said hello"))
    step.actions.append(WatchWorker(worker.name, worker.slot, "it said hello"))
    plan = step.state.plans.get(worker.task)
    if plan is not None:
        forward_plan(step, worker, PublishEpoch(plan))
    if worker.end_reason:
        _kill(step, worker)
    step.report_up(worker, "it said hello")


def forward_plan(step: Step, worker: Worker, message: PublishEpoch) -> None:
    plan = message.plan
    member = next((m for m in plan.members if m.worker == worker.name), None)
    if member is not None:
        if plan.epoch != worker.epoch:
            worker.progress_planned = worker.pulse.progress if worker.pulse else 0
        worker.rank, worker.waiting, worker.epoch = member.rank, False, plan.epoch
    worker.stall_rebase = True
    step.forget_stall(worker.name)
    if worker.can_hear:
        step.actions.append(SendWorker(worker.name, message, plan.epoch, plan.ended, plan.reason or "a new epoch"))


def on_said(step: Step, event: WorkerMessage) -> None:
    worker = step.find(event.worker, "said")
    if worker is None:
        return
    body = event.message
    if body.worker != worker.name:
        step.refuse("wrong_worker", f"{worker.name} speaks for {body.worker}")
        return
    if isinstance(body, WorkerReady):
        if worker.is_dead:
            return
        worker.move("ready")
        worker.rank, worker.waiting = body.rank, body.waiting
        step.report_up(worker, "it is ready")
        return
    if isinstance(body, ExceptionRaised):
        worker.exception = worker.exception if body.thread else body
    elif isinstance(body, Finished):
        worker.has_finished = worker.is_leaving = True
        if not worker.is_dead:
            worker.move("finished")
            must_leave(step, worker)
    said = FromWorker(step.config.node, worker.task, body, event.seen_ns)
    step.report(said, f"{worker.name} says {type(body).__name__}")


def must_leave(step: Step, worker: Worker) -> None:
    """Once its script is over, too, and not only its training: an export may follow that."""
    if worker.has_finished and worker.pulse is not None and worker.pulse.stage is Stage.DONE:
        if f"exit/{worker.name}" not in step.state.timers:
            step.set_timer("exit", worker.name, step.config.exit_ms_max, "its process must leave after its end")


def end_worker(step: Step, task: str, name: str, reason: str, grace_ms: float = 0.0) -> None:
    """Kill with evidence. Who is dead or unknown is reported (again): the order waits for exactly that.

    grace_ms: it is asked to leave (SIGTERM) so long before it is killed.
    """
    worker = step.state.workers.get(name)
    if worker is None:
        lost = WorkerLost(
            node=step.config.node, task=task, worker=name, incarnation=-1, rank=-1,
            method=Method.PROCESS.value, cause="no such worker here", text="", stage=Stage.IDLE,
            iteration=-1, micro_batch=-1, fault_ns=0, seen_ns=0, log="",
        )  # fmt: skip
        step.report(lost, f"{name} is not here")
        return
    if worker.is_dead:
        if worker.last_report is not None:
            step.report(worker.last_report, f"{name} is dead already")
        return
    is_first, worker.end_reason = not worker.end_reason, worker.end_reason or reason
    if grace_ms <= 0:
        _kill(step, worker)
    elif is_first and worker.pid:
        step.actions.append(KillWorker(worker.name, worker.pid, worker.end_reason, SIGTERM))
        step.set_timer("kill", worker.name, grace_ms, "asked to leave; then it is killed")


def _kill(step: Step, worker: Worker) -> None:
    if worker.pid:
        worker.kills += 1
        step.actions.append(KillWorker(worker.name, worker.pid, worker.end_reason))
    delay_ms = step.config.kill_ms
    step.set_timer("kill", worker.name, delay_ms, "a killed process must be seen dead")


def on_kill_timer(step: Step, worker: Worker) -> None:
    if worker.is_dead:
        return
    _kill(step, worker)
    if worker.kills == step.config.kills_max:
        step.actions.append(InspectWorker(worker.name, worker.pid, f"killed {worker.kills} times and not dead"))


def on_inspected(step: Step, event: WorkerInspected) -> None:
    worker = step.state.workers.get(event.worker)
    if worker is None:
        step.refuse("unknown_worker", f"WorkerInspected: {event.worker}")
    elif event.held and not worker.is_dead:  # it dies when it is let go; that is no fault of the node
        worker.kills = 0
        where = (step.config.node, worker.task, worker.name, worker.rank)
        held = WorkerStopped(*where, 0, 0, traced=True, held=f"{event.held}, and no kill ends it before that ends")
        step.report(held, f"{worker.name} cannot be killed: {event.held}")
    elif not worker.is_dead and event.state not in ("", "Z", "X"):
        state = "in uninterruptible sleep" if event.state == "D" else f"in state {event.state}"
        text = f"process {worker.pid} was killed {worker.kills} times and is still there, {state}"
        stuck = WorkerUnkillable(step.config.node, worker.task, worker.name, worker.rank, text)
        step.report(stuck, f"{worker.name} cannot be killed")


def on_released(step: Step, event: MutexReleased) -> None:
    worker = step.find(event.worker, "released")
    if worker is None:
        return
    worker.pulse = event.pulse
    if worker.is_leaving and not worker.end_reason:
        worker.move("dying")  # an end, most likely: the exit status says
    else:
        _report_lost(step, worker, event.pulse, event.seen_ns, "")
    delay_ms = step.config.exit_status_ms_max
    step.set_timer("status", worker.name, delay_ms, "the exit status follows")
    arenas.look(step, worker)


def on_status(step: Step, event: ChildStatusSeen) -> None:
    status = event.status
    worker = step.find(status.worker, "status")
    if worker is None:
        return
    if worker.pid not in (0, status.pid):
        step.refuse("wrong_process", f"{status.worker}: pid {status.pid}, not {worker.pid}")
        return
    if status.kind in ("stopped", "continued"):
        _on_stop(step, worker, event)
        return
    if event.pulse is not None:
        worker.pulse = event.pulse
    cause = f"{'signal' if status.kind == 'signaled' else 'exit code'} {status.status}"
    if event.oom:
        cause = f"{OUT_OF_MEMORY} ({cause})"
    is_end = status.kind == "exited" and status.status == 0
    lost = isinstance(worker.last_report, WorkerLost)
    if is_end and not lost and not worker.end_reason:
        exited = WorkerExited(step.config.node, worker.task, worker.name, worker.rank, 0)
        worker.last_report = exited
        step.report(exited, f"{worker.name} ended by itself")
        if not worker.is_dead:
            worker.move("dying")
    else:
        said = worker.pulse.last_words if worker.pulse else ""
        text = "\n".join(filter(None, (said, event.words, event.oom_text)))
        _report_lost(step, worker, worker.pulse, event.seen_ns, cause, (text, event.words_where))
    _gone(step, worker, cause)


def on_status_timer(step: Step, worker: Worker) -> None:
    """The exit status never came (its template is gone, or a core file is written for ever). The death is certain, and
    what is left of the process must not live on beside its heir."""
    if worker.last_report is None:
        _report_lost(step, worker, worker.pulse, 0, "exit status unknown")
    if worker.pid:
        step.actions.append(KillWorker(worker.name, worker.pid, "it is dead, and gave no exit status"))
    _gone(step, worker, "exit status unknown")


def _report_lost(
    step: Step, worker: Worker, pulse: Pulse | None, seen_ns: int, cause: str, words: tuple[str, str] = ("", "")
) -> None:
    """First report on first evidence; a second one only adds the cause. words: text and place of what it left."""
    before = worker.last_report
    if isinstance(before, WorkerLost) and before.cause:
        return
    exception = worker.exception
    if worker.end_reason:
        cause = f"ended: {worker.end_reason}"
    elif exception is not None:
        cause = exception.type
    first_seen_ns = before.seen_ns if isinstance(before, WorkerLost) else seen_ns
    lost = WorkerLost(
        node=step.config.node,
        task=worker.task,
        worker=worker.name,
        incarnation=worker.incarnation,
        rank=worker.rank,
        method=(Method.EXCEPTION if exception else Method.PROCESS).value,
        cause=cause,
        text=exception.text if exception else cut(words[0]),
        stage=pulse.stage if pulse else Stage.STARTING,
        iteration=pulse.iteration if pulse else -1,
        micro_batch=pulse.micro_batch if pulse else -1,
        fault_ns=pulse.fault_ns if pulse else 0,
        seen_ns=first_seen_ns,
        log=worker.log,
        where=exception.where if exception else words[1],
    )
    worker.last_report = lost
    if not worker.is_dead:
        worker.move("dying")
    step.report(lost, f"{worker.name} is dead: {cause or 'its mutex was released'}")


def _gone(step: Step, worker: Worker, reason: str) -> None:
    """Reaped: its slot is free. The entry stays a while, for who asks late."""
    worker.move("gone")
    worker.is_connected = False
    for kind in ("fork", "kill", "status", "exit"):
        step.cancel_timer(kind, worker.name, reason)
    step.actions.append(ReleaseSlot(worker.name, worker.slot, reason))
    arenas.owner_gone(step, worker)
    arenas.drop_of_ended(step, worker.task)
    gone = [w.name for w in step.state.workers.values() if w.phase is Phase.GONE]
    kept = {a.owner for a in step.state.arenas.values()}
    for name in gone[: max(len(gone) - GONE_KEPT_MAX, 0)]:
        if name not in kept:
            del step.state.workers[name]


def _on_stop(step: Step, worker: Worker, event: ChildStatusSeen) -> None:
    if worker.is_dead:
        step.refuse("worker_dead", f"{worker.name} {event.status.kind}")
        return
    node, task, fault_ns = step.config.node, worker.task, event.pulse.fault_ns if event.pulse else 0
    worker.is_stopped = event.status.kind == "stopped"
    if worker.is_stopped:
        held = event.held
        stopped = WorkerStopped(node, task, worker.name, worker.rank, fault_ns, event.seen_ns, bool(held), held)
        step.report(stopped, f"{worker.name} is stopped{f': {held}' if held else ''}")
    else:
        worker.stall_rebase = True
        continued = WorkerContinued(node, task, worker.name, worker.rank)
        step.report(continued, f"{worker.name} runs again")


def on_disconnected(step: Step, name: str) -> None:
    """A connection's end is no death: its mutex or its exit status will tell, or its own _exit follows."""
    worker = step.find(name, "disconnected")
    if worker is not None:
        worker.is_connected = False
