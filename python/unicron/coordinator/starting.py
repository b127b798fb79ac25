"""Everybody starts: the first time, after a wait for slots, or after all ended. Then START, or RESTORE."""

from __future__ import annotations

from collections import Counter

from unicron.coordinator.accounting import note_transition
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import RolesPlaced, TaskRestarted, TaskSuspended
from unicron.coordinator.lifecycle import cancel_timers, stop_task
from unicron.coordinator.placement import free_slots
from unicron.coordinator.plans import Decision, forget_change, forget_move, publish
from unicron.coordinator.state import Purpose, TaskState, WorkerState
from unicron.coordinator.steering import why
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import end_worker, start_workers
from unicron.types import Outcome, PlanKind, Rank, Stage

STARTED_AGAIN = (WorkerPhase.READY, WorkerPhase.FINISHED)


def start_all(step: Step, task: TaskState, reason: str) -> None:
    wanted = [(node, rank, Purpose.MEMBER) for rank, node in sorted(task.placement.items())]
    wanted += missing_understudies(step, task)
    start_workers(step, task, wanted, reason)
    task.absent.clear()
    task.decided_ms = step.now_ms
    step.set_timer("join", task.name, step.config.join_ms_max, "every member must join")


def missing_understudies(step: Step, task: TaskState) -> list[tuple[str, Rank, Purpose]]:
    """Understudies that nodes with roles still lack; their guesses are spread over the node's roles."""
    wanted: list[tuple[str, Rank, Purpose]] = []
    if not task.job.managed:
        return wanted
    roles_by_node: dict[str, list[Rank]] = {}
    for rank, home in sorted(task.placement.items()):
        roles_by_node.setdefault(home, []).append(rank)
    have = Counter(
        w.node for w in task.workers.values() if w.purpose is Purpose.UNDERSTUDY and w.phase is not WorkerPhase.ENDING
    )
    for name, roles in sorted(roles_by_node.items()):
        node = step.state.nodes[name]
        if node.phase is not NodePhase.UP:
            continue
        for _ in range(min(task.job.understudies, node.understudies) - have[name]):
            wanted.append((name, roles[task.guesses % len(roles)], Purpose.UNDERSTUDY))
            task.guesses += 1
    return wanted


def replenish(step: Step, task: TaskState) -> None:
    """New understudies, once the healed iteration is over; not for ever, if they cannot start."""
    if task.phase is TaskPhase.RUNNING and task.understudies_lost <= task.job.restart_max:
        wanted = missing_understudies(step, task)
        if wanted:
            start_workers(step, task, wanted, "a node lacks its understudy")


def settle_starting(step: Step, task: TaskState) -> None:
    """STARTING: replace who died on the way, leave out what cannot start, go when all members are up."""
    task.absent.clear()  # whoever gets up next is looked at, unless the end of this look says who is missing
    _end_left_out(step, task, [w for w in task.workers.values() if w.rank not in task.placement])
    members = _members(task)
    wanted: list[tuple[str, Rank, Purpose]] = []
    dropped: set[int] = set()
    target = step.state.target(task.name)
    for rank, name in sorted(task.placement.items()):
        phase = step.state.nodes[name].phase
        if phase is NodePhase.LOST or target.get(rank) != name:
            dropped.add(task.job.layout.replica_of(rank))
        elif rank not in members and rank not in task.finished and phase is NodePhase.UP:
            wanted.append((name, rank, Purpose.MEMBER))
    if not target:
        wait_for_slots(step, task, why(step, task))
        return
    if not task.job.managed and (dropped or wanted):
        restart_all(step, task, "a worker of an unmanaged script is lost")
        return
    if dropped:
        _drop(step, task, dropped)
        return
    if wanted:
        start_workers(step, task, wanted, "it died before the first epoch")
        return
    here = [members[r] for r in task.placement if r in members]
    task.absent = {w.name for w in here if w.phase not in (WorkerPhase.UP, WorkerPhase.READY)}
    ready = not task.absent
    up = all(step.state.nodes[n].phase is NodePhase.UP for n in task.placement.values())
    if not task.job.managed:
        _settle_unmanaged(step, task, ready and up)
    elif ready and up and len(here) == len(task.placement):
        _go(step, task, members)


def _members(task: TaskState) -> dict[Rank, WorkerState]:
    return {
        w.rank: w for w in task.workers.values() if w.purpose is Purpose.MEMBER and w.phase is not WorkerPhase.ENDING
    }


def _go(step: Step, task: TaskState, members: dict[Rank, WorkerState]) -> None:
    restore = task.checkpoint is not None and task.epoch > 0
    kind = PlanKind.RESTORE if restore else PlanKind.START
    ranks = sorted(task.placement)
    reason = f"all {len(ranks)} members are up"
    names = {rank: members[rank].name for rank in ranks}
    publish(step, task, Decision(kind, names, ranks if restore else (), ranks, reason))
    if restore and task.checkpoint is not None:  # nobody who starts anew knows how far its predecessor was
        lost = max(0, task.iteration - task.checkpoint[0])
        for incident in step.state.open_incidents(task.name):
            step.change_incident(incident, f"back to {task.checkpoint[1]}", iterations_lost=lost)
    if kind is PlanKind.START:
        note_transition(step, task, "start")
        close_started(step, task)  # if all are ready already
        step.touch(task)  # what it shall hold may have changed while it started


def _settle_unmanaged(step: Step, task: TaskState, all_up: bool) -> None:
    if all_up:
        step.cancel_timer("join", task.name, "all workers are up")
        step.move_task(task, "started")
        words = "all members started again (they train on when the script has loaded its own checkpoint)"
        _close(step, step.state.open_incidents(task.name), words)


def close_started(step: Step, task: TaskState) -> None:
    """After a START nobody gives an account: the failures before it are over when every member has built its script,
    and not before, for it may fail there again."""
    plan = task.plan
    if plan is None or plan.kind is not PlanKind.START or task.lost:
        return
    before = [i for i in step.state.open_incidents(task.name) if i.epoch]  # those after it have no plan yet
    if not before:
        return
    holders = [task.workers.get(member.worker) for member in plan.members]
    if all(worker is not None and worker.phase in STARTED_AGAIN for worker in holders):
        _close(step, before, "all members started again")


def _close(step: Step, incidents: list[Incident], reason: str) -> None:
    for incident in incidents:
        step.change_incident(
            incident,
            reason,
            outcome=Outcome.HEALED,
            resume_ms=(incident.detect_ms or 0.0) + step.now_ms - incident.opened_ms,
        )


def _drop(step: Step, task: TaskState, dropped: set[int]) -> None:
    """Begin with the replicas whose slots are there; the others join when they come back."""
    layout = task.job.layout
    left = {r: n for r, n in task.placement.items() if layout.replica_of(r) not in dropped}
    if layout.sharded:
        wait_for_slots(step, task, f"no node for the shards of replicas {sorted(dropped)}")
        return
    if not left:
        wait_for_slots(step, task, "no replica's nodes are left")
        return
    step.write(RolesPlaced(task.name, left), f"replicas {sorted(dropped)} lost a node, or their slots")
    step.touch(task)  # their members are ended at the next look


def end_left_out(step: Step, task: TaskState) -> None:
    """Members of a replica that could not start, when the others have: the order to end them may have been lost with
    the coordinator that gave it. They would wait for ever, on slots that their replica needs to come back."""
    heard = [w for w in task.workers.values() if w.phase in (WorkerPhase.UP, WorkerPhase.READY)]
    never_began = [w for w in heard if w.stage in (Stage.STARTING, Stage.WAITING)]
    _end_left_out(step, task, [w for w in never_began if task.role_of(w.name) is None])


def _end_left_out(step: Step, task: TaskState, workers: list[WorkerState]) -> None:
    for worker in workers:
        if worker.purpose is Purpose.MEMBER:
            end_worker(step, task, worker, "its replica cannot start")


def on_join_timeout(step: Step, task: TaskState) -> None:
    late = [w for w in _members(task).values() if w.phase is WorkerPhase.STARTED]
    seconds = step.config.join_ms_max / 1000
    stop_task(
        step,
        task,
        f"{len(late)} of {len(task.placement)} workers did not call unicron.join() within "
        f"{seconds:g} s (ranks {sorted(w.rank for w in late)}); "
        "a script that never joins must run unmanaged",
    )


# ------------------------------------------------------------ all end, all start again


def nothing_to_restore(task: TaskState) -> bool:
    """Training never silently starts from scratch: iterations were committed and no checkpoint holds them. Who was told
    to begin may have committed unheard (while no coordinator was there, or its node was cut off) and saved, too: that
    nothing was, a death must have shown."""
    is_unknown = task.plan is not None and task.unbegun_epoch != task.epoch
    return _has_committed(task) or (task.job.managed and task.checkpoint is None and is_unknown)


def _has_committed(task: TaskState) -> bool:
    """More than it can go back to."""
    return task.job.managed and task.checkpoint is None and task.iteration > 0


def _stop_with_nothing(step: Step, task: TaskState, reason: str) -> None:
    far = f"{task.iteration} iterations" if task.iteration > 0 else "nobody is left who says how far it was,"
    stop_task(step, task, f"{reason}; {far} and no checkpoint to return to")


def restart_all(step: Step, task: TaskState, reason: str) -> None:
    """Its members are there and were heard: what they committed is known, and known again when they have ended."""
    if _has_committed(task):
        _stop_with_nothing(step, task, reason)
        return
    if task.leaving:  # its slots are wanted elsewhere: it begins again where and when it has some
        _wait(step, task, f"{task.leaving}; {reason}")
        return
    step.write(TaskRestarted(task.name, task.restart_count + 1, reason), reason)
    step.move_task(task, "restarting")
    _end_all(step, task, reason)
    step.touch(task)


def _end_all(step: Step, task: TaskState, reason: str) -> None:
    """All its workers, and with them whatever was under way among them: a change of layout, a move of roles. No plan of
    a recovery comes any more that would call those off."""
    forget_change(step, task, f"called off: {reason}")
    forget_move(step, task, f"called off: {reason}")
    cancel_timers(step, task, reason)
    for worker in list(task.workers.values()):
        end_worker(step, task, worker, reason)


def settle_restarting(step: Step, task: TaskState) -> None:
    """RECOVERING, restarting: when the last worker is gone, all start again where there is room."""
    for worker in list(task.workers.values()):
        end_worker(step, task, worker, "all workers start again")
    if not task.workers and not _maybe_start(step, task):
        wait_for_slots(step, task, "its slots are not free to start again")


def wait_for_slots(step: Step, task: TaskState, reason: str) -> None:
    """All end, nothing is held; it starts again when the allocation gives it slots and they are free."""
    if nothing_to_restore(task):
        _stop_with_nothing(step, task, reason)
        return
    _wait(step, task, reason)


def _wait(step: Step, task: TaskState, reason: str) -> None:
    _end_all(step, task, reason)
    if task.leaving:
        note_transition(step, task, "stop")
    step.write(TaskSuspended(task.name, reason), reason)
    step.move_task(task, "waiting")
    step.touch(task)


def settle_waiting(step: Step, task: TaskState) -> None:
    """WAITING, or SUSPENDED by a person. When nobody of it is left and its slots are free, it starts."""
    if task.is_held and task.phase is TaskPhase.WAITING:
        step.move_task(task, "held")
    elif not task.is_held and task.phase is TaskPhase.SUSPENDED:
        step.move_task(task, "released")
    for worker in list(task.workers.values()):
        end_worker(step, task, worker, f"the task is {task.phase.value}")
    if not task.workers and task.phase is TaskPhase.WAITING:
        _maybe_start(step, task)


def _maybe_start(step: Step, task: TaskState) -> bool:
    target = step.state.target(task.name)
    free = free_slots(step.state)
    for node in target.values():
        free[node] = free.get(node, 0) - 1
    if not target or any(free[node] < 0 for node in target.values()):
        return False
    if task.job.layout.sharded and len(target) < task.job.layout.world_size:
        return False  # it was to change its layout from there, which it can only while it runs
    reason = why(step, task)
    if _has_committed(task):  # so those said who ended since
        _stop_with_nothing(step, task, reason)
        return True
    step.write(RolesPlaced(task.name, target), reason)
    task.is_restarting = False
    step.move_task(task, "starting")
    start_all(step, task, reason)
    return True
