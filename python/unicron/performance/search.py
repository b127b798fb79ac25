"""T(t, x): every layout of a task tried on every number of GPUs, the best kept; T(t, x) = max over x' <= x.

Exhaustive, because it can be: what a micro-batch takes does not depend on dp (but for where the neighbours stand), so
the loop over dp only adds a few numbers. Rejected: T at the planner's units only (spare slots of another task would
then not be worth what they are).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from unicron.performance.calibration import Calibration, Efficiency, Software
from unicron.performance.compiled import compiled
from unicron.performance.errors import PerformanceError
from unicron.performance.machine import Machine, checked_machine
from unicron.performance.measured import replace_measured
from unicron.performance.memory import (
    RECOMPUTE_FULL,
    RECOMPUTE_NONE,
    RECOMPUTE_SELECTIVE,
    gpu_memory_bytes,
)
from unicron.performance.model import iteration_s, stage_times
from unicron.performance.shape import ModelShape, checked_shape, divisors, sample_flop

GPUS_MAX = 1 << 17
BATCH_MAX = 1 << 20
MICRO_BATCH_MAX = 64


class TaskModel(NamedTuple):
    """What is asked: a shape, and the batch that an iteration trains, kept whatever the number of GPUs."""

    shape: ModelShape
    global_batch: int  # samples
    uneven: bool = False  # may replicas compute different numbers of micro-batches?


class TaskLayout(NamedTuple):
    """One way to spread a task. recompute: 0 none, 1 attention's core, 2 every layer."""

    tp: int
    pp: int
    dp: int
    vpp: int
    micro_batch: int
    recompute: int

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


class Estimate(NamedTuple):
    """What the model says of one layout."""

    iteration_s: float
    memory_bytes: float  # of the fullest GPU
    flops: float  # model FLOP/s of the whole task


class Throughput(NamedTuple):
    """T(t, x), x = 0..gpus_max: flops[x] in FLOP/s of the whole task, rising; layouts[x] reaches it, None where 0."""

    flops: NDArray[np.float64]
    layouts: list[TaskLayout | None]


# ---------------------------------------------------------------- one layout


def estimate(task: TaskModel, machine: Machine, calibration: Calibration, layout: TaskLayout) -> Estimate:
    """Time and memory of one layout, whether it fits or not.

    Raises PerformanceError for a layout that the task cannot have.
    """
    shape = checked_task(task).shape
    checked_machine(machine)
    problem = refusal_of(task, calibration.software, layout)
    if problem:
        raise PerformanceError(problem)
    tp, pp, dp, vpp, micro_batch, which = layout
    micro_batches = math.ceil(task.global_batch / (micro_batch * dp))
    software, efficiency = calibration.software, calibration.efficiency
    stage = stage_times(shape, machine, software, efficiency, (tp, pp, dp, vpp), (which, micro_batch))
    seconds = iteration_s(machine, software, efficiency, stage, (tp, pp, dp, vpp), micro_batches) / calibration.scale
    memory = gpu_memory_bytes(shape, software, (tp, pp, dp, vpp), micro_batches, (which, micro_batch))
    return Estimate(seconds, memory, sample_flop(shape) * task.global_batch / seconds)


def refusal_of(task: TaskModel, software: Software, layout: TaskLayout) -> str:
    """Why this task cannot have the layout; "" if it can."""
    shape = task.shape
    if min(layout[:5]) < 1 or layout.recompute not in (RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL):
        return f"{layout} has a size below 1, or no known way to recompute"
    if shape.heads % layout.tp:
        return f"tp {layout.tp} does not divide {shape.heads} heads"
    if layout.pp > shape.layers + 2 or (layout.vpp > 1 and shape.layers % (layout.pp * layout.vpp)):
        return f"{shape.layers} layers cannot be cut into pp {layout.pp} x vpp {layout.vpp}"
    if layout.vpp > 1 and (layout.pp == 1 or not software.interleaved):
        return f"vpp {layout.vpp} needs pp above 1 and software that interleaves"
    if layout.micro_batch * layout.dp > task.global_batch:
        return f"dp {layout.dp} x micro-batch {layout.micro_batch} exceed the global batch {task.global_batch}"
    if not task.uneven and task.global_batch % (layout.micro_batch * layout.dp):
        return f"dp {layout.dp} x micro-batch {layout.micro_batch} do not divide the global batch {task.global_batch}"
    return ""


def checked_task(task: TaskModel) -> TaskModel:
    """The task with its shape's usual values filled in. Raises PerformanceError for a batch that is no whole number."""
    if not isinstance(task.global_batch, int) or not 1 <= task.global_batch <= BATCH_MAX:
        raise PerformanceError(f"global_batch must be a whole number from 1 to {BATCH_MAX}, not {task.global_batch!r}")
    return task._replace(shape=checked_shape(task.shape))


# ---------------------------------------------------------------- all layouts


def candidates(task: TaskModel, machine: Machine, software: Software, gpus_max: int) -> NDArray[np.int64]:
    """(n, 5): tp, pp, vpp, micro-batch, recompute; everything of a layout but dp. tp stays inside a node."""
    shape = task.shape
    rows = []
    for tp in divisors(shape.heads):
        for pp in divisors(shape.layers):
            if tp > machine.gpus_per_node or tp * pp > gpus_max:
                continue
            virtual = divisors(shape.layers // pp) if pp > 1 and software.interleaved else [1]
            rows += [(tp, pp, vpp, size) for vpp in virtual for size in micro_batch_sizes(task)]
    ways = (RECOMPUTE_NONE, RECOMPUTE_FULL)
    if not software.fused_attention:
        ways = (RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL)  # type: ignore[assignment]
    return np.array([(*row, which) for row in rows for which in ways], dtype=np.int64).reshape(-1, 5)


def micro_batch_sizes(task: TaskModel) -> list[int]:
    if task.uneven:
        return [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= task.global_batch]
    return [size for size in divisors(task.global_batch) if size <= MICRO_BATCH_MAX]


@compiled
def _search(
    shape: ModelShape,
    hardware: tuple[Machine, Software, Efficiency],
    rows: NDArray[np.int64],
    batch: tuple[int, bool],
    best_s: NDArray[np.float64],
    best: NDArray[np.int64],
) -> float:
    """Fills best_s[x] (seconds) and best[x] = (row, dp) for exactly x GPUs; the least memory that any layout needs."""
    machine, software, efficiency = hardware
    global_batch, uneven = batch
    least_bytes = np.inf
    for row in range(len(rows)):
        tp, pp, vpp, micro_batch, which = rows[row]
        replica = tp * pp
        whole = global_batch // micro_batch
        previous = 0
        for dp in range(1, min((len(best_s) - 1) // replica, whole) + 1):
            if not uneven and whole % dp:
                continue
            micro_batches = (whole + dp - 1) // dp
            split = (tp, pp, dp, vpp)
            if vpp > 1 and micro_batches % pp:
                continue  # the interleaved schedule goes in groups of pp
            memory = gpu_memory_bytes(shape, software, split, micro_batches, (which, micro_batch))
            least_bytes = min(least_bytes, memory)
            if memory > machine.memory_bytes:
                continue
            if previous == 0 or tp * previous * pp <= machine.gpus_per_node:
                stage = stage_times(shape, machine, software, efficiency, split, (which, micro_batch))
            previous = dp
            seconds = iteration_s(machine, software, efficiency, stage, split, micro_batches)
            if seconds < best_s[replica * dp]:
                best_s[replica * dp] = seconds
                best[replica * dp, 0] = row
                best[replica * dp, 1] = dp
    return least_bytes


def throughput(
    task: TaskModel,
    machine: Machine,
    calibration: Calibration,
    gpus_max: int,
    measured: Mapping[int, float] | None = None,
) -> Throughput:
    """T(t, x) for 0..gpus_max GPUs. measured: FLOP/s by number of GPUs; it replaces the model where it exists.

    Raises PerformanceError where any input is out of range, and where no layout of at most gpus_max GPUs fits.
    """
    task = checked_task(task)
    checked_machine(machine)
    if not isinstance(gpus_max, int) or not 1 <= gpus_max <= GPUS_MAX:
        raise PerformanceError(f"gpus_max must be a whole number from 1 to {GPUS_MAX}, not {gpus_max!r}")
    rows = candidates(task, machine, calibration.software, gpus_max)
    best_s = np.full(gpus_max + 1, np.inf)
    best = np.zeros((gpus_max + 1, 2), dtype=np.int64)
    hardware = (machine, calibration.software, calibration.efficiency)
    least = _search(task.shape, hardware, rows, (task.global_batch, task.uneven), best_s, best)
    if not np.isfinite(best_s).any() and not measured:
        raise PerformanceError(
            f"no layout on up to {gpus_max} GPUs fits: the best needs {least / 2**30:.1f} GiB a GPU, "
            f"a GPU has {machine.memory_bytes / 2**30:.1f}"
        )
    flops = sample_flop(task.shape) * task.global_batch * calibration.scale / best_s
    layouts = [_layout(rows, best[x]) if math.isfinite(best_s[x]) else None for x in range(gpus_max + 1)]
    if measured:
        replace_measured(flops, layouts, measured)
    return envelope(flops, layouts)


def _layout(rows: NDArray[np.int64], found: NDArray[np.int64]) -> TaskLayout:
    tp, pp, vpp, micro_batch, which = (int(value) for value in rows[found[0]])
    return TaskLayout(tp, pp, int(found[1]), vpp, micro_batch, which)


def envelope(flops: NDArray[np.float64], layouts: Sequence[TaskLayout | None]) -> Throughput:
    """max over x' <= x: GPUs that no layout can use are spare, and whoever gets them back loses nothing by it."""
    best = np.maximum.accumulate(flops)
    reached = np.where(flops >= best, np.arange(len(flops)), 0)
    source = np.maximum.accumulate(reached)
    return Throughput(best, [layouts[index] for index in source])
