"""Roles of a running task move to other nodes at an iteration boundary: from leaver to joiner, pairwise, no rollback.

For maintenance (drain), for a node that is unfit, for a better plan: whenever a role's target is another node than the
one it lives on, and there is a slot for it.

1. Joiners are standbys on the slots where the roles shall go (standbys.py): built while training goes on.
2. MoveRoles announces the plan. Members and joiners make its groups beside those in use (phase 1), and each says so.
3. MoveRoles again, with `switch`: the members agree by their commit on the iteration after which they hold. There each
   leaver sends its state to its joiner, which says that it has it.
4. When all joiners have it the plan is journaled and published: from then on the roles are where they shall be, all
   meet over the groups that are there already, and the leavers leave.

Until 4 nothing is given up: whatever happens (a death, a plan for any other reason, a bound, our own restart) calls the
move off, and a failure heals as ever, from arenas that nobody touched. Rejected: to publish the plan first and move
then. A leaver that dies in the middle would take the only copy of a sharded state with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unicron.coordinator.incident import Incident
from unicron.coordinator.placement import free_slots
from unicron.coordinator.plans import Decision, announced, forget_move, let_leave, publish, publish_plan
from unicron.coordinator.standbys import differing, standbys_of
from unicron.coordinator.state import Purpose, TaskState, WorkerState, node_order
from unicron.coordinator.steering import why
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.messages import MoveReady, MoveRoles
from unicron.types import EpochPlan, Method, PlanKind, Rank, Severity


@dataclass(slots=True)
class RoleMove:
    """Under way. Not journaled: a coordinator that comes back calls it off."""

    plan: EpochPlan  # announced
    reason: str
    begun_ms: float
    num_participants: int
    prepared: set[str] = field(default_factory=set)  # workers whose groups stand
    ready: dict[str, MoveReady] = field(default_factory=dict)  # joiners that have their state
    is_switching: bool = False
    failed: str = ""


def movable(step: Step, task: TaskState) -> dict[Rank, str]:
    """Of them, those for which somebody is built already, or can be."""
    wanted = differing(step.state, task)
    free = free_slots(step.state)
    for worker in task.workers.values():
        if worker.purpose is Purpose.STANDBY and worker.phase is WorkerPhase.ENDING:
            free[worker.node] = free.get(worker.node, 0) + 1  # soon
    there = {node: len(workers) for node, workers in standbys_of(task).items()}
    found: dict[Rank, str] = {}
    for rank, node in sorted(wanted.items()):
        if there.get(node, 0) > 0:
            there[node] -= 1
        elif free.get(node, 0) > 0 and task.standby_tries.get(node, 0) < step.config.join_tries_max:
            free[node] -= 1
        else:
            continue
        found[rank] = node
    return found


# ------------------------------------------------------------ the way


def settle_move(step: Step, task: TaskState) -> None:
    move = task.moving
    if task.plan is None:
        return
    if move is None:
        if task.phase is TaskPhase.RUNNING and not (task.lost or task.reports or task.leaving or task.finished):
            _maybe_announce(step, task)
        return
    if task.leaving or task.finished:
        call_off(step, task, "the task ends" if task.finished else task.leaving)
    elif task.phase is not TaskPhase.RUNNING or task.lost or task.reports:
        return  # a recovery comes first; its plan calls off what was announced (plans.publish)
    elif move.failed:
        call_off(step, task, move.failed)
    elif gone := sorted(_participants(task, move.plan) - task.workers.keys()):
        call_off(step, task, f"{', '.join(gone)} took part and is gone")
    elif any(differing(step.state, task).get(rank) != _home(move.plan, rank) for rank in move.plan.heirs):
        call_off(step, task, f"another place was decided: {why(step, task)}")
    elif not move.is_switching and move.prepared >= _participants(task, move.plan):
        move.is_switching = True
        tell(step, task)
    elif move.is_switching and move.ready.keys() >= _joiners(move.plan):
        _decide(step, task, move)


def _home(plan: EpochPlan, rank: Rank) -> str:
    member = plan.member(rank)
    return member.node if member is not None else ""


def _joiners(plan: EpochPlan) -> set[str]:
    return {m.worker for m in plan.members if m.rank in plan.heirs}


def _participants(task: TaskState, plan: EpochPlan) -> set[str]:
    assert task.plan is not None
    return {m.worker for m in (*task.plan.members, *plan.members)}


def _maybe_announce(step: Step, task: TaskState) -> None:
    """When somebody is ready for every role that can move, and every node hears."""
    wanted = movable(step, task)
    assert task.plan is not None
    if not wanted or task.change is not None:
        return
    seats = _seats(task, wanted)
    nodes = {*task.nodes(), *wanted.values()}
    if seats is None or any(step.state.nodes[name].phase is not NodePhase.UP for name in nodes):
        return
    places = ", ".join(sorted(set(wanted.values()), key=node_order))
    reason = f"ranks {sorted(wanted)} move to {places}: {why(step, task)}"
    members = {m.rank: m.worker for m in task.plan.members} | {rank: w.name for rank, w in seats.items()}
    plan = announced(step, task, Decision(PlanKind.MOVE, members, wanted, wanted, reason), task.job.layout)
    task.moving = RoleMove(plan, reason, step.now_ms, len(_participants(task, plan)))
    step.set_timer("move", task.name, step.config.move_ms_max, "the roles must have moved in this time")
    tell(step, task)


def _seats(task: TaskState, wanted: dict[Rank, str]) -> dict[Rank, WorkerState] | None:
    """Who takes each role; None while somebody is not ready. Who was built for the role comes first."""
    there = {
        node: [w for w in workers if w.phase is WorkerPhase.READY and w.is_candidate]
        for node, workers in standbys_of(task).items()
    }
    seats: dict[Rank, WorkerState] = {}
    for rank, node in sorted(wanted.items()):
        seat = min(there.get(node, []), key=lambda w: (w.rank != rank, w.incarnation), default=None)
        if seat is None:
            return None
        seats[rank] = seat
        there[node].remove(seat)
    return seats


def tell(step: Step, task: TaskState, only: str = "") -> None:
    """Told again to a node that comes back: an agent passes it on, and a worker takes it once."""
    move = task.moving
    if move is None or task.plan is None:
        return
    order = MoveRoles(task.name, task.plan, move.plan, move.reason, move.is_switching)
    nodes = {m.node for m in (*task.plan.members, *move.plan.members)}
    for node in sorted(nodes & {only} if only else nodes, key=node_order):
        step.send(node, order, move.reason)


def on_move_ready(step: Step, task: TaskState, body: MoveReady) -> None:
    move = task.moving
    if body.epoch <= task.epoch:
        step.refuse("stale_epoch", f"a move of epoch {body.epoch}, now {task.epoch}")
        return
    is_known = move is not None and move.plan.epoch == body.epoch and set(body.joiners) == _joiners(move.plan)
    if move is None or not is_known or (body.phase == "held" and not move.is_switching):
        task.epoch_floor = max(task.epoch_floor, body.epoch)
        if body.phase != "prepared" and task.phase is TaskPhase.RUNNING and not task.lost:
            # A former coordinator announced it: they hold, and nobody will ever say that all are there.
            _send_back(step, task, "a move that a former coordinator announced is called off")
        return
    if body.error:
        move.failed = f"{body.worker}: {body.error}"
    elif body.phase == "prepared":
        move.prepared.add(body.worker)
        if len(move.prepared) < move.num_participants:
            return  # of thousands only the last is looked at closely
    elif body.phase == "moved" and body.worker in _joiners(move.plan):
        move.ready[body.worker] = body
        task.iteration = max(task.iteration, body.iteration)
    step.touch(task)


def _decide(step: Step, task: TaskState, move: RoleMove) -> None:
    """Every joiner has its state: journaled, and the leavers go."""
    former, plan = task.plan, move.plan
    assert former is not None
    iterations = {ready.iteration for ready in move.ready.values()}
    if len(iterations) != 1:
        call_off(step, task, f"the joiners do not agree: iterations {sorted(iterations)}")
        return
    task.moving = None
    task.standby_tries.clear()
    step.cancel_timer("move", task.name, "every joiner has its state")
    first = min(plan.heirs)
    step.open_incident(
        Incident(
            id="", task=task.name, fault="move", severity=Severity.INFO, node=_home(former, first), rank=first,
            method=Method.NOTICE, opened_ms=0.0, cause=move.reason, iteration=iterations.pop(),
        ),
        f"{len(plan.heirs)} roles move, announced {step.now_ms - move.begun_ms:.0f} ms ago",
    )  # fmt: skip
    publish_plan(step, task, plan, move.reason)
    task.decided_ms = move.begun_ms
    places = ", ".join(sorted({_home(plan, rank) for rank in plan.heirs}, key=node_order))
    let_leave(step, task, former, f"its role moved to {places}")


# ------------------------------------------------------------ called off


def call_off(step: Step, task: TaskState, reason: str) -> None:
    """Whoever holds goes on where it is; joiners are not needed."""
    move = task.moving
    if move is None:
        return
    move.failed = move.failed or reason
    if not move.is_switching or task.finished:
        forget_move(step, task, reason)
    elif task.phase is TaskPhase.RUNNING and not task.lost:
        _send_back(step, task, reason)  # publishing it forgets the move
    # Else a recovery's plan does so, or, when it ends without one, the next step.


def _send_back(step: Step, task: TaskState, reason: str) -> None:
    assert task.plan is not None
    members = {m.rank: m.worker for m in task.plan.members}
    publish(step, task, Decision(PlanKind.RECONNECT, members, (), (), reason))


def on_move_timeout(step: Step, task: TaskState) -> None:
    call_off(step, task, f"the roles had not moved within {step.config.move_ms_max / 1000:g} s")
    step.touch(task)
