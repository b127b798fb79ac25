"""Whole nodes that stand warm beside a running task, and what they take over.

A standby is a waiting worker on a slot of its own: the script built for a role that lives elsewhere. Which nodes stand
by is decided with everything else (standing_by.py); here they are started, and sent away when they are not wanted any
more. When a node is lost its roles move to standbys, if the planner finds that worth more than to go on narrower: then
the recovery is a REPLACE like any other, with the same layout and so the same bits (recovery.py).
"""

from __future__ import annotations

from collections import Counter

import msgspec

from unicron.coordinator.deciding import failures_of, transitions_of
from unicron.coordinator.journal import AllocationDecided, RolesPlaced
from unicron.coordinator.narrowing import still_guests
from unicron.coordinator.placement import free_slots
from unicron.coordinator.standing_by import Odds, is_worth_it, roles_of_a_node
from unicron.coordinator.state import Purpose, State, TaskState, WorkerState, node_order
from unicron.coordinator.steering import renew_tables
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import end_worker, start_workers
from unicron.types import Rank

Seats = dict[Rank, WorkerState]


def settle_standbys(step: Step, task: TaskState) -> None:
    """What stands by is what was decided. Changed only while nothing else is the matter."""
    if task.plan is None or task.finished or task.change is not None:
        return
    if task.phase is not TaskPhase.RUNNING or task.lost or task.reports:
        return  # who is on its way to a lost role is needed
    wanted = {} if task.leaving else _wanted(step, task)
    here = standbys_of(task)
    for node, workers in here.items():
        for worker in workers[len(wanted.get(node, ())) :]:
            end_worker(step, task, worker, f"{node} does not stand by for {task.name} any more")
    for node, roles in wanted.items():
        _start(step, task, node, roles, here.get(node, []))


def standbys_of(task: TaskState) -> dict[str, list[WorkerState]]:
    """By node; those that are furthest first."""
    found: dict[str, list[WorkerState]] = {}
    order = (WorkerPhase.READY, WorkerPhase.UP, WorkerPhase.STARTED)
    for worker in task.workers.values():
        if worker.purpose is Purpose.STANDBY and worker.phase in order:
            found.setdefault(worker.node, []).append(worker)
    for workers in found.values():
        workers.sort(key=lambda w: (order.index(w.phase), w.incarnation))
    return dict(sorted(found.items(), key=lambda item: node_order(item[0])))


def _wanted(step: Step, task: TaskState) -> dict[str, tuple[Rank, ...]]:
    """Node -> the roles that its standbys are built for: those of the node that is likeliest to be lost."""
    assert task.plan is not None
    homes: dict[str, list[Rank]] = {}
    for member in task.plan.members:
        homes.setdefault(member.node, []).append(member.rank)
    faults = step.state.node_faults
    likely = sorted(homes, key=lambda node: (-faults.get(node, 0), -len(homes[node]), node_order(node)))
    guesses = [rank for node in likely for rank in homes[node]]
    count = roles_of_a_node({m.rank: m.node for m in task.plan.members})
    wanted = {node: tuple(guesses[:count]) for node in step.state.allocation.standbys.get(task.name, ())}
    for rank, node in differing(step.state, task).items():
        wanted[node] = (*wanted.get(node, ()), rank)
    return wanted


def differing(state: State, task: TaskState) -> dict[Rank, str]:
    """Roles that live elsewhere than they shall, in replicas that shall go on; with the node where they shall."""
    plan, target = task.plan, state.target(task.name)
    if plan is None or not task.job.managed or task.job.layout != plan.layout:
        return {}
    layout = plan.layout
    kept = [r for r in plan.replicas if all(rank in target for rank in layout.replica_ranks(r))]
    return {
        member.rank: target[member.rank]
        for member in plan.members
        if layout.replica_of(member.rank) in kept and target[member.rank] != member.node
    }


def _start(step: Step, task: TaskState, node: str, roles: tuple[Rank, ...], here: list[WorkerState]) -> None:
    missing = len(roles) - len(here)
    if missing <= 0 or step.state.nodes[node].phase is not NodePhase.UP:
        return
    tries = task.standby_tries.get(node, 0)
    missing = min(missing, free_slots(step.state).get(node, 0))
    if tries >= step.config.join_tries_max or missing <= 0:
        return
    task.standby_tries[node] = tries + 1
    guessed = [worker.rank for worker in here]
    todo = [rank for rank in roles if rank not in guessed][:missing]
    start_workers(step, task, [(node, rank, Purpose.STANDBY) for rank in todo], f"{node} stands by for {task.name}")
    step.set_timer("joiner", task.name, step.config.joiner_ms_max, "standbys get ready")


# ------------------------------------------------------------ a node is lost


def take_standbys(step: Step, task: TaskState) -> None:
    """Roles whose node is lost get new homes, where somebody stands by for them."""
    gone = [r for r in sorted(task.lost) if step.state.nodes[task.placement[r]].phase is NodePhase.LOST]
    seats = _seats(step, task, gone)
    if not seats:
        return
    odds = Odds(failures_of(step.state), transitions_of(step.state))
    is_worth, task.standby_why = is_worth_it(step.state, task, sorted(seats), odds)
    if is_worth:
        task.is_adopted = True
        homes = {rank: worker.node for rank, worker in seats.items()}
        nodes = ", ".join(sorted(set(homes.values())))
        move_homes(step, task, homes, f"standbys on {nodes} take ranks {sorted(homes)}")


def _seats(step: Step, task: TaskState, gone: list[Rank]) -> Seats:
    """All lost roles of a replica, or none of them: half a replica is of no use."""
    layout = task.job.layout
    room = _room(step.state, task, gone)
    there = []
    for node, workers in standbys_of(task).items():
        if step.state.nodes[node].phase is NodePhase.UP and not step.state.nodes[node].is_drained:
            ready = [worker for worker in workers if worker.is_candidate or worker.is_coming]
            there += ready[: max(room[node], 0)]
    seats: Seats = {}
    for replica in sorted({layout.replica_of(rank) for rank in gone}):
        ranks = [rank for rank in gone if layout.replica_of(rank) == replica]
        if len(ranks) > len(there):
            continue
        for rank in ranks:
            seats[rank] = min(there, key=lambda w: (w.rank != rank, not w.is_candidate, w.incarnation))
            there.remove(seats[rank])
    return seats


def _room(state: State, task: TaskState, gone: list[Rank]) -> Counter[str]:
    """Slots by node that nobody holds and that are meant for nobody: a standby may be there for a role that shall move
    to it (moves.py); a task that gets no slots any more has those it holds until it left them; and a role of this task
    may have found its new home there a moment ago."""
    room = Counter({node.name: node.slots for node in state.nodes.values()})
    for other in state.tasks.values():
        if not other.is_over:
            homes = {*state.target(other.name).items(), *other.placement.items()}
            room.subtract(node for rank, node in homes if other is not task or rank not in gone)
    return room


def move_homes(step: Step, task: TaskState, homes: dict[Rank, str], reason: str) -> None:
    """What the task shall hold says so too; else the next decision would bring the roles back."""
    before = step.state.allocation
    step.write(RolesPlaced(task.name, {**task.placement, **homes}, still_guests(task, homes)), reason)
    if not step.state.target(task.name):
        return  # it shall leave its slots (pre-empted, suspended): what it holds until then is no target
    targets = {**before.targets, task.name: _new_target(step.state, task, homes)}
    taken = set(homes.values())
    standbys = {name: tuple(n for n in nodes if n not in taken) for name, nodes in before.standbys.items()}
    standbys = {name: nodes for name, nodes in standbys.items() if nodes}
    step.write(AllocationDecided(msgspec.structs.replace(before, targets=targets, standbys=standbys)), reason)
    renew_tables(step, reason)


def _new_target(state: State, task: TaskState, homes: dict[Rank, str]) -> dict[Rank, str]:
    """With these homes. A slot that one of them takes may have been meant for another role whose node is lost and for
    which nobody stood by: the replica of that one is left out, else the next decision believes that it survives."""
    layout = task.job.layout
    target = {**state.target(task.name), **homes}
    lost = {layout.replica_of(rank) for rank in task.lost} - {layout.replica_of(rank) for rank in homes}
    others = Counter(n for name, roles in state.allocation.targets.items() if name != task.name for n in roles.values())
    for replica in sorted(lost, reverse=True):
        wanted = others + Counter(target.values())
        ranks = [rank for rank in layout.replica_ranks(replica) if rank in target]
        if any(wanted[target[rank]] > state.nodes[target[rank]].slots for rank in ranks):
            target = {rank: node for rank, node in target.items() if rank not in ranks}
    return target
