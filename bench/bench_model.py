"""How far the performance model is from published throughput: each source held out, one point of it as calibration.

The rows and the rules by which they count stand in model_rows.py. For every source (and GPU type in it) the shares of
the model are fitted to all other sources; one row of the held-out source then gives its scale, as a running task's
first measurement would. That row is the one whose *modelled* throughput is the median of its source: chosen without a
look at what was measured; `any point` tells the same with every row taking its turn as the calibration. Errors are
|modelled / measured - 1| in percent, of the rows that did not calibrate.

Beside them stands the error of predicting the median of all rows of the GPU type, held-out ones included, and what a
source's own measurement says of the same layout measured again: no model that sees the layout alone does better. Then:
rank correlation of layouts in a source, decline of a fixed batch over growing GPU counts, the time of a whole search.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import common
import model_fit
import model_rows
from model_rows import Published
from unicron.performance.calibration import calibration_of
from unicron.performance.machine import machine_of
from unicron.performance.search import TaskModel, throughput
from unicron.performance.shape import ModelShape

RANKED_ROWS_MIN = 4  # a rank correlation of fewer says nothing
DIFFERENCE_OF_TWO = 0.954  # its median, in standard errors of one
TWICE = 2000
SEARCHED_GPUS = 8192


class HeldOut(NamedTuple):
    """One source's rows of one GPU type, measured and modelled by a fit that did not see them (FLOP/s per GPU)."""

    name: str
    family: str
    rows: list[Published]
    modelled: list[float]  # before calibration

    def errors(self, point: int) -> list[float]:
        """Percent, of all rows but the one that calibrates."""
        scale = self.rows[point].flops / self.modelled[point]
        return [
            abs(value * scale / row.flops - 1) * 100
            for index, (row, value) in enumerate(zip(self.rows, self.modelled, strict=True))
            if index != point
        ]

    def middle(self) -> int:
        """The row whose modelled throughput is the median: a representative one, known before anything is measured."""
        order = sorted(range(len(self.rows)), key=lambda index: self.modelled[index])
        return order[len(order) // 2]


# ---------------------------------------------------------------- statistics


def ranks(values: Sequence[float]) -> list[float]:
    """1..n; equal values share their mean rank."""
    ordered = sorted(values)
    return [(ordered.index(value) + len(ordered) - ordered[::-1].index(value) + 1) / 2 for value in values]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; 0 where one side never changes."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return 0.0
    return statistics.correlation(ranks(first), ranks(second))


# ---------------------------------------------------------------- measurements


def hold_out(rows: Sequence[Published]) -> list[HeldOut]:
    groups: dict[tuple[str, str], list[Published]] = {}
    for row in rows:
        groups.setdefault((row.source, row.family), []).append(row)
    found = []
    for source in dict.fromkeys(row.source for row in rows):
        efficiency = model_fit.fit([row for row in rows if row.source != source])
        for (name, family), members in groups.items():
            if name == source:
                values = [model_fit.modelled_flops(row, efficiency) for row in members]
                found.append(HeldOut(source[:40], family, members, values))
    return found


def add_errors(bench: common.Bench, groups: Sequence[HeldOut]) -> None:
    for family in sorted({group.family for group in groups}):
        mine = [group for group in groups if group.family == family]
        every = [row.flops for group in mine for row in group.rows]
        median = statistics.median(every)
        guesses = [abs(median / value - 1) * 100 for value in every]
        base = statistics.median(guesses)
        bench.add(f"{family}: predict the median", guesses, p90=common.percentile(guesses, 90))
        several = [group for group in mine if len(group.rows) > 1]
        ways = {
            "held out, one point": [error for group in several for error in group.errors(group.middle())],
            "held out, any point": [e for group in several for at in range(len(group.rows)) for e in group.errors(at)],
        }
        for name, errors in ways.items():
            if errors:
                ratio = statistics.median(errors) / base if base else math.inf
                bench.add(f"{family}: {name}", errors, **{"p90": common.percentile(errors, 90), "x median": ratio})
        again = [error for group in mine for error in measured_again(group.rows)]
        if again:
            bench.add(f"{family}: measured again", again, p90=common.percentile(again, 90))


def measured_again(rows: Sequence[Published]) -> list[float]:
    """Percent, of every row that has the fields of another one of its source, but for what was measured."""
    same: dict[Published, list[float]] = {}
    for row in rows:
        same.setdefault(replace(row, flops=0.0, memory_bytes=0.0, line=0), []).append(row.flops)
    return [abs(one / other - 1) * 100 for values in same.values() for one, other in itertools.permutations(values, 2)]


def rank_table(groups: Sequence[HeldOut]) -> dict[str, dict[str, float]]:
    """Rank correlation of measured and modelled throughput per GPU, by source; and what no model can be above: that of
    the same rows measured twice, simulated with the scatter of rows that were (median, and how often it is 0.8)."""
    again = [error for group in groups for error in measured_again(group.rows)]
    scatter = statistics.median(again) / 100 / DIFFERENCE_OF_TWO
    table = {}
    for group in groups:
        if len(group.rows) < RANKED_ROWS_MIN:
            continue
        measured = [row.flops for row in group.rows]
        twice = sorted(measured_twice(measured, scatter))
        table[f"{group.name} {group.family} ({len(group.rows)})"] = {
            "modelled": rank_correlation(measured, group.modelled),
            "measured twice (simulated)": twice[len(twice) // 2],
            "of these at least 0.8": sum(value >= 0.8 for value in twice) / len(twice),
        }
    return table


def measured_twice(values: Sequence[float], scatter: float) -> list[float]:
    """Rank correlations of the values with the same ones measured again, each off by a normal relative error."""
    drawn = random.Random(0)
    return [rank_correlation(values, [value * (1 + drawn.gauss(0, scatter)) for value in values]) for _ in range(TWICE)]


def declines(groups: Sequence[HeldOut]) -> dict[str, dict[str, float]]:
    """Per source and model of a fixed batch: throughput per GPU on the most GPUs over that on the fewest."""
    found = {}
    for group in groups:
        series: dict[tuple[ModelShape, int], dict[int, tuple[float, float]]] = {}
        for row, value in zip(group.rows, group.modelled, strict=True):
            counts = series.setdefault((row.shape, row.global_batch), {})
            counts[row.gpus] = max(counts.get(row.gpus, (0.0, 0.0)), (row.flops, value))
        for (shape, batch), counts in series.items():
            low, high = min(counts), max(counts)
            if low != high:
                found[f"{group.name} {shape.layers}x{shape.hidden} batch {batch}, {low}->{high} GPUs"] = {
                    "measured": counts[high][0] / counts[low][0],
                    "modelled": counts[high][1] / counts[low][1],
                }
    return found


def search_ms(runs: int) -> list[float]:
    """A whole T(t, 1..8192) of a 175 B model, warm."""
    task = TaskModel(ModelShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200), 6144, uneven=True)
    machine, calibration = machine_of("H100-80GB"), calibration_of("H100-80GB")
    throughput(task, machine, calibration, 64)
    found = []
    for _ in range(runs):
        began = time.perf_counter_ns()
        throughput(task, machine, calibration, SEARCHED_GPUS)
        found.append((time.perf_counter_ns() - began) / 1e6)
    return found


def main() -> None:
    parser = common.parser("How far the performance model is from published throughput.", runs=5)
    parser.add_argument("--data", type=Path, default=default_data(), help="megatron_throughput.csv")
    arguments = parser.parse_args()
    if not arguments.data.is_file():
        raise SystemExit(f"no published rows at {arguments.data}: give --data, or the folder in UNICRON_DATA")
    rows, excluded = model_rows.read(arguments.data)
    bench = common.Bench("performance model", "% error; search: ms", configuration={"rows": len(rows)})
    bench.configuration["left out"] = excluded
    groups = hold_out(rows)
    add_errors(bench, groups)
    bench.configuration["rank correlation"] = rank_table(groups)
    bench.configuration["decline of a fixed batch"] = declines(groups)
    bench.add(f"search over {SEARCHED_GPUS} GPUs (ms)", search_ms(arguments.runs))
    bench.finish(arguments)


def default_data() -> Path:
    folder = os.environ.get("UNICRON_DATA") or Path(__file__).resolve().parents[1].parent / "shared" / "data"
    return Path(folder) / "megatron_throughput.csv"


if __name__ == "__main__":
    main()
