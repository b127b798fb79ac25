"""A missing replica comes back: prepared beside the running task, taken in by one GROW plan.

Joiners build on stand-in groups like understudies; nobody is disturbed until all roles of the
replica are ready.
A recovery has precedence: GROW is decided in RUNNING only.
"""

from __future__ import annotations

from unicron.coordinator.placement import free_slots, place_replica
from unicron.coordinator.plans import Decision, publish
from unicron.coordinator.state import Purpose, TaskState, WorkerState
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import end_worker, start_workers
from unicron.types import PlanKind, Rank


def settle_growth(step: Step, task: TaskState) -> None:
    plan = task.plan
    if plan is None or task.finished or task.phase not in (TaskPhase.RUNNING, TaskPhase.HEALING):
        return
    layout = task.job.layout
    ready: dict[Rank, str] = {}
    for replica in range(layout.dp):
        if replica in plan.replicas:
            continue
        joiners = _joiners(task, replica)
        if not joiners:
            _invite(step, task, replica)
        elif set(joiners) == set(layout.replica_ranks(replica)):
            if all(w.phase is WorkerPhase.READY for w in joiners.values()):
                ready.update({rank: w.name for rank, w in joiners.items()})
        else:
            _refill(step, task, replica, joiners)
    if ready and task.phase is TaskPhase.RUNNING and not task.reports and _nodes_up(step, task):
        members = {m.rank: m.worker for m in plan.members} | ready
        replicas = sorted({layout.replica_of(r) for r in ready})
        reason = f"replicas {replicas} are ready to join"
        publish(step, task, Decision(PlanKind.GROW, members, ready, ready, reason))


def _nodes_up(step: Step, task: TaskState) -> bool:
    return all(step.state.nodes[n].phase is NodePhase.UP for n in task.nodes())


def _joiners(task: TaskState, replica: int) -> dict[Rank, WorkerState]:
    return {
        w.rank: w
        for w in task.workers.values()
        if w.purpose is Purpose.JOINER and task.job.layout.replica_of(w.rank) == replica
    }


def _invite(step: Step, task: TaskState, replica: int) -> None:
    if task.joins.get(replica, 0) >= step.config.join_tries_max:
        return
    if any(w.phase is WorkerPhase.ENDING for w in task.workers.values()):
        return  # its slot's former process may not be gone yet
    placed = place_replica(task.job.layout, replica, free_slots(step.state))
    if placed is None:
        return
    task.joins[replica] = task.joins.get(replica, 0) + 1
    wanted = [(node, rank, Purpose.JOINER) for rank, node in sorted(placed.items())]
    for node in sorted(set(placed.values())):
        have = any(
            w.node == node and w.purpose is Purpose.UNDERSTUDY for w in task.workers.values()
        )
        if not have and min(task.job.understudies, step.state.nodes[node].understudies) > 0:
            guess = min(rank for rank, home in placed.items() if home == node)
            wanted.append((node, guess, Purpose.UNDERSTUDY))
    start_workers(step, task, wanted, f"replica {replica} can come back")
    step.set_timer("joiner", task.name, step.config.joiner_ms_max, "joiners get ready")


def _refill(step: Step, task: TaskState, replica: int, joiners: dict[Rank, WorkerState]) -> None:
    """Some joiners died. The rest is sent away and the replica invited again: rare, and not
    urgent.
    """
    for worker in joiners.values():
        end_worker(step, task, worker, f"another joiner of replica {replica} is lost")


def on_joiner_timeout(step: Step, task: TaskState) -> None:
    for worker in list(task.workers.values()):
        if worker.purpose is Purpose.JOINER and worker.phase is not WorkerPhase.READY:
            end_worker(step, task, worker, "not ready in time to join")
    step.touch(task)
