"""What running tasks show, in the model's place: measured points, and tables that a job file states.

A measured point also says how far off the model is for this task, so the points that were not measured are scaled by
the mean of those ratios: a task measured at 32 GPUs must not look better at 24 only because the model is an optimist.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unicron.performance.errors import PerformanceError


def checked_points(points: Mapping[int, float], gpus_max: int) -> None:
    """Raises PerformanceError unless every key is in 1..gpus_max and every value is positive and finite (FLOP/s)."""
    for gpus, flops in points.items():
        if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= gpus_max:
            raise PerformanceError(f"throughput of {gpus!r} GPUs: the number must be whole and in 1..{gpus_max}")
        if isinstance(flops, bool) or not isinstance(flops, int | float) or not math.isfinite(flops) or flops <= 0:
            raise PerformanceError(f"throughput of {gpus} GPUs must be positive and finite, not {flops!r}")


def replace_measured(flops: NDArray[np.float64], layouts: Sequence[Any], points: Mapping[int, float]) -> None:
    """Measured FLOP/s into flops (FLOP/s by number of GPUs, changed in place); the rest of it is scaled to them.

    Raises PerformanceError for points that are out of range or not positive and finite.
    """
    checked_points(points, len(flops) - 1)
    ratios = [math.log(value / flops[gpus]) for gpus, value in points.items() if layouts[gpus] is not None]
    if ratios:
        flops *= math.exp(sum(ratios) / len(ratios))
    for gpus, value in points.items():
        flops[gpus] = value


def table_flops(table: Mapping[int, float], *, gpus_min: int, gpus_max: int, unit: int = 1) -> NDArray[np.float64]:
    """T(t, x) for x = 0..gpus_max from a stated table: 0 below gpus_min, max over x' <= x above it.

    Raises PerformanceError for a hole (a multiple of unit in gpus_min..gpus_max that the table does not state), for
    entries outside that range, and for values that are not positive and finite.
    """
    if unit < 1 or not 1 <= gpus_min <= gpus_max:
        raise PerformanceError(f"impossible range of GPUs: {gpus_min}..{gpus_max} in steps of {unit}")
    checked_points(table, gpus_max)
    wanted = set(range(gpus_min, gpus_max + 1, unit))
    if missing := sorted(wanted - table.keys()):
        raise PerformanceError(f"the throughput table has holes: no entry for {missing[:8]} GPUs")
    if strange := sorted(table.keys() - wanted):
        raise PerformanceError(f"the throughput table states {strange[:8]} GPUs, which the task cannot use")
    flops = np.zeros(gpus_max + 1)
    for gpus, value in table.items():
        flops[gpus] = value
    return np.maximum.accumulate(flops)
