"""From a cluster to plans: rewards and ways to answer as arrays for csrc/planner, and its answers as decisions.

Each way to answer a failure (its `how`) is an alternative of the same problem, told apart by the number of slots that
can be given out, by how long the faulted tasks stand still, and by what is spent:

    reconfigure   without the lost slots: the task shrinks, or takes slots that are free or other tasks'
    standby       the lost slots come from standbys; costs what the standby is worth until it is back
    wait          faulted tasks keep their slots and stand still until the repair
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from unicron import _core
from unicron.planner.cluster import Cluster, Task, check
from unicron.planner.placing import Move, placed
from unicron.planner.situation import Situation, foreseen, situation_of

Seconds = npt.NDArray[np.float64]


class Decision(msgspec.Struct, frozen=True):
    events: tuple[str, ...]
    how: str  # reconfigure | standby | wait
    allocation: dict[str, int]  # task -> slots
    waf: float  # FLOP/s: sum of F(t, x')
    reward: float  # FLOP: sum of G less what is spent
    moves: tuple[Move, ...]
    unplaced: dict[str, int]  # task -> slots for which no node has room in whole groups
    other_rewards: dict[str, float]  # how -> reward of the ways not taken
    from_table: bool


class Planner:
    """All plans for one cluster: the tables are ready when it is built (not, if no table is asked for)."""

    def __init__(self, cluster: Cluster, *, table: bool = True) -> None:
        """Raises PlannerProblem for a cluster that cannot be planned."""
        check(cluster)
        self.cluster = cluster
        self._counts = [np.array([*([] if task.required else [0]), *task.counts()], np.int32) for task in cluster.tasks]
        self._flops = [
            np.array([task.waf(int(count)) for count in counts])
            for task, counts in zip(cluster.tasks, self._counts, strict=True)
        ]
        times = cluster.transitions
        slowest_s = max((s for task in cluster.tasks for s in task.relayout_s.values()), default=0.0)
        self._transition_s_max = times.repair_s + sum(getattr(times, name) for name in times.__struct_fields__)
        self._transition_s_max += slowest_s
        self._foreseen = foreseen(cluster) if table else []
        self._situations = {event: situation_of(cluster, (event,)) for event in self._foreseen}
        self._pool_max = max([cluster.pool, *(situation.pool for situation in self._situations.values())])
        self._problem = self._make_problem(self._pool_max)
        self._standby_worth = self._worth() if cluster.standbys else [0.0]
        self._make_table()

    @property
    def events(self) -> tuple[str, ...]:
        """The events whose plans are in the table."""
        return tuple(self._index)

    def lookup(self, event: str) -> _core.PlannerPlan:
        """The plan of a foreseen event, allocation in the order of the tasks. KeyError: it was not foreseen."""
        return self._table.lookup(self._index[event])

    def solve(self, events: Sequence[str]) -> _core.PlannerPlan:
        """The plan of any events together, solved now."""
        situation = situation_of(self.cluster, tuple(events))
        return self._problem_for(situation).solve([way for _, way in self._ways(situation)])

    def find(self, events: Sequence[str]) -> tuple[_core.PlannerPlan, bool]:
        """The plan, and whether it was in the table. No events: the best plan as things are."""
        if len(events) == 1 and events[0] in self._index:
            return self.lookup(events[0]), True
        return self.solve(events), False

    def decision(self, events: Sequence[str]) -> Decision:
        """The plan with its placement and what the other ways would have earned."""
        plan, from_table = self.find(events)
        situation = situation_of(self.cluster, tuple(events))
        ways = self._ways(situation)
        how = ways[plan.alternative][0]
        tasks = self.cluster.tasks
        allocation = {task.name: slots for task, slots in zip(tasks, plan.allocation, strict=True)}
        moves, unplaced = placed(self.cluster, situation, allocation, how)
        return Decision(
            events=tuple(events),
            how=how,
            allocation=allocation,
            waf=sum(task.waf(allocation[task.name]) for task in tasks),
            reward=plan.reward_flop,
            moves=moves,
            unplaced=unplaced,
            other_rewards=self._others(situation, ways, how),
            from_table=from_table,
        )

    def running_s(self, pool: int) -> float:
        """D_running(n') in seconds."""
        seen = self.cluster.failures
        return _core.planner_running_s(seen.prior, seen.prior_slot_s, seen.seen, seen.slot_s, pool)

    def horizon_s(self, situation: Situation) -> float:
        """Seconds that a plan is expected to hold, the same for every way to answer: until the next failure, or the
        repair of what was just lost, if that is sooner. After it there is a new plan, whatever is chosen now; counted
        until the next failure alone, waiting would seem to be the only way to get the lost slots back."""
        running_s = self.running_s(situation.pool)
        return min(running_s, self.cluster.transitions.repair_s) if situation.lost_slots else running_s

    def standby_cost(self, situation: Situation) -> float:
        """FLOP that the standbys are worth which would take the place of what was lost: their use in the failures that
        may come before they are back."""
        spent = situation.lost_slots - situation.lost_free
        return sum(self._standby_worth[situation.standbys - spent : situation.standbys])

    # ------------------------------------------------------------ arrays

    def _make_problem(self, pool_max: int) -> _core.PlannerProblem:
        tasks = [
            _core.PlannerTask(task.current, task.waf(task.current), counts, flops, self._seconds(task, counts, None))
            for task, counts, flops in zip(self.cluster.tasks, self._counts, self._flops, strict=True)
        ]
        running_s = self.running_s(1) / np.maximum(np.arange(pool_max + 1), 1)
        return _core.PlannerProblem(tasks, running_s, self._transition_s_max)

    def _problem_for(self, situation: Situation) -> _core.PlannerProblem:
        # Several nodes may come at once; a problem with more pools gives the same plans for those it shares.
        most = situation.pool + situation.lost_slots
        return self._problem if most <= self._pool_max else self._make_problem(most)

    def _seconds(self, task: Task, counts: npt.NDArray[np.int32], fault_s: float | None) -> Seconds:
        """D_transition(x -> each count); `fault_s`: the least a faulted task needs whatever its new count."""
        times = self.cluster.transitions
        change = np.where(counts > task.current, times.start_s if task.current == 0 else times.grow_s, times.shrink_s)
        change = np.where(counts == 0, times.stop_s, change)
        change = np.where(counts == task.current, 0.0, change).astype(np.float64)
        if task.current and task.relayout_s:
            # In memory, out of what whole replicas hold: who lost one goes on without it first.
            first_s = times.shrink_s if fault_s is not None else 0.0
            relayout_s = np.array([task.relayout_s.get(int(count), math.nan) + first_s for count in counts])
            change = np.where(np.isnan(relayout_s) | (counts == task.current), change, relayout_s)
        if fault_s is None:
            return change
        # Who stops needs no new worker; who shrinks drops the broken one; who keeps or grows waits for the new one.
        return np.where(counts >= max(task.current, 1), np.maximum(change, fault_s), change)

    def _back_s(self, situation: Situation, task: Task, counts: npt.NDArray[np.int32]) -> Seconds:
        """What it takes a wounded task to come back to its count when the plan holds only until the repair.

        Not counted for healthy tasks that lend slots meanwhile: their rows are shared by all events.
        """
        times = self.cluster.transitions
        if self.horizon_s(situation) < times.repair_s or task.current == 0:
            return np.zeros(counts.size)
        back_s = np.where(counts == 0, times.start_s, times.grow_s)
        return np.where(counts < task.current, back_s, 0.0)

    def _ways(self, situation: Situation) -> list[tuple[str, _core.PlannerAlternative]]:
        times = self.cluster.transitions
        ways = [("reconfigure", self._way(situation, situation.pool, times.replace_s))]
        if not situation.wounded:
            return ways
        pool = situation.pool + situation.lost_slots - situation.lost_free
        spent = situation.lost_slots - situation.lost_free
        if situation.standbys >= spent:
            ways.append(("standby", self._way(situation, pool, times.standby_s, self.standby_cost(situation))))
        if self.cluster.waits:
            ways.append(("wait", self._way(situation, pool, math.inf)))
        return ways

    def _way(self, situation: Situation, pool: int, fault_s: float, cost: float = 0.0) -> _core.PlannerAlternative:
        """`fault_s` infinite: who lost slots keeps its count and waits for the repair."""
        times = self.cluster.transitions
        overrides = []
        for index, (task, counts) in enumerate(zip(self.cluster.tasks, self._counts, strict=True)):
            if task.name in situation.finished:
                overrides.append(_core.PlannerOverride(index, None))
            elif task.name in situation.wounded:
                if math.isinf(fault_s):
                    wait_s = times.repair_s + times.restart_s
                    seconds = np.where(counts == task.current, wait_s, np.inf)
                else:
                    seconds = self._seconds(task, counts, fault_s) + self._back_s(situation, task, counts)
                overrides.append(_core.PlannerOverride(index, seconds))
            elif task.name in situation.restarted:
                overrides.append(_core.PlannerOverride(index, self._seconds(task, counts, times.restart_s)))
        return _core.PlannerAlternative(pool, overrides, cost, self.horizon_s(situation))

    # ------------------------------------------------------------ tables

    def _worth(self) -> list[float]:
        """FLOP that the s-th standby is worth, s = 1, 2, ...: P(s failures before one is repaired) x its use in one.

        Its use is what a failure costs less with it than without, the mean over failing slots. Neither paper prices a
        standby; without a price the first failure would always take it.
        """
        cluster = self.cluster
        events, weights = [], []
        for task in cluster.tasks:
            if task.holds:
                situation = situation_of(cluster, (f"slot:{task.name}",))
                times = cluster.transitions
                events.append([self._way(situation, situation.pool, times.replace_s)])
                events.append([self._way(situation, situation.pool + 1, times.standby_s)])
                weights.append(task.current / cluster.pool)
        use = 0.0
        if events:
            table = self._problem.table(events)
            for index, weight in enumerate(weights):
                without, with_it = (table.lookup(2 * index + which).reward_flop for which in (0, 1))
                use += weight * max(0.0, with_it - without)
        expected = cluster.transitions.repair_s / self.running_s(cluster.pool)  # failures during one repair
        return [use * at_least(count, expected) for count in range(1, cluster.standbys + 1)]

    def _make_table(self) -> None:
        """One entry for each way an event can look to the rewards: nodes that cost the same share theirs."""
        self._index: dict[str, int] = {}
        classes: dict[Any, int] = {}
        events = []
        for event, situation in self._situations.items():
            if not self._fits(situation):
                continue  # who stays admitted is somebody else's decision: solved directly after it
            looks = (
                situation.pool, situation.lost_slots, situation.lost_free, situation.standbys,
                situation.wounded, situation.restarted, situation.finished,
            )  # fmt: skip
            if looks not in classes:
                classes[looks] = len(classes)
                events.append([way for _, way in self._ways(situation)])
            self._index[event] = classes[looks]
        self._table = self._problem.table(events)

    def _fits(self, situation: Situation) -> bool:
        """Have all required tasks their least counts?"""
        there = (task for task in self.cluster.tasks if task.required and task.name not in situation.finished)
        return sum(task.counts()[0] for task in there) <= situation.pool

    def _others(
        self, situation: Situation, ways: list[tuple[str, _core.PlannerAlternative]], how: str
    ) -> dict[str, float]:
        problem = self._problem_for(situation)
        rewards = {}
        for name, way in ways:
            if name == how:
                continue
            try:
                rewards[name] = problem.solve([way]).reward_flop
            except _core.UnicronError:  # it has no plan, e.g. too few slots to keep the count
                continue
        return rewards


def at_least(count: int, mean: float) -> float:
    """P(N >= count) for a Poisson number N."""
    if mean <= 0:
        return 0.0
    fewer = sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count))
    return max(0.0, 1.0 - fewer)
