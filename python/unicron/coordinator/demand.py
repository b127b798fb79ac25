"""A task as the planner sees it: which numbers of slots it can take now, and T(t, x) for each.

The planner changes a task's width in whole replicas (tp x pp slots) of its present layout, or brings it into another
layout whose speed the job states, or which is a width of one that narrows (narrowing.py); how long that takes stands in
layout_times.py.
"""

from __future__ import annotations

from unicron.coordinator.narrowing import narrows, widths
from unicron.coordinator.state import TaskState
from unicron.planner.cluster import FLOPS_MAX, WEIGHT_MAX, Task, Workers

NOMINAL_FLOPS = 1e12  # FLOP/s of one slot of a task about which nothing is known: only ratios count then


def replica_counts(task: TaskState, held: int) -> list[int]:
    """Numbers of replicas it may have next, ascending; held: those it has, or keeps of what it had.

    A job that names no least number begins with all of its layout; what survives of it goes on, and is not made smaller
    for others.
    """
    job = task.job
    full = job.layout.num_replicas
    if not job.managed or job.layout.sharded:
        return [full]
    if job.replicas_min:
        counts = list(range(job.replicas_min, full + 1, job.replicas_unit))
        return counts if held == 0 or held in counts else sorted({held, *counts})
    return list(range(held, full + 1)) if held else [full]


def throughput_of(task: TaskState, replicas: int) -> float:
    """T(t, x) in FLOP/s at this number of replicas: measured where it has run, else what the job states or the model
    says, scaled by what was measured elsewhere; below what the task needs 0 (Unicron, WAF)."""
    job = task.job
    if job.managed and replicas < task.asked.replicas_min:
        return 0.0
    if not job.measured or not task.measured_s:
        return _stated(task, replicas)
    rates = {width: _rate(task, width) for width in task.measured_s}
    if not job.replicas_min:  # it wants all of its layout back, also where fewer were no slower
        widest = max(rates)
        return _stated(task, replicas) * rates[widest] / _stated(task, widest)
    if replicas in rates:
        return rates[replicas]
    nearest = min(rates, key=lambda width: (abs(width - replicas), width))
    return _stated(task, replicas) * rates[nearest] / _stated(task, nearest)


def _stated(task: TaskState, replicas: int) -> float:
    slots = replicas * task.job.layout.replica_size
    return task.job.throughput.get(slots, NOMINAL_FLOPS * slots)


def _in_other_layout(task: TaskState, slots: int) -> float:
    """What the job states of it, scaled by what was measured of the widest width of the present one."""
    stated = task.job.throughput[slots]
    if not task.job.measured or not task.measured_s:
        return stated
    widest = max(task.measured_s)
    return stated * _rate(task, widest) / _stated(task, widest)


def _rate(task: TaskState, width: int) -> float:
    """FLOP/s at a measured width. Without the FLOP of an iteration the least measured width counts as stated."""
    seconds = task.measured_s[width]
    if task.job.iteration_flop > 0:
        return task.job.iteration_flop / seconds
    first = min(task.measured_s)
    return _stated(task, first) * task.measured_s[first] / seconds


def demand_of(
    task: TaskState, holds: dict[str, int], surviving: int, widest: int, relayout_s: dict[int, float]
) -> Task:
    """The planner's task. holds: slots by node before the event; surviving: whole replicas that it leaves; widest:
    slots of the widest node: a replica stays inside a node where it fits in one, else its tensor-parallel groups do.
    relayout_s: slots -> seconds, of other layouts. A journal may hold numbers that no job may have any more."""
    layout = task.job.layout
    size = layout.replica_size
    held = sum(holds.values()) // size
    kept = min(surviving, held)
    counts = sorted({*replica_counts(task, kept), *([held] if held else [])})
    others = {slots: s for slots, s in relayout_s.items() if slots % size or slots // size not in counts}
    by_change = [slots // size for slots in others if slots % size == 0] if narrows(task) else []
    known, stated = [*counts, *by_change], others.keys() & task.job.throughput.keys()
    group = next((group for group in (size, layout.tp) if group <= widest), 1)
    return Task(
        name=task.name,
        workers=Workers(min(known) * size, max(layout.num_replicas, *known) * size, size),
        throughput={
            **{slots: min(_in_other_layout(task, slots), FLOPS_MAX) for slots in sorted(stated)},
            **{count * size: min(throughput_of(task, count), FLOPS_MAX) for count in known},
        },
        weight=min(task.job.weight, WEIGHT_MAX),
        group=group,
        holds=holds,
        required=True,
        reachable=tuple(count * size for count in counts),
        relayout_s=others,
    )


def least_slots(task: TaskState, surviving: int) -> int:
    """Slots below which it does not run; surviving: replicas it has."""
    counts = widths(task, surviving) if narrows(task) else replica_counts(task, surviving)
    least = next((count for count in counts if throughput_of(task, count) > 0), counts[0])
    return least * task.job.layout.replica_size


def kept_slots(task: TaskState, surviving: int) -> int:
    """Slots below which it is not admitted: those it needs. One that cannot leave keeps what survives, even below that:
    to stop it would lose all it has done."""
    least = least_slots(task, surviving)
    if surviving and not can_leave(task) and (not task.job.layout.sharded or narrows(task)):
        return min(least, surviving * task.job.layout.replica_size)
    return least


def can_leave(task: TaskState) -> bool:
    """May it be told to give up all its slots and go on later? Not when its state would be lost."""
    if task.is_pinned:
        return False
    return not task.job.managed or bool(task.job.checkpoint_dir) or task.epoch == 0
