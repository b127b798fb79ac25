"""What a journal entry does to the state: the same function for the living machine and for its replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import singledispatch

import msgspec

from unicron.coordinator.journal import (
    Accounted,
    AllocationDecided,
    CheckpointSaved,
    Entry,
    EpochDecided,
    HealingClosed,
    IncidentRecorded,
    JournalUnreadable,
    NodeChecked,
    NodeDeclaredLost,
    NodeDrained,
    NodeJoined,
    NodeRests,
    RolesPlaced,
    TaskAdmitted,
    TaskEnded,
    TaskHeld,
    TaskLeaves,
    TaskOnGpu,
    TaskRestarted,
    TaskStays,
    TaskSuspended,
    TermBegan,
    ThroughputMeasured,
    TransitionMeasured,
    WidthChanged,
    WorkersStarted,
    damaged,
    decode_entry,
)
from unicron.coordinator.state import NodeState, Purpose, State, TaskState, WorkerState
from unicron.coordinator.transitions import TERMINAL, NodePhase, TaskPhase, WorkerPhase
from unicron.types import PlanKind, Rank, Severity

MISFITS = (AssertionError, LookupError, TypeError, ValueError)  # what entries that are whole, and no history, end in


def replay(entries: Iterable[bytes], place: str, apply: Callable[[Entry], object]) -> int:
    """Every entry decoded and applied in order; how many. JournalUnreadable names the entry of `place` that cannot be,
    and says what to do."""
    number = 0
    for number, data in enumerate(entries, 1):
        try:
            apply(decode_entry(data))
        except JournalUnreadable as problem:
            raise JournalUnreadable(f"entry {number} of {place} {problem}") from None
        except MISFITS as error:
            how = damaged(f"it does not fit the entries before it: {error!r}")
            raise JournalUnreadable(f"entry {number} of {place} {how}") from error
    return number


@singledispatch
def apply_entry(entry: Entry, state: State) -> None:
    raise AssertionError(f"no way to apply {type(entry).__name__}")


@apply_entry.register
def _(entry: TermBegan, state: State) -> None:
    state.term = entry.term


@apply_entry.register
def _(entry: NodeJoined, state: State) -> None:
    known = state.nodes.get(entry.node)
    state.nodes[entry.node] = NodeState(
        name=entry.node,
        incarnation=entry.incarnation,
        slots=entry.slots,
        understudies=entry.understudies,
        store=entry.store,
        store_key=entry.store_key,
        phase=known.phase if known else NodePhase.AWAITED,
        since_ms=known.since_ms if known else 0.0,
        drained_by_person=known.drained_by_person if known else False,
        unfit=known.unfit if known else "",
        flaps=known.flaps if known else 0,
        rest_ms=known.rest_ms if known else 0.0,
    )
    if not state.is_started:
        state.nodes[entry.node].phase = NodePhase.AWAITED


@apply_entry.register
def _(entry: NodeDeclaredLost, state: State) -> None:
    node = state.nodes[entry.node]
    node.flaps += 1
    node.rest_ms = 0.0
    if not state.is_started:  # the living machine moves it through the table
        node.phase = NodePhase.LOST
    for task in state.tasks.values():
        for name in [w.name for w in task.workers.values() if w.node == entry.node]:
            rank = task.role_of(name)
            if rank is not None:
                task.lost[rank] = name
            del task.workers[name]


@apply_entry.register
def _(entry: NodeDrained, state: State) -> None:
    state.nodes[entry.node].drained_by_person = entry.drained


@apply_entry.register
def _(entry: NodeChecked, state: State) -> None:
    state.nodes[entry.node].unfit = entry.unfit


@apply_entry.register
def _(entry: NodeRests, state: State) -> None:
    node = state.nodes[entry.node]
    node.rest_ms, node.flaps = entry.rest_ms, entry.flaps


@apply_entry.register
def _(entry: TaskAdmitted, state: State) -> None:
    state.tasks[entry.task] = TaskState(name=entry.task, job=entry.job, on_gpu=bool(state.gpu))


@apply_entry.register
def _(entry: TaskOnGpu, state: State) -> None:
    state.tasks[entry.task].on_gpu = True


@apply_entry.register
def _(entry: AllocationDecided, state: State) -> None:
    state.allocation = entry.allocation


@apply_entry.register
def _(entry: TaskHeld, state: State) -> None:
    task = state.tasks[entry.task]
    task.is_held, task.held_why = entry.held, entry.reason if entry.held else ""
    if not state.is_started:
        if entry.held and task.phase is TaskPhase.WAITING:
            task.phase = TaskPhase.SUSPENDED
        elif not entry.held and task.phase is TaskPhase.SUSPENDED:
            task.phase = TaskPhase.WAITING


@apply_entry.register
def _(entry: TaskLeaves, state: State) -> None:
    state.tasks[entry.task].leaving = entry.reason


@apply_entry.register
def _(entry: TaskStays, state: State) -> None:
    task = state.tasks[entry.task]
    task.leaving = ""
    task.is_pinned = True


@apply_entry.register
def _(entry: ThroughputMeasured, state: State) -> None:
    state.tasks[entry.task].measured_s[entry.replicas] = entry.iteration_s


@apply_entry.register
def _(entry: WorkersStarted, state: State) -> None:
    task = state.tasks[entry.task]
    task.restart_count = entry.restart_count
    for name, incarnation, rank, purpose in entry.workers:
        task.workers[name] = WorkerState(name, entry.node, incarnation, rank, Purpose(purpose))
        count = state.worker_counts.get(entry.node, 0)
        state.worker_counts[entry.node] = max(count, incarnation + 1)
    begins = task.is_restarting or task.phase is TaskPhase.WAITING
    if not state.is_started and not task.is_over and begins:
        task.phase = TaskPhase.STARTING
        task.is_restarting = False


@apply_entry.register
def _(entry: RolesPlaced, state: State) -> None:
    task = state.tasks[entry.task]
    task.placement = dict(entry.placement)
    task.guests = {rank: entry.placement[rank] for rank in entry.guests}


@apply_entry.register
def _(entry: WidthChanged, state: State) -> None:
    task = state.tasks[entry.task]
    if entry.wide is None and task.wide is not None and task.job.layout == task.wide.layout:
        task.job = task.wide
    task.wide = entry.wide


@apply_entry.register
def _(entry: EpochDecided, state: State) -> None:
    plan = entry.plan
    task = state.tasks[plan.task]
    assert plan.epoch > task.epoch, f"epoch {plan.epoch} after {task.epoch}"
    live = {m.worker: m for m in plan.members}
    task.epoch, task.plan = plan.epoch, plan
    if plan.layout != task.job.layout:
        # Widths, and what was measured at them, are those of a layout; only slots compare.
        task.job = msgspec.structs.replace(task.job, layout=plan.layout, replicas_min=0, replicas_unit=1)
        task.measured_s.clear()
        task.meter = None
        task.guests = {}
    task.plans.append((plan.epoch, frozenset(plan.layout.replica_of(r) for r in plan.touched)))
    task.placement = {m.rank: m.node for m in plan.members}
    task.guests = _guests_left(task, task.guests)
    task.is_unhealed = plan.kind is not PlanKind.START
    task.state_lost = ""
    task.lost.clear()
    for worker in task.workers.values():
        if worker.name in live:
            worker.purpose, worker.rank = Purpose.MEMBER, live[worker.name].rank
    if not state.is_started:
        task.phase = TaskPhase.RUNNING if plan.kind is PlanKind.START else TaskPhase.HEALING
        task.awaiting = set() if plan.kind is PlanKind.START else set(plan.ranks)


@apply_entry.register
def _(entry: TaskRestarted, state: State) -> None:
    task = state.tasks[entry.task]
    task.is_restarting = True
    task.restart_count = entry.restart_count
    if task.job.managed:  # of an unmanaged script the incident counts already
        task.restarts += 1
    _forget_membership(task)
    if not state.is_started:
        task.phase = TaskPhase.RECOVERING


@apply_entry.register
def _(entry: TaskSuspended, state: State) -> None:
    task = state.tasks[entry.task]
    task.is_restarting = False
    task.leaving = ""
    task.placement, task.guests = {}, {}
    _forget_membership(task)
    if not state.is_started:
        task.phase = TaskPhase.SUSPENDED if task.is_held else TaskPhase.WAITING


@apply_entry.register
def _(entry: HealingClosed, state: State) -> None:
    task = state.tasks[entry.task]
    task.is_unhealed = False
    if not state.is_started and task.phase is TaskPhase.HEALING:
        task.phase, task.awaiting = TaskPhase.RUNNING, set()


@apply_entry.register
def _(entry: CheckpointSaved, state: State) -> None:
    task = state.tasks[entry.task]
    task.checkpoint = (entry.iteration, entry.path)
    task.is_pinned = False
    task.iteration = max(task.iteration, entry.iteration)


@apply_entry.register
def _(entry: TransitionMeasured, state: State) -> None:
    count, total_s = state.transitions_s.get(entry.kind, (0, 0.0))
    state.transitions_s[entry.kind] = (count + 1, total_s + entry.seconds)


@apply_entry.register
def _(entry: Accounted, state: State) -> None:
    accounts = state.tasks[entry.task].accounts
    elapsed_ms = max(entry.at_ms - accounts.since_ms, 0.0)
    if accounts.kind:
        accounts.spent_ms[accounts.kind] = accounts.spent_ms.get(accounts.kind, 0.0) + elapsed_ms
        accounts.flop += accounts.waf * elapsed_ms / 1000
        state.slot_ms += accounts.slots * elapsed_ms
    accounts.kind, accounts.slots, accounts.waf = entry.kind, entry.slots, entry.waf
    accounts.since_ms = entry.at_ms
    history = state.waf_history
    history.append((entry.at_ms, sum(task.accounts.waf for task in state.tasks.values())))


@apply_entry.register
def _(entry: IncidentRecorded, state: State) -> None:
    incident = entry.incident
    task = state.tasks.get(incident.task)
    if incident.id not in state.incidents:
        state.incident_count += 1
        if task is not None and incident.severity is Severity.SEV2:
            task.restarts += 1
        if incident.severity in (Severity.SEV1, Severity.SEV2):
            state.num_failures += 1
    before = state.incidents.get(incident.id)
    was_sev1 = before is not None and before.severity is Severity.SEV1
    if incident.severity is Severity.SEV1 and incident.node and not was_sev1:
        state.node_faults[incident.node] = state.node_faults.get(incident.node, 0) + 1
    state.incidents[incident.id] = incident
    if incident.missing_slots and incident.healthy_ms is None:
        state.sub_healthy.add(incident.id)
    else:
        state.sub_healthy.discard(incident.id)
    if task is not None:
        task.iteration = max(task.iteration, incident.iteration)


@apply_entry.register
def _(entry: TaskEnded, state: State) -> None:
    task = state.tasks[entry.task]
    task.outcome, task.cause = entry.outcome, entry.cause
    task.iteration_ended = max(task.iteration_ended, entry.iteration)
    task.iteration = max(task.iteration, entry.iteration)
    task.is_restarting = False
    if not state.is_started:
        done = entry.outcome == "done"
        task.phase = TaskPhase.FINISHING if done else TaskPhase.STOPPING


def _guests_left(task: TaskState, guests: dict[Rank, str]) -> dict[Rank, str]:
    """A role that lives elsewhere by now has a slot there, or is a guest of that node."""
    return {rank: node for rank, node in guests.items() if task.placement.get(rank) == node}


def _forget_membership(task: TaskState) -> None:
    """Nobody holds a role any more; the epoch's number stays."""
    task.plan = None
    task.lost.clear()
    task.finished.clear()
    task.missed.clear()
    task.last_heirs = 0
    task.reports.clear()
    task.awaiting = set()
    task.state_lost = ""


def trim(state: State, incidents_max: int, plans_max: int) -> None:
    """Bounds what only explains the past. Open incidents are never dropped."""
    while len(state.incidents) > incidents_max:
        oldest = next((k for k, i in state.incidents.items() if not i.is_open), None)
        if oldest is None:
            break
        del state.incidents[oldest]
        state.sub_healthy.discard(oldest)
    for task in state.tasks.values():
        while len(task.plans) > plans_max:
            task.plans.popleft()
        if task.phase in TERMINAL:
            task.workers = {n: w for n, w in task.workers.items() if w.phase is WorkerPhase.ENDING}
