"""A running task follows its target: replicas come, prepared beside it and taken in by one GROW plan, and leave.

Joiners build on stand-in groups like understudies; nobody is disturbed until all roles of the replica are ready. A
replica that is not wanted (any more, or not there) leaves like one whose node was lost, except that nobody waits for
evidence: the survivors finish the iteration (SHRINK). Newcomers come first where there are slots for them. A recovery
has precedence: both are decided in RUNNING only.
"""

from __future__ import annotations

from unicron.coordinator.demand import can_leave
from unicron.coordinator.leaving import leave
from unicron.coordinator.moves import movable
from unicron.coordinator.narrowing import narrows
from unicron.coordinator.placement import free_slots
from unicron.coordinator.plans import Decision, end_leavers, publish
from unicron.coordinator.state import Purpose, TaskState, WorkerState
from unicron.coordinator.steering import why
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import end_worker, start_workers
from unicron.types import PlanKind, Rank


def settle_width(step: Step, task: TaskState) -> None:
    plan = task.plan
    if plan is None or task.finished or task.phase not in (TaskPhase.RUNNING, TaskPhase.HEALING):
        return
    if task.change is not None or task.moving is not None:
        return  # that first: another layout, whose target comes with it, or roles that go to other nodes
    target = step.state.target(task.name)
    if not target:
        if _nodes_up(step, task):
            leave(step, task, why(step, task))
        return
    if narrows(task) and task.name in step.state.allocation.layouts:
        return  # its width changes with its layout, as soon as nothing else is the matter
    layout = task.job.layout
    placed = {m.rank: m.node for m in plan.members}
    moves = movable(step, task)  # what lives elsewhere than it shall goes there (moves.py)
    right = [
        r for r in plan.replicas
        if all(target.get(k) == placed[k] or k in moves for k in layout.replica_ranks(r))
    ]  # fmt: skip
    wanted = sorted({layout.replica_of(rank) for rank in target} - set(plan.replicas))
    _dismiss(step, task, set(wanted), target)
    ready: dict[Rank, str] = {}
    coming = False
    for replica in wanted if not task.leaving else ():
        joiners = _joiners(task, replica)
        if not joiners:
            coming |= _invite(step, task, replica, target)
        elif set(joiners) == set(layout.replica_ranks(replica)):
            coming = True
            if all(w.phase is WorkerPhase.READY for w in joiners.values()):
                ready.update({rank: w.name for rank, w in joiners.items()})
        else:
            _refill(step, task, replica, joiners)
    if task.leaving or task.phase is not TaskPhase.RUNNING or task.reports or task.lost or not _nodes_up(step, task):
        return
    if ready:
        _grow(step, task, ready)
    elif len(right) < len(plan.replicas) and not coming:
        _shed(step, task, right)


def _grow(step: Step, task: TaskState, ready: dict[Rank, str]) -> None:
    assert task.plan is not None
    members = {m.rank: m.worker for m in task.plan.members} | ready
    replicas = sorted({task.job.layout.replica_of(r) for r in ready})
    reason = f"replicas {replicas} are ready to join"
    publish(step, task, Decision(PlanKind.GROW, members, ready, ready, reason))


def _shed(step: Step, task: TaskState, right: list[int]) -> None:
    former, layout = task.plan, task.job.layout
    assert former is not None
    if not right or layout.sharded:  # none may stay where it is: all save, leave, and begin where they are wanted
        if can_leave(task):
            leave(step, task, why(step, task))
        return
    going = sorted(set(former.replicas) - set(right))
    members = {m.rank: m.worker for m in former.members if layout.replica_of(m.rank) in right}
    touched = [m.rank for m in former.members if m.rank not in members]
    reason = f"replicas {going} leave; {why(step, task)}"
    publish(step, task, Decision(PlanKind.SHRINK, members, touched, (), reason))
    end_leavers(step, task, former)


def _nodes_up(step: Step, task: TaskState) -> bool:
    return all(step.state.nodes[n].phase is NodePhase.UP for n in task.nodes())


def _joiners(task: TaskState, replica: int) -> dict[Rank, WorkerState]:
    return {
        w.rank: w
        for w in task.workers.values()
        if w.purpose is Purpose.JOINER and task.job.layout.replica_of(w.rank) == replica
        and w.phase is not WorkerPhase.ENDING
    }  # fmt: skip


def _dismiss(step: Step, task: TaskState, wanted: set[int], target: dict[Rank, str]) -> None:
    """Joiners of a replica that is not wanted any more, or not there."""
    for worker in list(task.workers.values()):
        if worker.purpose is Purpose.JOINER:
            replica = task.job.layout.replica_of(worker.rank)
            if replica not in wanted or target[worker.rank] != worker.node or task.leaving:
                end_worker(step, task, worker, f"replica {replica} is not wanted on {worker.node} any more")


def _invite(step: Step, task: TaskState, replica: int, target: dict[Rank, str]) -> bool:
    """Start its joiners, if the slots meant for it are free now."""
    if task.joins.get(replica, 0) >= step.config.join_tries_max:
        return False
    free = free_slots(step.state)
    placed = {rank: target[rank] for rank in task.job.layout.replica_ranks(replica)}
    for node in placed.values():
        free[node] = free.get(node, 0) - 1
    if any(free[node] < 0 for node in placed.values()):
        return False
    task.joins[replica] = task.joins.get(replica, 0) + 1
    wanted = [(node, rank, Purpose.JOINER) for rank, node in sorted(placed.items())]
    for node in sorted(set(placed.values())):
        have = any(w.node == node and w.purpose is Purpose.UNDERSTUDY for w in task.workers.values())
        if not have and min(task.job.understudies, step.state.nodes[node].understudies) > 0:
            guess = min(rank for rank, home in placed.items() if home == node)
            wanted.append((node, guess, Purpose.UNDERSTUDY))
    start_workers(step, task, wanted, f"replica {replica} can come: {why(step, task)}")
    step.set_timer("joiner", task.name, step.config.joiner_ms_max, "joiners get ready")
    return True


def _refill(step: Step, task: TaskState, replica: int, joiners: dict[Rank, WorkerState]) -> None:
    """Some joiners died. The rest is sent away and the replica invited again: rare, and not urgent."""
    for worker in joiners.values():
        end_worker(step, task, worker, f"another joiner of replica {replica} is lost")


def on_joiner_timeout(step: Step, task: TaskState) -> None:
    for worker in list(task.workers.values()):
        if worker.purpose in (Purpose.JOINER, Purpose.STANDBY) and worker.phase is not WorkerPhase.READY:
            end_worker(step, task, worker, "not ready in time to join")
    step.touch(task)
