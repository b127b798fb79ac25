"""One seed: draw the options, let faults happen, then stop them and demand progress within a bound (liveness).

The liveness phase is what finds hangs: after the last fault the task must be whole again (all replicas, nothing
open) and advance by some iterations, or have ended for a cause that the faults explain. A hang that only the
statistics or a bound ended (everybody waits, nobody computes) counts, unless a loop was made to stand still.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from unicron.coordinator.transitions import TERMINAL, TaskPhase
from unicron.sim.cluster import Cluster, Options
from unicron.sim.faults import schedule
from unicron.types import Layout

LAYOUTS = ((1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 1, 3), (1, 1, 2), (2, 1, 1), (1, 1, 3))
LIVENESS_MS = 30_000.0
PROGRESS = 8  # iterations after being whole again


@dataclass
class Result:
    seed: int
    layout: tuple[int, int, int]
    violations: list[str]
    outcome: str  # healed | done | stopped | hung
    cause: str
    digest: str
    counts: dict[str, int]
    iterations: int
    num_events: int
    virtual_ms: float
    wall_s: float
    lines: list[str]

    @property
    def is_good(self) -> bool:
        return not self.violations


def options_of(seed: int, plant: str = "") -> Options:
    rng = random.Random(f"{seed}/options")
    tp, pp, dp = rng.choice(LAYOUTS)
    if plant:  # the planted mistakes need replicas of several ranks, or several replicas
        tp, pp, dp = rng.choice(((2, 1, 2), (1, 2, 2), (2, 1, 3)))
    sharded = not plant and random.Random(f"{seed}/sharded").random() < 0.4
    num_micro_batches = dp * rng.randint(1, 4) + rng.randint(0, 1)
    layout = Layout(tp=tp, pp=pp, dp=dp, num_micro_batches=num_micro_batches, sharded=sharded)
    slow = rng.random() < 0.2
    return Options(
        seed=seed,
        layout=layout,
        iterations=rng.randint(40, 120) if rng.random() < 0.15 else 1_000_000,
        checkpoint_every=rng.choice((0, 5, 10)),
        stopped_grace_ms=rng.choice((0, 0, 200)),
        delay_ms=(0.1, 20.0) if slow else (0.1, 1.0),
        twice=0.1 if rng.random() < 0.3 else 0.0,
        num_faults=rng.randint(1, 7),
        faults_ms=rng.uniform(500.0, 5_000.0),
        crash_rate=0.003 if rng.random() < 0.2 else 0.0,
        plant=plant,
    )


def run_seed(seed: int, plant: str = "", options: Options | None = None) -> Result:
    begin_s = time.perf_counter()
    options = options or options_of(seed, plant)
    world = Cluster(options)
    world.start()
    end_ms = schedule(world)
    world.coordinator.crash_rate = 0.0
    world.scheduler.at(1_500.0, lambda: _set_crash_rate(world, options.crash_rate))
    world.scheduler.run_until(end_ms, lambda: bool(world.violations))
    _set_crash_rate(world, 0.0)
    outcome, cause = _demand_progress(world)
    if not world.violations and world.coordinator.alive:
        world.checkers.compare_replay(world.coordinator.machine)
    if world.counts["rescue"] and not world.counts["fault:deadlock"] and not world.violations:
        world.violate("nobody advanced until a bound ran out: only that ended a hang")
    layout = options.layout
    return Result(
        seed, (layout.tp, layout.pp, layout.dp), world.violations, outcome, cause, world.digest(),
        dict(world.counts), world.checkers.committed, world.scheduler.num_events,
        world.scheduler.now_ms, time.perf_counter() - begin_s, world.lines,
    )  # fmt: skip


def _set_crash_rate(world: Cluster, rate: float) -> None:
    world.coordinator.crash_rate = rate


def _demand_progress(world: Cluster) -> tuple[str, str]:
    """Faults have stopped. Whole again and PROGRESS iterations further within the bound, or ended with a cause."""
    deadline_ms = world.scheduler.now_ms + LIVENESS_MS
    goal: list[int] = []

    def is_over() -> bool:
        task = world.task()
        if world.violations or (task is not None and task.phase in TERMINAL):
            return True
        if not goal:
            if world.is_whole():
                goal.append(world.checkers.num_steps)
            return False
        steps = PROGRESS * world.options.layout.world_size
        return world.checkers.num_steps >= goal[0] + steps and world.is_whole()

    world.scheduler.run_until(deadline_ms, is_over)
    task = world.task()
    if world.violations:
        return "violated", ""
    if task is not None and task.phase is TaskPhase.DONE:
        if world.checkers.committed != world.options.iterations - 1:
            world.violate(f"done after iteration {world.checkers.committed}: {task.cause}")
        return "done", task.cause
    if task is not None and task.phase is TaskPhase.STOPPED:
        return _judge_stop(world, task.cause), task.cause
    if is_over():
        return "healed", ""
    world.violate(f"no progress within {LIVENESS_MS:g} ms after the last fault: {describe(world)}")
    return "hung", ""


def _judge_stop(world: Cluster, cause: str) -> str:
    if "no checkpoint to return to" not in cause or world.options.checkpoint_every == -1:
        world.violate(f"the task stopped without need: {cause}")
    return "stopped"


def describe(world: Cluster) -> str:
    """Who waits where: the first thing one wants to know of a hang."""
    task = world.task()
    if task is None:
        return "no task"
    parts = [f"task {task.phase.value}, epoch {task.epoch}, lost {task.lost}"]
    for worker in world.members():
        machine = worker.machine
        phase = machine.phase.value if machine else "no role yet"
        newest = worker.newest.epoch if worker.newest else 0
        parts.append(f"rank {worker.rank} {worker.name} {phase} (epoch {newest}, it {worker.memory.iteration})")
    return "; ".join(parts)
