"""A running task goes over to another layout (tp, pp, dp, sharding of its optimizer), in memory.

1. Newcomers are started where the layout has more roles than the task has workers; training goes on.
2. ChangeLayout announces the plan. The members agree by their commit on the iteration after which they hold; there
   they, and the newcomers, take the state over into new arenas (training/reshard). Each says LayoutReady.
3. When all of them have it, the plan is journaled and published: from then on the task *has* this layout, and a failure
   heals in it. Anything before that (a death, a plan for any other reason, a timeout, our own restart) calls it off:
   the old arenas are whole, and everybody goes back to them.

Rejected: to publish the plan first and move then. A death in the middle would leave neither layout whole.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from unicron.coordinator.journal import AllocationDecided, RolesPlaced, WidthChanged
from unicron.coordinator.layout_change import LayoutChange, place_layout, seats, slots_for
from unicron.coordinator.layout_times import estimated_s, refusal_to_reach
from unicron.coordinator.narrowing import is_width, still_guests, with_copies
from unicron.coordinator.placement import free_slots
from unicron.coordinator.plans import (
    Decision,
    announced,
    forget_change,
    joiners_of,
    let_leave,
    publish,
    publish_plan,
)
from unicron.coordinator.standbys import standbys_of
from unicron.coordinator.state import Purpose, TaskState, node_order
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase, WorkerPhase
from unicron.coordinator.workers import end_worker, start_workers
from unicron.messages import ChangeLayout, LayoutReady, Reply, announced_name
from unicron.types import Layout, PlanKind


def on_reshape(step: Step, request_id: str, name: str, wanted: dict[str, int]) -> None:
    """A person, or a program, asks for another layout. wanted: tp, pp, dp, and sharded (0 or 1) where it changes."""
    task = step.state.tasks.get(name)
    if task is None:
        error = f"no task {name!r}"
        step.answer(request_id, Reply(ok=False, error=error), error)
        return
    sharded = bool(wanted.get("sharded", task.job.layout.sharded))
    layout = msgspec.structs.replace(task.job.layout, **{**wanted, "sharded": sharded})
    layout = with_copies(layout, task.asked.layout)
    reason = f"asked for: {_words(task.job.layout)} -> {_words(layout)}"
    if error := _begin(step, task, layout, reason):
        step.answer(request_id, Reply(ok=False, error=error), error)
        return
    known = estimated_s(step.state, task, layout)
    step.answer(request_id, Reply(ok=True, result={"task": name, "estimated_s": known.seconds}), reason)


def _begin(step: Step, task: TaskState, layout: Layout, reason: str, *, is_width: bool = False) -> str:
    """Why it cannot be; '' when it is under way."""
    if error := _refusal(step, task, layout, is_width):
        return error
    slots = _slots_for(step, task, is_width=is_width)
    placement = place_layout(layout, slots) if layout.world_size > 0 else None
    if placement is None:
        needed, there = layout.world_size, sum(slots.values())
        return f"the layout needs {needed} slots, there are {there}: use a smaller one or start more agents"
    number = step.state.allocation.number
    task.change = LayoutChange(layout, placement, reason, step.now_ms, is_width=is_width, decided=number)
    step.set_timer("layout", task.name, step.config.layout_ms_max, "the new layout must be whole in this time")
    step.touch(task)
    return ""


def _slots_for(step: Step, task: TaskState, *, is_width: bool) -> dict[str, int]:
    """A width is made for what is left of the cluster: without a drained node."""
    slots, known = slots_for(step.state, task), step.state.allocation.nodes
    return {name: count for name, count in slots.items() if name in known} if is_width else slots


def _maybe_begin(step: Step, task: TaskState) -> None:
    """What the planner decided, once a decision, and as soon as the task is whole. A width is tried again: guests must
    not stay, and nobody else would ask."""
    decided = step.state.allocation
    layout = decided.layouts.get(task.name)
    if layout is None or task.phase is not TaskPhase.RUNNING:
        return
    if task.lost or task.reports or task.leaving or task.finished:
        return
    if task.change_asked != decided.number:
        task.change_asked, task.change_tries = decided.number, 0
    width = is_width(task, layout)
    if task.change_tries >= (step.config.join_tries_max if width else 1):
        return
    task.change_tries += 1
    reason = f"{decided.trigger}: {decided.notes.get(task.name, '')}"
    task.change_refused = _begin(step, task, layout, reason, is_width=width)


def _is_outdated(step: Step, task: TaskState, change: LayoutChange) -> bool:
    """A width that the planner does not want any more, or not there."""
    decided = step.state.allocation
    if not change.is_width or change.decided == decided.number:
        return False
    slots, wanted = _slots_for(step, task, is_width=True), Counter(change.placement.values())
    fits = all(count <= slots.get(node, 0) for node, count in wanted.items())
    if not fits or decided.layouts.get(task.name) != change.layout:
        return True
    change.decided = decided.number
    return False


def _refusal(step: Step, task: TaskState, layout: Layout, is_width: bool) -> str:
    if task.phase is not TaskPhase.RUNNING or task.plan is None:
        return f"task {task.name} is {task.phase.value}: its layout changes while it runs"
    if task.change is not None:
        return f"task {task.name} is going over to {_words(task.change.layout)} already"
    if task.leaving:
        return f"task {task.name} leaves its slots: {task.leaving}"
    if task.on_gpu:
        return "layouts change in memory on CPUs only in this version"
    return "" if is_width else refusal_to_reach(task.job, layout)


def _words(layout: Layout) -> str:
    return f"{layout.tp},{layout.pp},{layout.dp}" + ",sharded" * layout.sharded


# ------------------------------------------------------------ the way


def settle_guests(step: Step, task: TaskState) -> None:
    """Whoever has got the slot beside which it is: another task left it, or it was decided so."""
    if not task.guests:
        return
    target, free = step.state.target(task.name), free_slots(step.state)
    seated = [rank for rank, node in task.guests.items() if target.get(rank) == node and free.get(node, -1) >= 0]
    if seated:
        reason = f"ranks {sorted(seated)} are guests no more: there are slots for them"
        step.write(RolesPlaced(task.name, task.placement, still_guests(task, seated)), reason)


def settle_change(step: Step, task: TaskState) -> None:
    if task.change is None:
        _maybe_begin(step, task)
    change = task.change
    if change is None or task.plan is None:
        return
    if task.leaving or task.finished:
        call_off(step, task, "the task ends" if task.finished else task.leaving)
        return
    if task.phase is not TaskPhase.RUNNING or task.lost or task.reports:
        return  # a recovery comes first; its plan calls off what was announced (plans.publish)
    if change.failed:
        call_off(step, task, change.failed)
    elif _is_outdated(step, task, change):
        call_off(step, task, f"something else was decided: {step.state.allocation.trigger}")
    elif lost := sorted(n for n in set(change.placement.values()) if step.state.nodes[n].phase is NodePhase.LOST):
        call_off(step, task, f"{', '.join(lost)}, where roles were to go, is lost")
    elif change.plan is None:
        _maybe_announce(step, task, change)
    elif gone := sorted(_participants(task, change) - task.workers.keys()):
        call_off(step, task, f"{', '.join(gone)} took part and is gone")
    elif change.ready.keys() >= _participants(task, change) and _all_hear(step, task, change):
        _decide(step, task, change)


def _all_hear(step: Step, task: TaskState, change: LayoutChange) -> bool:
    """A plan cannot reach a node that is suspected: its return, or its verdict, comes first."""
    nodes = {*task.nodes(), *change.placement.values()}
    return all(step.state.nodes[name].phase is NodePhase.UP for name in nodes)


def _members(task: TaskState) -> dict[str, list[str]]:
    """By node; guests last, so that they are those who leave."""
    assert task.plan is not None
    found: dict[str, list[str]] = {}
    for member in sorted(task.plan.members, key=lambda member: member.rank in task.guests):
        found.setdefault(member.node, []).append(member.worker)
    return found


def _participants(task: TaskState, change: LayoutChange) -> set[str]:
    assert task.plan is not None and change.plan is not None
    return {m.worker for m in (*task.plan.members, *change.plan.members)}


def _maybe_announce(step: Step, task: TaskState, change: LayoutChange) -> None:
    """As soon as everybody who joins is ready, and every node hears."""
    taken, missing = seats(change, _members(task))
    joiners = joiners_of(task)
    for rank, worker in joiners.items():
        if missing.get(rank) != worker.node:
            end_worker(step, task, worker, "another layout is coming: it is built for the present one")
    wanted = [(node, rank, Purpose.JOINER) for rank, node in missing.items() if rank not in joiners]
    if wanted:
        if _has_room(step, task, Counter(node for node, _, _ in wanted)):
            start_workers(step, task, wanted, change.reason, layout=change.layout)
        return
    if not _all_hear(step, task, change):
        return
    if not all(worker.phase is WorkerPhase.READY for worker in joiners.values()):
        return
    members = taken | {rank: joiners[rank].name for rank in missing}
    ranks = sorted(members)
    decision = Decision(PlanKind.RESHAPE, members, ranks, (), change.reason)
    change.plan = announced(step, task, decision, change.layout)
    change.begun_ms = step.now_ms
    tell(step, task)


def _has_room(step: Step, task: TaskState, wanted: Counter[str]) -> bool:
    """For newcomers, now. Who stands by for a role of the present layout makes room; others are waited for."""
    free = free_slots(step.state)
    full = {node for node, count in wanted.items() if count > free.get(node, 0)}
    for node, workers in standbys_of(task).items():
        for worker in workers if node in full else ():
            end_worker(step, task, worker, "another layout is coming: it is built for the present one")
    return not full


def tell(step: Step, task: TaskState, only: str = "") -> None:
    """Told again to a node that comes back: an agent passes it on, and a worker takes it once."""
    change = task.change
    if change is None or change.plan is None or task.plan is None:
        return
    order = ChangeLayout(task.name, task.plan, change.plan, change.reason)
    for node in [only] if only else sorted({*task.nodes(), *change.placement.values()}, key=node_order):
        step.send(node, order, change.reason)


def on_layout_ready(step: Step, task: TaskState, body: LayoutReady) -> None:
    change = task.change
    if body.epoch <= task.epoch:
        step.refuse("stale_epoch", f"layout of epoch {body.epoch}, now {task.epoch}")
        return
    plan = change.plan if change is not None and change.plan is not None and change.plan.epoch == body.epoch else None
    holds_only = body.iteration < 0 and not body.error
    if change is None or plan is None or (holds_only and body.digest != announced_name(plan)):
        # A former coordinator announced it: they hold, and nobody will ever say that all are ready.
        if task.phase is TaskPhase.RUNNING and not task.lost:
            task.epoch_floor = max(task.epoch_floor, body.epoch)
            _send_back(step, task, "a change of layout that a former coordinator announced is called off")
        return
    if holds_only:
        return
    if body.error:
        change.failed = f"{body.worker}: {body.error}"
    change.ready[body.worker] = body
    task.iteration = max(task.iteration, body.iteration)
    step.touch(task)


def _decide(step: Step, task: TaskState, change: LayoutChange) -> None:
    """Everybody has it: journaled, and the former layout's arenas go."""
    former, plan = task.plan, change.plan
    assert former is not None and plan is not None
    if len({(r.iteration, r.digest) for r in change.ready.values()}) != 1:
        call_off(step, task, "the participants do not agree on what they have")
        return
    task.change = None
    step.cancel_timer("layout", task.name, "everybody has the new layout")
    targets = {**step.state.allocation.targets, task.name: dict(change.placement)}
    layouts = {name: layout for name, layout in step.state.allocation.layouts.items() if name != task.name}
    decided = msgspec.structs.replace(step.state.allocation, targets=targets, layouts=layouts)
    step.write(AllocationDecided(decided), change.reason)
    kept = {m.worker for m in plan.members}
    for worker in list(task.workers.values()):
        if worker.name not in kept and task.role_of(worker.name) is None:
            end_worker(step, task, worker, "built for the former layout")
    was = task.asked
    if not change.is_width and task.wide is not None:
        step.write(WidthChanged(task.name, None), "another layout was asked for")
    elif change.is_width and task.wide is None:
        step.write(WidthChanged(task.name, was), f"until there are slots again: {change.reason}")
    publish_plan(step, task, plan, change.reason)
    if task.wide is not None and task.wide.layout == plan.layout:
        step.write(WidthChanged(task.name, None), "as wide as it was")
    task.decided_ms = change.begun_ms
    let_leave(step, task, former, f"the task has no role for it since epoch {plan.epoch}")
    note_move(task, former.layout, change, step.now_ms)


def note_move(task: TaskState, former: Layout, change: LayoutChange, now_ms: float) -> None:
    """For people and for the planner: what it cost."""
    one = next(iter(change.ready.values()))
    parts = {part for ready in change.ready.values() for part in ready.seconds}
    task.moves.append(
        {
            "epoch": one.epoch, "iteration": one.iteration, "from": _words(former), "to": _words(change.layout),
            "digest": one.digest, "tensors": one.num_tensors, "state_bytes": one.state_bytes,
            "bytes_own": one.bytes_own, "bytes_node": one.bytes_node, "bytes_cross": one.bytes_cross,
            "held_s": (now_ms - change.begun_ms) / 1000,
            "parts_s": {p: max(r.seconds.get(p, 0.0) for r in change.ready.values()) for p in sorted(parts)},
        }
    )  # fmt: skip


# ------------------------------------------------------------ called off


def call_off(step: Step, task: TaskState, reason: str) -> None:
    """Whoever holds goes back to the present layout; newcomers are not needed."""
    change = task.change
    if change is None:
        return
    if change.plan is None or task.finished:
        forget_change(step, task, reason)
        return
    change.failed = change.failed or reason
    if task.phase is TaskPhase.RUNNING and not task.lost:
        _send_back(step, task, change.failed)  # publishing it forgets the change
    # Else a recovery's plan does so, or, when it ends without one, the next step.


def _send_back(step: Step, task: TaskState, reason: str) -> None:
    assert task.plan is not None
    members = {m.rank: m.worker for m in task.plan.members}
    publish(step, task, Decision(PlanKind.RECONNECT, members, tuple(members), (), reason))


def on_layout_timeout(step: Step, task: TaskState) -> None:
    seconds = step.config.layout_ms_max / 1000
    call_off(step, task, f"the new layout was not whole within {seconds:g} s")
    step.touch(task)
