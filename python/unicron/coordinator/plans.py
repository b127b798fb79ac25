"""Making and publishing a plan: journaled first, then sent to every node that has workers of the task."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unicron.coordinator.diagnosis import is_explained
from unicron.coordinator.journal import EpochDecided
from unicron.coordinator.state import Purpose, TaskState, WorkerState, node_order
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import WorkerPhase
from unicron.coordinator.workers import end_worker
from unicron.messages import PublishEpoch, SaveAndHold
from unicron.types import EpochPlan, Layout, Member, PlanKind, Rank


class Decision(NamedTuple):
    kind: PlanKind
    members: dict[Rank, str]  # rank -> worker
    touched: Iterable[Rank]
    heirs: Iterable[Rank]
    reason: str


def publish(step: Step, task: TaskState, decision: Decision) -> None:
    if (task.is_unhealed or _may_be_unmet(task)) and task.plan is not None:
        # A failure during a recovery wounds everybody: some members of a whole replica may have met
        # and compute again while others did not, and only a wounded replica agrees inside itself.
        # (It also makes a plan that some agent missed harmless: the newest one says it all.)
        decision = decision._replace(touched={*decision.touched, *decision.members, *task.plan.touched})
    if task.change is not None and task.change.plan is not None:
        # Members may be anywhere in a change of layout, also in models of the new one: all go back.
        decision = decision._replace(touched={*decision.touched, *decision.members})
        forget_change(step, task, f"called off: {decision.reason}")
    forget_move(step, task, f"called off: {decision.reason}", kept=decision.members.values())
    publish_plan(step, task, _plan_of(step, task, decision, task.job.layout), decision.reason)


def _may_be_unmet(task: TaskState) -> bool:
    """Is somebody perhaps still on the way to the first meeting of all, while another rank of its replica computes and
    waits for it? Of a START nobody gives an account, but the first commit is one: it needs everybody."""
    plan = task.plan
    is_start = plan is not None and plan.kind is PlanKind.START
    known = max([task.iteration, *(report.iteration for report in task.reports.values())])
    return is_start and task.job.managed and task.job.layout.replica_size > 1 and known < 1


def announced(step: Step, task: TaskState, decision: Decision, layout: Layout) -> EpochPlan:
    """The next epoch's plan in another layout; it is published when everybody has the state in it."""
    return _plan_of(step, task, decision, layout)


def publish_plan(step: Step, task: TaskState, plan: EpochPlan, reason: str) -> None:
    step.write(EpochDecided(plan), reason)
    for incident in step.state.open_incidents(task.name):
        if incident.epoch:  # a failure during its recovery: the newer plan closes it too
            continue
        step.change_incident(
            incident,
            f"epoch {plan.epoch}: {reason}",
            epoch=plan.epoch,
            kind=plan.kind,
            decide_ms=(incident.detect_ms or 0.0) + step.now_ms - incident.opened_ms,
        )
    published = PublishEpoch(plan)  # one, which the process encodes once for all nodes
    for node in task.nodes():
        step.send(node, published, reason)
        if task.leaving:  # who held goes on in the new epoch, and a new worker has not heard it
            step.send(node, SaveAndHold(task.name, task.leaving), task.leaving)
    _after(step, task, plan)


def _plan_of(step: Step, task: TaskState, decision: Decision, layout: Layout) -> EpochPlan:
    members = tuple(_member(task, rank, worker) for rank, worker in sorted(decision.members.items()))
    host = step.state.nodes[min({m.node for m in members}, key=node_order)]
    is_restore = decision.kind is PlanKind.RESTORE
    assert not is_restore or task.checkpoint is not None
    return EpochPlan(
        task=task.name,
        epoch=max(task.epoch, task.epoch_floor) + 1,
        kind=decision.kind,
        layout=layout,
        replicas=tuple(sorted({layout.replica_of(r) for r in decision.members})),
        members=members,
        touched=tuple(sorted(set(decision.touched))),
        heirs=tuple(sorted(set(decision.heirs))),
        store=host.store,
        store_key=host.store_key,
        restore=task.checkpoint[1] if is_restore and task.checkpoint else "",
        incidents=tuple(i.id for i in step.state.open_incidents(task.name)),
        reason=decision.reason,
    )


def _member(task: TaskState, rank: Rank, name: str) -> Member:
    """Who has finished may be gone."""
    worker = task.workers.get(name)
    if worker is not None:
        return Member(rank, worker.node, worker.name, worker.incarnation)
    former = task.plan.member(rank) if task.plan is not None else None
    assert former is not None and former.worker == name and rank in task.finished, f"{name} is nowhere"
    return former


def _after(step: Step, task: TaskState, plan: EpochPlan) -> None:
    """The waits of the old epoch end, those of the new one begin."""
    task.reports = {k: r for k, r in task.reports.items() if not is_explained(task, r)}
    task.reports_ripe = False
    task.refills.clear()
    task.waits_why = ""
    if plan.kind is PlanKind.GROW:
        task.joins.clear()
    for kind in ("diagnose", "ready", "join"):
        step.cancel_timer(kind, task.name, "a plan is out")
    for worker in task.workers.values():
        worker.stalled = None
        worker.progress_planned = worker.progress
        step.cancel_timer("stall", worker.name, "a plan is out")
    task.healed = {}
    if plan.kind is PlanKind.START:
        step.move_task(task, "started")
        task.awaiting = set()
        return
    step.move_task(task, "planned")
    task.decided_ms = step.now_ms
    task.awaiting = set(plan.ranks) - task.finished
    task.heal_iteration = task.iteration
    task.heal_low = -1
    step.set_timer("heal", task.name, step.config.heal_ms_max, "every member must give its account")
    step.set_timer(
        "understudy", task.name, step.config.understudy_delay_ms + step.config.heal_ms_max,
        "understudies are replaced after the healing, at the latest then",
    )  # fmt: skip


def joiners_of(task: TaskState) -> dict[Rank, WorkerState]:
    return {
        w.rank: w for w in task.workers.values()
        if w.purpose is Purpose.JOINER and w.phase is not WorkerPhase.ENDING
    }  # fmt: skip


def forget_change(step: Step, task: TaskState, reason: str) -> None:
    """A change of layout will not be: its newcomers are not needed."""
    change, task.change = task.change, None
    if change is None:
        return
    task.change_refused = reason
    if change.is_width and not change.failed:  # by a recovery, which has bounds of its own
        task.change_tries -= 1
    step.cancel_timer("layout", task.name, reason)
    for worker in joiners_of(task).values():
        end_worker(step, task, worker, reason)


def forget_move(step: Step, task: TaskState, reason: str, kept: Iterable[str] = ()) -> None:
    """A move will not be: its joiners may have got anywhere. kept: who holds a role all the same."""
    move, task.moving = task.moving, None
    if move is None:
        return
    step.cancel_timer("move", task.name, reason)
    task.epoch_floor = max(task.epoch_floor, move.plan.epoch)  # what they meet under that number is of this move
    for member in move.plan.members:
        worker = task.workers.get(member.worker)
        if member.rank in move.plan.heirs and worker is not None and worker.name not in set(kept):
            end_worker(step, task, worker, reason)


def let_leave(step: Step, task: TaskState, former: EpochPlan, why: str) -> None:
    """Whoever has no role any more leaves by itself, with exit code 0; the order to end it comes only if it does
    not."""
    for member in former.members:
        worker = task.workers.get(member.worker)
        if worker is not None and task.role_of(worker.name) is None and worker.phase is not WorkerPhase.ENDING:
            worker.move("ending")
            worker.end_reason = why
            step.set_timer("end", worker.name, step.config.end_ms, "it leaves by itself")


def end_leavers(step: Step, task: TaskState, former: EpochPlan) -> None:
    """Survivors of a replica that left hold no role any more; they start anew when their replica comes back."""
    for member in former.members:
        worker = task.workers.get(member.worker)
        if worker is not None and task.role_of(worker.name) is None:
            end_worker(step, task, worker, f"its replica left the task in epoch {task.epoch}")
