"""Which layouts a task can reach, and how long the change would take: for people, and for the planner.

A change that was made before takes what it took (measured). Another is modelled from those that were: a fixed part
(models built, groups made, digests), and the part of the state that no process has already, at the rate that was seen.
Before any was made there is a prior, and it says so.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any, NamedTuple

from unicron.coordinator.job import Job
from unicron.coordinator.layout_change import place_layout, slots_for
from unicron.coordinator.narrowing import layout_of, narrows, widths
from unicron.coordinator.state import State, TaskState
from unicron.types import Layout

PRIOR_S = 10.0  # modelled: before this task changed its layout once


class Estimate(NamedTuple):
    seconds: float
    basis: str  # measured | modelled | prior


def key_of(layout: Layout) -> tuple[int, int, int, bool]:
    """What a change of layout changes."""
    return layout.tp, layout.pp, layout.dp, layout.sharded


def refusal_to_reach(job: Job, layout: Layout) -> str:
    """Why this job must not be brought into this layout; '' when it may."""
    allowed = [key_of(other) for other in job.layouts]
    if not allowed:
        return f"{job.name} names no layouts that it may take: list them as layouts in its job file"
    words = ", ".join(f"{tp},{pp},{dp}" + ",sharded" * sharded for tp, pp, dp, sharded in allowed)
    if key_of(layout) not in allowed:
        return f"{job.name} may take {words} only"
    if key_of(layout) == key_of(job.layout):
        return f"{job.name} has this layout already; it may take {words}"
    return ""


def reachable_layouts(state: State, task: TaskState) -> list[dict[str, Any]]:
    """Every layout that the job allows and the task does not have: does it fit now, and how long the change takes."""
    slots = slots_for(state, task)
    found = []
    for layout in task.job.layouts:
        if key_of(layout) != key_of(task.job.layout):
            known = estimated_s(state, task, layout)
            found.append(
                {
                    "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "sharded": layout.sharded,
                    "slots": layout.world_size, "fits": place_layout(layout, slots) is not None,
                    "estimated_s": round(known.seconds, 3), "basis": known.basis,
                }
            )  # fmt: skip
    return found


def for_planner(state: State, task: TaskState, surviving: int) -> dict[int, tuple[Layout, float]]:
    """Slots -> (the layout on so many that is reached soonest, seconds), of those of which the job says what they earn:
    a layout of unknown speed is nobody's to choose but a person's (unicron reshape). And the widths of one that
    narrows, which keeps so many replicas."""
    job = task.job
    found: dict[int, tuple[Layout, float]] = {}
    if task.on_gpu or not job.managed or task.plan is None:
        return found
    for layout in job.layouts:
        slots = layout.world_size
        if slots not in job.throughput or (slots % job.layout.replica_size == 0 and slots <= job.layout.world_size):
            continue  # a width of the present layout, which costs less to get
        seconds = estimated_s(state, task, layout).seconds
        if slots not in found or seconds < found[slots][1]:
            found[slots] = layout, seconds
    for width in widths(task, surviving) if narrows(task) else ():
        if width != job.layout.dp:
            layout = layout_of(task, width)
            found[layout.world_size] = layout, estimated_s(state, task, layout).seconds
    return found


def estimated_s(state: State, task: TaskState, layout: Layout) -> Estimate:
    """From the hold until everybody has the state in this layout."""
    here, there = _words(task.job.layout), _words(layout)
    same = [move["held_s"] for move in task.moves if (move["from"], move["to"]) == (here, there)]
    if same:
        return Estimate(statistics.fmean(same), "measured")
    if not task.moves:
        return Estimate(PRIOR_S, "prior")
    moving = [move["parts_s"].get("move", 0.0) for move in task.moves]
    fixed = statistics.median(move["held_s"] - part for move, part in zip(task.moves, moving, strict=True))
    moved = sum(move["bytes_node"] + move["bytes_cross"] for move in task.moves)
    rate = moved / sum(moving) if moved and sum(moving) else 0.0
    missing = missing_share(task.job.layout, layout) * task.moves[-1]["state_bytes"]
    return Estimate(max(fixed, 0.0) + (missing / rate if rate else 0.0), "modelled")  # parts are the workers' clocks'


def _words(layout: Layout) -> str:
    return f"{layout.tp},{layout.pp},{layout.dp}" + ",sharded" * layout.sharded


def missing_share(old: Layout, new: Layout) -> float:
    """How much of the state, in copies of all of it, must come from another process: every role holds a box of a unit
    cube (tensor slice, stage, shard), and keeps what its process had of it. Roles are seated in order of rank."""
    missing = 0.0
    for rank in range(new.world_size):
        wanted = _box(new, rank)
        have = _box(old, rank) if rank < old.world_size else [(0.0, 0.0)] * 3
        missing += _volume(wanted) - _volume([_overlap(a, b) for a, b in zip(wanted, have, strict=True)])
    return missing


def _box(layout: Layout, rank: int) -> list[tuple[float, float]]:
    tp, dp, pp = layout.coords(rank)
    shard = (dp / layout.dp, (dp + 1) / layout.dp) if layout.sharded else (0.0, 1.0)
    return [(tp / layout.tp, (tp + 1) / layout.tp), (pp / layout.pp, (pp + 1) / layout.pp), shard]


def _overlap(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return low, max(low, high)


def _volume(box: list[tuple[float, float]]) -> float:
    return float(list(itertools.accumulate((high - low for low, high in box), lambda a, b: a * b))[-1])
