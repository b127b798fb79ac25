"""Who is slow: every rank's own time beside that of its peers (csrc/monitor/pace.h decides; here it is told).

A slow rank, stage or link is an INFO incident: who, by how much, since when. Nothing is ended for it. One that comes
and goes stays one incident, with its history in the timeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from unicron._core import PaceTable
from unicron.coordinator.incident import Incident
from unicron.coordinator.state import TaskState
from unicron.coordinator.step import Step
from unicron.coordinator.workers import is_member
from unicron.messages import WorkerPace
from unicron.types import Layout, Method, Outcome, Rank, Severity, WaitKind

Key = tuple[str, int]  # rank | stage | link | drift, and its index
Verdict = tuple[float, float, int]  # usual ms, present ms, since which iteration
LOOK_MS_PER_RANK = 0.05  # between two looks at a task: of thousands of ranks less than a heartbeat, of a few nothing
NO_WAITS = tuple(0.0 for _ in WaitKind)


@dataclass(slots=True)
class Pace:
    """Of one task; not journaled: a new coordinator learns afresh."""

    layout: Layout
    table: PaceTable
    links: tuple[tuple[WaitKind, tuple[Rank, ...]], ...]
    looked_ms: float = float("-inf")
    owners: dict[Rank, str] = field(default_factory=dict)  # whose samples the table has
    told: dict[tuple[Key, str], str] = field(default_factory=dict)  # (what, worker) -> incident
    slow: set[tuple[Key, str]] = field(default_factory=set)  # of them, those that are slow now


def note_pace(step: Step, paces: Iterable[WorkerPace]) -> None:
    """What one node's heartbeat says of its workers."""
    changed: dict[str, TaskState] = {}
    for pace in paces:
        task = step.state.task_of_worker(pace.worker)
        if task is None or task.plan is None or task.role_of(pace.worker) != pace.rank:
            continue
        _add(task, pace)
        changed[task.name] = task
    for task in changed.values():
        assert task.pace is not None
        between_ms = LOOK_MS_PER_RANK * task.job.layout.world_size  # thousands of ranks report in turn
        if step.now_ms >= task.pace.looked_ms + between_ms:
            task.pace.looked_ms = step.now_ms
            _look(step, task)


def _add(task: TaskState, pace: WorkerPace) -> None:
    known = task.pace
    if known is None or known.layout != task.job.layout:
        known = task.pace = new_pace(task.job.layout, task.job.slow_ratio)
    if known.owners.get(pace.rank) != pace.worker:  # nothing crosses incarnations
        known.table.forget(pace.rank)
        known.owners[pace.rank] = pace.worker
    for sample in pace.samples:
        waits_ms = sample.waits_ms if len(sample.waits_ms) == len(WaitKind) else NO_WAITS
        known.table.add(pace.rank, sample.iteration, sample.compute_ms, list(waits_ms))


def new_pace(layout: Layout, slow_ratio: float) -> Pace:
    ranks = range(layout.world_size)
    stages = [layout.coords(rank)[2] for rank in ranks]
    links: dict[tuple[Rank, ...], WaitKind] = {}
    for rank in ranks:
        tp, dp, pp = layout.coords(rank)
        for kind, members in (
            (WaitKind.TP, [layout.rank_of(t, dp, pp) for t in range(layout.tp)]),
            (WaitKind.PP, [layout.rank_of(tp, dp, p) for p in range(layout.pp)]),
            (WaitKind.DP, list(layout.peers(rank))),
        ):
            if len(members) > 1:
                links[tuple(members)] = kind
    pairs = tuple((kind, members) for members, kind in links.items())
    table = PaceTable(stages, [(int(kind), list(members)) for kind, members in pairs], slow_ratio)
    return Pace(layout, table, pairs)


def _look(step: Step, task: TaskState) -> None:
    pace = task.pace
    assert pace is not None
    slow: dict[tuple[Key, str], Verdict] = {}
    for kind, index, usual_ms, now_ms, since in pace.table.look():
        worker = pace.owners.get(index, "") if kind == "rank" else ""
        if kind != "rank" or (worker in task.workers and is_member(task, task.workers[worker])):
            slow[((kind, index), worker)] = (usual_ms, now_ms, since)
    for key in sorted(slow.keys() - pace.slow):
        _tell(step, task, pace, key, slow[key])
    for key in sorted(pace.slow - slow.keys()):
        _tell_end(step, task, pace, key)
    pace.slow = set(slow)


def _tell(step: Step, task: TaskState, pace: Pace, key: tuple[Key, str], verdict: Verdict) -> None:
    (kind, index), name = key
    cause = _words(task, pace, key[0], verdict)
    before = step.state.incidents.get(pace.told.get(key, ""))
    if before is not None:
        step.change_incident(before, f"again: {cause}", cause=cause)
        return
    worker = task.workers.get(name)
    opened = Incident(
        id="", task=task.name, fault="slow", severity=Severity.INFO, node=worker.node if worker else "",
        rank=index if kind == "rank" else -1, method=Method.STATISTICS, opened_ms=0.0, worker=name,
        incarnation=worker.incarnation if worker else -1, cause=cause, where=_where(pace, key[0]),
        iteration=verdict[2], outcome=Outcome.UNAFFECTED, is_only_told=True,
    )  # fmt: skip
    pace.told[key] = step.open_incident(opened, cause).id


def _tell_end(step: Step, task: TaskState, pace: Pace, key: tuple[Key, str]) -> None:
    before = step.state.incidents.get(pace.told.get(key, ""))
    if before is not None:
        step.change_incident(before, f"{_where(pace, key[0])} is as fast as it was at iteration {task.iteration}")


def _where(pace: Pace, key: Key) -> str:
    kind, index = key
    if kind == "link":
        group, members = pace.links[index]
        return f"{group.name.lower()} group of ranks {', '.join(map(str, members))}"
    return "all ranks" if kind == "drift" else f"{kind} {index}"


def _words(task: TaskState, pace: Pace, key: Key, verdict: Verdict) -> str:
    usual_ms, now_ms, since = verdict
    kind, _ = key
    percent = f"{(now_ms / usual_ms - 1) * 100:.0f} %" if usual_ms > 0 else "much"
    subject = {
        "rank": f"{_where(pace, key)} computes {percent} longer than its peers",
        "stage": f"{_where(pace, key)} computes {percent} longer than it did, the other stages do not",
        "link": f"communication in the {_where(pace, key)} takes {percent} longer than it did",
        "drift": f"all ranks compute {percent} longer than they did",
    }[kind]
    what = "an iteration" if kind == "link" else "a micro-batch"
    return f"{subject}: {now_ms:.1f} ms {what} instead of {usual_ms:.1f}, since iteration {since}"
