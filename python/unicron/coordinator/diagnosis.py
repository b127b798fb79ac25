"""What a symptom says: severity, signature, and who of many stalled ranks is the root. Pure functions of facts.

Silence is "unknown", never "gone"; the loudest echo is not the root; a kill needs positive evidence. The
same signature at the same (iteration, micro-batch) in a second incarnation of a rank is FATAL: the code or the data
is wrong, and no node is blamed. A plain SIGKILL says nothing about the code, so it never is a signature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from unicron.coordinator.incident import Incident
from unicron.coordinator.state import TaskState, WorkerState
from unicron.messages import CollectiveFailed, ExceptionRaised, WorkerLost, WorkerStalled
from unicron.types import Cpu, Method, PlanKind, Rank, Stage

OF_THE_NODE = ("StateAddressGone",)  # types of exceptions that say nothing about the code
STARVED_BUDGETS = 8  # of one that had no processor, before its clock alone is enough
LEARNED_MAX = 15.0  # times its usual a budget is that was learned (what was survived is in it); more was stated
OWN_WORK = (Stage.IDLE, Stage.EVALUATE)  # of the script
LONELY_MS_MIN = 3_000.0  # of one that computes and that nobody waits for, yet


def signature_of(lost: WorkerLost, exception: ExceptionRaised | None) -> str:
    """What may not come back at the same place; '' when the cause says nothing about the code."""
    cause = lost.cause
    if (exception.type if exception is not None else cause) in OF_THE_NODE:
        return ""
    if exception is not None:
        return f"{exception.type} at {exception.where}"
    if lost.method == Method.EXCEPTION.value and cause:
        return f"{cause} at {lost.where}"  # its last words came after the news of its death
    if cause == "signal 9" or not cause:
        return ""
    if cause.startswith(("signal ", "exit code ", "out of memory")):
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


def stall_root(task: TaskState) -> tuple[WorkerState, str] | None:
    """The member that all wait for, and the second signal beside its clock: it stands still and waits for nobody."""
    stalled = [w for w in task.workers.values() if w.stalled is not None and task.role_of(w.name) is not None]
    if not stalled or task.plan is None:
        return None
    members = [member.worker for member in task.plan.members if member.worker in task.workers]
    stalls = {w.name: w.stalled for w in stalled if w.stalled is not None}
    threads = {w.name: w.thread_exception for w in stalled if w.thread_exception is not None}
    found = root_of(stalls, members, threads)
    return None if found is None else (task.workers[found[0]], found[1])


def root_of(
    stalls: Mapping[str, WorkerStalled], members: Collection[str], threads: Mapping[str, ExceptionRaised]
) -> tuple[str, str] | None:
    """stalls: what is known of members that stand still; threads: of members that an exception took a thread from.

    Suspected (1.5 times its usual): only if all others wait and nothing of it runs. Sure (3 times): if any other waits,
    or nothing of it runs. A lonely one that computes is given LONELY_MS_MIN at least, because it may be at work.
    """
    waiting = {name for name, stalled in stalls.items() if stalled.waiting_in_collective}
    for name, stalled in sorted(stalls.items(), key=lambda each: each[1].rank):
        if name in waiting:
            continue
        second = _second_signal(stalled, len(members) - 1, len(waiting), threads.get(name))
        if second:
            return name, second
    return None


def _second_signal(stalled: WorkerStalled, others: int, waiting: int, thread: ExceptionRaised | None) -> str:
    """others: members besides this one; waiting: how many of them wait."""
    sleeps = stalled.cpu is Cpu.IDLE
    if others and sleeps and waiting == others:
        return f"nothing of it runs, and all {others} others wait"
    if not stalled.is_sure:
        return ""
    is_starved = stalled.cpu is Cpu.STARVED  # it wanted to run: that all wait for it is the machine's doing
    if waiting and not is_starved:
        return f"{waiting} of {others} others wait"
    if sleeps:
        return "nothing of it runs"
    if thread is not None:
        return f"{thread.type} ended its thread {thread.thread}"
    return _alone(stalled)


def _alone(stalled: WorkerStalled) -> str:
    """Its clock is all there is: enough after 3 times its usual where that is long, because a short phase may have a
    long piece of work. A bound that somebody stated is given twice, several of them where it starved."""
    if stalled.cpu is Cpu.STARVED:
        factor, least_ms = STARVED_BUDGETS, STARVED_BUDGETS * stalled.budget_ms
    elif stalled.budget_ms <= LEARNED_MAX * stalled.usual_ms:
        factor, least_ms = 1, max(stalled.budget_ms, LONELY_MS_MIN)
    else:
        factor, least_ms = 2, 2 * stalled.budget_ms
    if stalled.stalled_ms < least_ms:
        return ""
    return f"for {factor} times its budget" if factor > 1 else "for longer than its budget"


def deaf_to_plan(task: TaskState, *, may_be_long: bool = False) -> list[WorkerState]:
    """Members whose loop has not moved since a plan that shut every socket they could wait on.

    A loop inside a collective was freed by that, so whatever it claims to wait for, it is not others. One that
    computes, or is at its script's own work, is deaf only when its own stage's statistics or bounds say that it stands
    still, because that may take long; or (may_be_long) when everybody would be ended for it.
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
        if worker.stage in (Stage.COMPUTE, Stage.SAVE, *OWN_WORK) and not (_is_sure(worker) or may_be_long):
            continue
        if rank in task.awaiting and worker.progress == worker.progress_planned:
            deaf.append(worker)
    return deaf


def is_at_own_work(worker: WorkerState) -> bool:
    """Its script's: between iterations, an evaluation, or what follows its loop. How long that may take is between the
    script and its agent, which tells when it is longer. (What unicron does in it, saving, has the healing's bounds.)"""
    return worker.stage in OWN_WORK and not _is_sure(worker)


def _is_sure(worker: WorkerState) -> bool:
    return worker.stalled is not None and worker.stalled.is_sure


def never_freed(task: TaskState) -> list[WorkerState]:
    """Members that say that they wait, and for longer than sure still stand where a plan found them, though it ended
    what anybody could wait on and others moved since: they wait for nobody."""
    plan = task.plan
    if plan is None or plan.kind is PlanKind.START:
        return []
    members = [worker for worker in map(task.holder, plan.ranks) if worker is not None]
    if all(worker.progress == worker.progress_planned for worker in members):
        return []
    return [worker for worker in deaf_to_plan(task) if _stands(worker.stalled, plan.epoch)]


def _stands(stalled: WorkerStalled | None, epoch: int) -> bool:
    """epoch: the plan's, after which this must have been said; an agent of 0.2 does not say when."""
    if stalled is None or stalled.stage is Stage.HEAL or stalled.cpu is Cpu.STARVED or stalled.epoch != epoch:
        return False
    return stalled.is_sure and stalled.waiting_in_collective


def all_wait(task: TaskState) -> tuple[Rank, ...]:
    """Every member stalled inside a collective, nobody to wait for: the connections are at fault."""
    if task.plan is None:
        return ()
    holders = map(task.holder, task.plan.ranks)
    return task.plan.ranks if are_all_waiting([w.stalled if w is not None else None for w in holders]) else ()


def are_all_waiting(stalls: Iterable[WorkerStalled | None]) -> bool:
    """Surely, and in a collective."""
    return all(stalled is not None and stalled.is_sure and stalled.waiting_in_collective for stalled in stalls)
