"""The planner's core from Python: the same optimum as trying everything, and a table that equals direct solves."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron import _core

pytestmark = pytest.mark.timeout(30)


class Small:
    """A problem small enough to try every allocation."""

    def __init__(self, chance: random.Random) -> None:
        self.pool_max = chance.randint(1, 10)
        self.running_s = np.array([1000.0 / max(n, 1) for n in range(self.pool_max + 1)])
        self.tasks = [self._task(chance) for _ in range(chance.randint(1, 4))]
        self.problem = _core.PlannerProblem(
            [
                _core.PlannerTask(current, present, np.array(counts, np.int32), np.array(flops), np.array(seconds))
                for current, present, counts, flops, seconds in self.tasks
            ],
            self.running_s,
            100.0,
        )

    def _task(self, chance: random.Random) -> tuple[int, float, list[int], list[float], list[float]]:
        unit, least = chance.randint(1, 3), chance.randint(1, 4)
        counts = [0, *(count for count in range(least, self.pool_max + 1, unit) if chance.random() > 0.2)]
        flops = [0.0, *(chance.uniform(0.1, 1) * 1e15 * count for count in counts[1:])]
        at = chance.randrange(len(counts))
        return counts[at], flops[at], counts, flops, [chance.uniform(0, 50) for _ in counts]

    def best(self, pool: int, changed: dict[int, list[float] | None]) -> float:
        """Reward of the best allocation, by trying all of them in plain floating point."""
        rows = []
        for index, (current, present, counts, flops, seconds) in enumerate(self.tasks):
            override = changed.get(index, [])
            if override is None:
                rows.append([(0, 0.0)])
                continue
            row = []
            for at, count in enumerate(counts):
                transition_s = override[at] if override else (0.0 if count == current else seconds[at])
                if transition_s != float("inf"):
                    row.append((count, flops[at] * self.running_s[pool] - present * transition_s))
            rows.append(row)
        return max(
            sum(reward for _, reward in choice)
            for choice in itertools.product(*rows)
            if sum(count for count, _ in choice) <= pool
        )

    def event(self, chance: random.Random) -> tuple[int, dict[int, list[float] | None]]:
        changed: dict[int, list[float] | None] = {}
        for index in chance.sample(range(len(self.tasks)), chance.randint(0, min(2, len(self.tasks)))):
            counts = self.tasks[index][2]
            changed[index] = None if chance.random() < 0.3 else [chance.uniform(1, 99) for _ in counts]
        return chance.randint(0, self.pool_max), changed


def alternative(pool: int, changed: dict[int, list[float] | None], cost_flop: float = 0.0) -> _core.PlannerAlternative:
    overrides = [
        _core.PlannerOverride(index, None if seconds is None else np.array(seconds))
        for index, seconds in sorted(changed.items())
    ]
    return _core.PlannerAlternative(pool, overrides, cost_flop, -1.0)


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_that_of_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        small = Small(chance)
        pool, changed = small.event(chance)
        plan = small.problem.solve([alternative(pool, changed)])
        best = small.best(pool, changed)
        assert plan.reward_flop == pytest.approx(best, rel=1e-9, abs=1e-9 * 1e18)
        assert sum(plan.allocation) <= pool


@pytest.mark.parametrize("seed", range(8))
def test_every_entry_of_the_table_is_a_direct_solve(seed: int) -> None:
    chance = random.Random(1000 + seed)
    for _ in range(20):
        small = Small(chance)
        events = [
            [alternative(*small.event(chance), chance.choice([0.0, 1e15])) for _ in range(chance.randint(1, 3))]
            for _ in range(20)
        ]
        table = small.problem.table(events)
        assert table.num_events == len(events)
        for index, event in enumerate(events):
            found, direct = table.lookup(index), small.problem.solve(event)
            assert (found.reward_flop, found.moves, found.alternative) == (
                direct.reward_flop,
                direct.moves,
                direct.alternative,
            )


def test_ties_move_least() -> None:
    """Every slot earns the same everywhere: nobody moves; with one slot fewer, one moves."""
    counts = np.arange(9, dtype=np.int32)
    flops = counts * 1e12
    tasks = [_core.PlannerTask(held, held * 1e12, counts, flops, np.zeros(9)) for held in (3, 1, 4)]
    problem = _core.PlannerProblem(tasks, np.ones(9), 1.0)
    plan = problem.solve([alternative(8, {})])
    assert (plan.allocation, plan.moves) == ([3, 1, 4], 0)
    assert problem.solve([alternative(7, {})]).moves == 1


def test_wrong_buffers_are_refused_by_name() -> None:
    good = np.zeros(1)
    with pytest.raises(TypeError, match="counts"):
        _core.PlannerTask(0, 0.0, np.zeros(1), good, good)
    with pytest.raises(TypeError, match="flops: not a buffer"):
        _core.PlannerTask(0, 0.0, np.zeros(1, np.int32), [0.0], good)
    with pytest.raises(_core.UnicronError, match="no event 0"):
        _core.PlannerProblem([], good, 1.0).table([]).lookup(0)
    with pytest.raises(_core.UnicronError, match="overrides"):
        _core.PlannerProblem([], good, 1.0).solve([alternative(0, {0: None})])


@st.composite
def crowded(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, list[int]]]]:
    """Nodes of up to 8 slots, tasks that hold something of them already, new counts within what is there."""
    nodes = [
        (draw(st.integers(0, 8)), draw(st.integers(0, 2)), draw(st.integers(0, 2)))
        for _ in range(draw(st.integers(1, 6)))
    ]
    free = [slots for slots, _, _ in nodes]
    left = sum(free)
    tasks = []
    for _ in range(draw(st.integers(1, 5))):
        group = draw(st.sampled_from([1, 2, 4]))
        current = []
        for node, slots in enumerate(free):
            held = draw(st.integers(0, slots))
            free[node] -= held
            current.append(held)
        count = draw(st.integers(0, left // group)) * group
        left -= count
        tasks.append((count, group, current))
    return nodes, tasks


@given(crowded())
@settings(max_examples=300, deadline=None)
def test_placement_keeps_its_rules(
    case: tuple[list[tuple[int, int, int]], list[tuple[int, int, list[int]]]],
) -> None:
    nodes, tasks = case
    slots, unplaced, moves = _core.planner_place(nodes, tasks)
    for node, (healthy, _, _) in enumerate(nodes):
        assert sum(row[node] for row in slots) <= healthy
    for (count, group, _), row, missing in zip(tasks, slots, unplaced, strict=True):
        assert sum(row) + missing == count
        assert all(held % group == 0 for held in row)
    gains = [max(0, now - was) for (_, _, current), row in zip(tasks, slots, strict=True)
             for now, was in zip(row, current, strict=True)]  # fmt: skip
    assert moves == sum(gains)
    if all(group == 1 for _, group, _ in tasks):
        assert not any(unplaced)
        held = [min(count, sum(current)) for count, _, current in tasks]
        assert moves == sum(count for count, _, _ in tasks) - sum(held)
    groups_free = {group: sum((healthy - sum(row[node] for row in slots)) // group
                              for node, (healthy, _, _) in enumerate(nodes)) for group in (1, 2, 4)}  # fmt: skip
    for (_, group, _), missing in zip(tasks, unplaced, strict=True):
        assert missing == 0 or groups_free[group] == 0  # what has no place finds none


def test_placement_avoids_remembered_faults_and_spreads_over_domains() -> None:
    slots, unplaced, _ = _core.planner_place([(4, 0, 0), (4, 0, 0), (4, 1, 0), (4, 1, 9)], [(8, 4, [0] * 4)])
    assert unplaced == [0]
    assert slots[0][3] == 0
    assert slots[0][2] == 4  # one group in each rack
