"""Fits the shares of the performance model to published rows, and predicts rows with them.

A source's rows share a cluster, a release and a way of counting that no column states. Such a common factor is one
measured point's business (the scale of a calibration), so the fit looks only at how rows of one source differ: it
minimises the mean absolute logarithm of measured over modelled throughput after each source's median has been taken
out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from model_rows import Published
from unicron.performance.calibration import Calibration, Efficiency, Software, stored
from unicron.performance.search import Estimate, TaskLayout, TaskModel, estimate
from unicron.performance.shape import divisors

# Bounds of what is physically possible, and the first guess: what vendors' and papers' microbenchmarks show.
BOUNDS = {
    "matrix": (0.5, 0.95),
    "attention": (0.1, 1.0),
    "misaligned": (0.02, 1.0),
    "hbm": (0.5, 0.95),
    "link": (0.3, 0.95),
    "network": (0.2, 0.95),
    "network_onload": (0.1, 0.95),
    "hidden_tensor": (0.05, 1.0),
    "hidden_reduction": (0.05, 1.0),
    "tail_waves": (0.05, 2.0),
    "tile_fill": (16.0, 512.0),
}
FIRST = {
    "matrix": 0.8,
    "attention": 0.4,
    "misaligned": 1 / 16,  # an A100's vector units beside its tensor cores: 19.5 of 312 TFLOP/s
    "hbm": 0.8,
    "link": 0.7,
    "network": 0.7,
    "network_onload": 0.3,  # all-reduces whose every byte goes through host memory several times
    "hidden_tensor": 0.75,  # the last of four chunks has nothing to hide under
    "hidden_reduction": 0.95,  # the last bucket of gradients, one of dozens, has nothing to hide under
    "tail_waves": 0.5,
    "tile_fill": 256.0,  # a software pipeline of four steps of 64
}
STEPS = (1.3, 1.1, 1.03)  # factors tried in turn, coarse to fine
PRIOR = 0.03  # what leaving the first guess by a factor of e costs, as a mean error
SWEEPS_MAX = 6  # over all shares, per step


def calibration_of_row(row: Published, efficiency: Efficiency) -> Calibration:
    return Calibration(Software(**stored()["software"][row.generation]), efficiency)


def possible_layouts(row: Published, software: Software) -> list[TaskLayout]:
    """The row's layout; where its source leaves a field open, every value of it."""
    virtual = [row.vpp] if row.vpp else [1]
    if not row.vpp and software.interleaved and row.shape.layers % row.pp == 0:
        virtual = divisors(row.shape.layers // row.pp)
    sizes = (
        [row.micro_batch] if row.micro_batch else [b for b in (1, 2, 4, 8, 16) if row.global_batch % (b * row.dp) == 0]
    )
    ways = [row.recompute] if row.recompute >= 0 else [0, 2]
    return [TaskLayout(row.tp, row.pp, row.dp, vpp, size, way) for vpp in virtual for size in sizes for way in ways]


def modelled(row: Published, calibration: Calibration) -> Estimate:
    """The fastest possible layout that fits; where the model believes that none does, the one that needs least."""
    # A published run did run: virtual stages that its generation is not known for are its own.
    software = calibration.software._replace(interleaved=True)
    task = TaskModel(row.shape, row.global_batch, uneven=True)
    found = [
        estimate(task, row.machine, calibration._replace(software=software), layout)
        for layout in possible_layouts(row, calibration.software)
    ]
    fitting = [entry for entry in found if entry.memory_bytes <= row.machine.memory_bytes]
    if not fitting:
        return min(found, key=lambda entry: entry.memory_bytes)
    return max(fitting, key=lambda entry: entry.flops)


def modelled_flops(row: Published, efficiency: Efficiency) -> float:
    """FLOP/s per GPU, before any scale."""
    return modelled(row, calibration_of_row(row, efficiency)).flops / row.gpus


def log_ratios(rows: Sequence[Published], efficiency: Efficiency) -> list[float]:
    """Per row: logarithm of measured over modelled throughput."""
    return [math.log(row.flops / modelled_flops(row, efficiency)) for row in rows]


def spread(rows: Sequence[Published], efficiency: Efficiency) -> float:
    """Mean of |log ratio - its source's median|: what the fit minimises. A source counts by the root of its rows."""
    by_source: dict[tuple[str, str], list[float]] = {}
    for row, ratio in zip(rows, log_ratios(rows, efficiency), strict=True):
        by_source.setdefault((row.source, row.gpu), []).append(ratio)
    total = weight = 0.0
    for ratios in by_source.values():
        centre = statistics.median(ratios)
        share = math.sqrt(len(ratios) - 1)
        total += share * statistics.fmean(abs(ratio - centre) for ratio in ratios)
        weight += share
    return total / weight if weight else 0.0


def cost(rows: Sequence[Published], efficiency: Efficiency) -> float:
    """The spread, and a little for leaving the first guess: what the rows say nothing about stays there."""
    away = sum(abs(math.log(getattr(efficiency, name) / first)) for name, first in FIRST.items())
    return spread(rows, efficiency) + PRIOR * away / len(FIRST)


def fit(rows: Sequence[Published], first: Efficiency | None = None) -> Efficiency:
    """Coordinate search inside BOUNDS: each share up or down by a factor, as long as that helps."""
    best = first or Efficiency(**FIRST)
    least = cost(rows, best)
    for step in STEPS:
        for _ in range(SWEEPS_MAX):
            before = least
            for name, (low, high) in BOUNDS.items():
                for factor in (step, 1 / step):
                    value = min(high, max(low, getattr(best, name) * factor))
                    trial = best._replace(**{name: value})
                    found = cost(rows, trial)
                    if found < least:
                        best, least = trial, found
            if least == before:
                break
    return best
