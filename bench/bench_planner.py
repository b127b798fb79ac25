"""The planner: right by brute force and by HiGHS, look-ups, and what tables and direct solves take.

    brute force   random clusters of up to 4 tasks and 10 slots, all allocations tried
    HiGHS         random clusters of 6 to 16 tasks and 40 to 120 slots, as a mixed-integer program
    table         the plans of a fixed instance for every one-step event: each task loses a slot (reconfigure, standby
                  or wait), loses a process, finishes, loses a node; a node joins; every entry is compared with a
                  direct solve on smaller instances of the same kinds
    direct        one failure, solved when it happens: one dynamic program

dense: min 1, max n, unit 1, T not concave. typical: max at most 4 n / m, units 1 to 8. The same dynamic program in
numba, and HiGHS where it ends in time, stand beside. Everything on one core.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import common
from unicron import _core

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int32]

MTBF_SLOT_S = 1e8
TIMES = {"change": 30.0, "restart": 10.0, "standby": 15.0, "replace": 60.0, "repair": 86400.0}
TRANSITION_S_MAX = 2e5
NODE = 8  # slots
GOALS_MS = {
    ("dense 32x1024", "table"): 60.0,
    ("dense 128x8192", "table"): 10_000.0,
    ("dense 128x8192", "direct"): 700.0,
    ("typical 128x8192", "table"): 1000.0,
    ("typical 128x8192", "direct"): 30.0,
}
TIMES_CHEAPER = 15.0  # the table than one dynamic program per event
HIGHS_S_MAX = 30.0


@dataclass
class Task:
    current: int
    counts: Counts  # with 0
    flops: Floats

    def present(self) -> float:
        return float(self.flops[np.searchsorted(self.counts, self.current)])

    def seconds(self, at_least: float = 0.0) -> Floats:
        healthy = np.where(self.counts == self.current, 0.0, TIMES["change"])
        return np.where(self.counts > 0, np.maximum(healthy, at_least), healthy)


class Instance:
    """Tasks on a cluster of `slots`, and their events."""

    def __init__(self, tasks: list[Task], slots: int, mtbf_slot_s: float = MTBF_SLOT_S) -> None:
        self.tasks = tasks
        self.slots = slots
        self.running_s = mtbf_slot_s / np.maximum(np.arange(slots + NODE + 1), 1)
        self.problem = _core.PlannerProblem(
            [_core.PlannerTask(t.current, t.present(), t.counts, t.flops, t.seconds()) for t in tasks],
            self.running_s,
            TRANSITION_S_MAX,
        )

    def rows(self, pool: int) -> list[Floats]:
        """G of each healthy task, by the formula: the reference of the other solvers."""
        return [t.flops * self.running_s[pool] - t.present() * t.seconds() for t in self.tasks]

    def way(self, pool: int, left: int, task: int = -1, seconds: Floats | None = None) -> _core.PlannerAlternative:
        """`left`: slots after the event, whose D_running counts for all ways to answer it."""
        overrides = [] if task < 0 else [_core.PlannerOverride(task, seconds)]
        return _core.PlannerAlternative(pool, overrides, 0.0, float(self.running_s[left]))

    def events(self) -> list[list[_core.PlannerAlternative]]:
        n = self.slots
        found = [[self.way(n + NODE, n + NODE)]]
        for index, task in enumerate(self.tasks):
            replaced = task.seconds(TIMES["replace"])
            waits = np.where(task.counts == task.current, TIMES["repair"], np.inf)
            found.append(
                [
                    self.way(n - 1, n - 1, index, replaced),
                    self.way(n, n - 1, index, task.seconds(TIMES["standby"])),
                    self.way(n, n - 1, index, waits),
                ]
            )
            found.append([self.way(n, n, index, task.seconds(TIMES["restart"]))])
            found.append([self.way(n, n, index, None)])
            found.append([self.way(n - NODE, n - NODE, index, replaced)])
        return found


def spread(chance: np.random.Generator, reachable: list[Counts], slots: int) -> list[int]:
    """A present count of each task, together within `slots`."""
    held = []
    for index, counts in enumerate(reachable):
        share = slots // (len(reachable) - index)
        held.append(int(counts[np.searchsorted(counts, chance.integers(0, share + 1), side="right") - 1]))
        slots -= held[-1]
    return held


def flops_of(chance: np.random.Generator, counts: Counts) -> Floats:
    """Achieved FLOP/s with steps and dips, as T(t, x) has where x divides badly."""
    rough = np.where(counts % 8 == 0, 1.0, chance.uniform(0.7, 1.0, counts.size))
    flops = chance.uniform(0.5, 2.0) * 3e14 * counts ** chance.uniform(0.75, 0.98) * rough
    return np.asarray(flops, np.float64)


def make(chance: np.random.Generator, reachable: list[Counts], slots: int, mtbf_slot_s: float) -> Instance:
    held = spread(chance, reachable, slots)
    tasks = [Task(current, counts, flops_of(chance, counts)) for current, counts in zip(held, reachable, strict=True)]
    return Instance(tasks, slots, mtbf_slot_s)


def dense(num_tasks: int, slots: int) -> Instance:
    counts = np.arange(slots + 1, dtype=np.int32)
    return make(np.random.default_rng(1), [counts] * num_tasks, slots, MTBF_SLOT_S)


def typical(num_tasks: int, slots: int) -> Instance:
    chance = np.random.default_rng(2)
    reachable = []
    for _ in range(num_tasks):
        unit = int(chance.choice([1, 2, 4, 8]))
        most = int(chance.integers(max(unit, slots // num_tasks), 4 * slots // num_tasks + 1))
        reachable.append(np.array([0, *range(unit, most + 1, unit)], np.int32))
    return make(chance, reachable, slots, MTBF_SLOT_S)


def random_instance(chance: np.random.Generator, tasks: tuple[int, int], slots: tuple[int, int]) -> Instance:
    """Any min, max, unit and holes; failures from rare to so frequent that a move does not pay."""
    pool = int(chance.integers(*slots))
    reachable = []
    for _ in range(int(chance.integers(*tasks))):
        unit, least = (int(chance.integers(1, 4)) for _ in range(2))
        most = int(chance.integers(least, pool + least))
        counts = [count for count in range(least, most + 1, unit) if chance.random() > 0.15]
        reachable.append(np.array([0, *counts], np.int32))
    return make(chance, reachable, pool, float(chance.choice([1e2, 1e3, 1e8])))


# ---------------------------------------------------------------- other solvers


def brute_force(instance: Instance) -> float:
    reward: Any = np.zeros(1)
    used: Any = np.zeros(1, np.int64)
    for task, row in zip(instance.tasks, instance.rows(instance.slots), strict=True):
        reward = np.add.outer(reward, row).ravel()
        used = np.add.outer(used, task.counts).ravel()
    return float(reward[used <= instance.slots].max())


def highs(instance: Instance) -> float:
    """The same as a multiple-choice knapsack; NaN when HiGHS does not end within HIGHS_S_MAX."""
    optimize = importlib.import_module("scipy.optimize")
    sparse = importlib.import_module("scipy.sparse")
    rows = instance.rows(instance.slots)
    scale = max(float(np.abs(row).max()) for row in rows) or 1.0
    choices = [row.size for row in rows]
    owner = np.repeat(np.arange(len(rows)), choices)
    one_each = sparse.csr_matrix((np.ones(owner.size), (owner, np.arange(owner.size))))
    counts = np.concatenate([task.counts for task in instance.tasks]).astype(np.float64)
    found = optimize.milp(
        -np.concatenate(rows) / scale,
        integrality=np.ones(owner.size),
        bounds=optimize.Bounds(0, 1),
        constraints=[
            optimize.LinearConstraint(one_each, 1, 1),
            optimize.LinearConstraint(counts[None, :], -np.inf, instance.slots),
        ],
        options={"mip_rel_gap": 1e-9, "time_limit": HIGHS_S_MAX},
    )
    return -float(found.fun) * scale if found.status == 0 else float("nan")


def sums(rows: Floats, counts: Counts, sizes: Counts, slots: int) -> Floats:
    """The dynamic program's values, plainly; compiled by numba."""
    values = np.zeros(slots + 1)
    after = np.zeros(slots + 1)
    for task in range(rows.shape[0]):
        after[:] = -np.inf
        for choice in range(sizes[task]):
            count = counts[task, choice]
            reward = rows[task, choice]
            for at in range(count, slots + 1):
                after[at] = max(after[at], values[at - count] + reward)
        values, after = after, values
    return values


def padded(instance: Instance) -> tuple[Floats, Counts, Counts]:
    rows = instance.rows(instance.slots)
    width = max(row.size for row in rows)
    rewards, counts = np.zeros((len(rows), width)), np.zeros((len(rows), width), np.int32)
    for index, (row, task) in enumerate(zip(rows, instance.tasks, strict=True)):
        rewards[index, : row.size] = row
        counts[index, : row.size] = task.counts
    return rewards, counts, np.array([row.size for row in rows], np.int32)


# ---------------------------------------------------------------- measurements


def timed_ms(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter_ns()
    result = action()
    return (time.perf_counter_ns() - began) / 1e6, result


def is_same(left: float, right: float, instance: Instance) -> bool:
    size = sum(float(np.abs(row).max()) for row in instance.rows(instance.slots))
    return abs(left - right) <= 1e-8 * max(size, 1.0)


def compare(bench: common.Bench, name: str, instances: list[Instance], other: Callable[[Instance], float]) -> None:
    ours, theirs, num_equal, num_ended = [], [], 0, 0
    for instance in instances:
        ms, plan = timed_ms(lambda i=instance: i.problem.solve([i.way(i.slots, i.slots)]))  # type: ignore[misc]
        ours.append(ms)
        ms, best = timed_ms(lambda i=instance: other(i))  # type: ignore[misc]
        theirs.append(ms)
        num_ended += best == best
        num_equal += is_same(plan.reward_flop, best, instance)
    bench.add(f"{name}: ours", ours, equal=f"{num_equal} of {num_ended}", met=str(num_equal == num_ended))
    bench.add(f"{name}: theirs", theirs)


def lookups(bench: common.Bench, table: _core.PlannerTable) -> None:
    """Milliseconds a look-up; the clock's own time included."""
    ns = [value / 1e6 for value in table.lookup_ns(100_000)]
    bench.add("look-up in C++", ns, goal=0.001, met=str(common.percentile(ns, 99) <= 0.001))
    index = {f"event{number}": number for number in range(table.num_events)}
    names = list(index)
    samples = []
    for number in range(20_000):
        name = names[number * 7919 % len(names)]
        began = time.perf_counter_ns()
        plan = table.lookup(index[name])
        _ = plan.allocation
        samples.append((time.perf_counter_ns() - began) / 1e6)
    bench.add("look-up from Python", samples, goal=0.01, met=str(common.percentile(samples, 99) <= 0.01))


def entries(bench: common.Bench, name: str, instance: Instance) -> None:
    events = instance.events()
    table = instance.problem.table(events)
    samples, num_equal = [], 0
    for number, event in enumerate(events):
        ms, direct = timed_ms(lambda event=event: instance.problem.solve(event))  # type: ignore[misc]
        samples.append(ms)
        found = table.lookup(number)
        num_equal += (found.reward_flop, found.moves) == (direct.reward_flop, direct.moves)
    bench.add(f"{name}: each entry solved", samples, equal=f"{num_equal} of {len(events)}",
              met=str(num_equal == len(events)))  # fmt: skip


def fixed(bench: common.Bench, name: str, instance: Instance, runs: int) -> _core.PlannerTable:
    events = instance.events()
    tables: list[float] = []
    directs: list[float] = []
    table = instance.problem.table([])
    failure = instance.way(instance.slots - 1, instance.slots - 1, 0, instance.tasks[0].seconds(TIMES["replace"]))
    for _ in range(runs):
        ms, table = timed_ms(lambda: instance.problem.table(events))
        tables.append(ms)
        directs.append(timed_ms(lambda: instance.problem.solve([failure]))[0])
    for what, samples in (("table", tables), ("direct", directs)):
        goal = GOALS_MS.get((name, what))
        verdict = {} if goal is None else {"goal": goal, "met": str(float(np.median(samples)) <= goal)}
        bench.add(f"{name}: {what}", samples, **verdict)
    cheaper = len(events) * float(np.median(directs)) / float(np.median(tables))
    bench.rows[-2].facts.update({"events": len(events), "one DP per event / table": cheaper})
    bench.rows[-2].facts["cheaper"] = str(cheaper >= TIMES_CHEAPER)
    return table


def beside(bench: common.Bench, name: str, instance: Instance, runs: int, *, with_highs: bool) -> None:
    try:
        compiled = importlib.import_module("numba").njit(sums)
    except ImportError:
        return
    arrays = padded(instance)
    compiled(*(array[:1] for array in arrays), instance.slots)
    samples = []
    for _ in range(runs):
        ms, values = timed_ms(lambda: compiled(*arrays, instance.slots))
        samples.append(ms)
    plan = instance.problem.solve([instance.way(instance.slots, instance.slots)])
    bench.add(f"{name}: direct in numba", samples, equal=str(is_same(plan.reward_flop, values[-1], instance)))
    if with_highs:
        ms, best = timed_ms(lambda: highs(instance))
        ended = "not ended" if best != best else str(is_same(plan.reward_flop, best, instance))
        bench.add(f"{name}: HiGHS", [ms], equal=ended)


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--clusters", type=common.positive, default=10_000, help="small ones, by brute force")
    parser.add_argument("--middle", type=common.positive, default=200, help="clusters given to HiGHS")
    parser.add_argument("--small", action="store_true", help="without the instances of 8,192 slots")
    arguments: argparse.Namespace = parser.parse_args()
    bench = common.Bench("planner", "ms", configuration={"instructions": _core.planner_instructions(), "cores": 1})
    chance = np.random.default_rng(0)
    small = [random_instance(chance, (1, 5), (1, 11)) for _ in range(arguments.clusters)]
    compare(bench, f"brute force, {len(small)} clusters", small, brute_force)
    try:
        importlib.import_module("scipy.optimize")
        middle = [random_instance(chance, (6, 17), (40, 121)) for _ in range(arguments.middle)]
        compare(bench, f"HiGHS, {len(middle)} clusters", middle, highs)
        has_highs = True
    except ImportError:
        bench.configuration["HiGHS"] = "scipy is not installed"
        has_highs = False
    entries(bench, "dense 16x256", dense(16, 256))
    entries(bench, "typical 32x1024", typical(32, 1024))
    instances = {"dense 32x1024": dense(32, 1024)}
    if not arguments.small:
        instances |= {"typical 128x8192": typical(128, 8192), "dense 128x8192": dense(128, 8192)}
    for name, instance in instances.items():
        table = fixed(bench, name, instance, arguments.runs)
        with_highs = has_highs and not name.startswith("dense 128")  # a million binaries: HiGHS does not end
        beside(bench, name, instance, arguments.runs, with_highs=with_highs)
    lookups(bench, table)
    bench.finish(arguments)


if __name__ == "__main__":
    main()
