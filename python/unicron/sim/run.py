"""One seed: draw the options, let faults happen, then stop them and demand progress within a bound (liveness).

The liveness phase is what finds hangs: after the last fault the task must be whole again (all replicas, nothing
open) and advance by some iterations, or have ended for a cause that the faults explain. A hang that only the
statistics or a bound ended (everybody waits, nobody computes) counts, unless a loop was made to stand still.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from unicron.coordinator.state import TaskState
from unicron.coordinator.transitions import TaskPhase
from unicron.sim.cluster import Cluster
from unicron.sim.faults import ACTIONS, drawn_weights, schedule
from unicron.sim.options import Options, TaskOptions
from unicron.sim.swarm import schedule_wishes, swarm_options
from unicron.types import Layout

LAYOUTS = ((1, 1, 4), (2, 1, 2), (1, 2, 2), (2, 1, 3), (1, 1, 2), (2, 1, 1), (1, 1, 3))
LIVENESS_MS = 45_000.0  # a hang behind a loop is seen after EVALUATION_MS, and its heir may do REST_MS_MAX, twice
LEADERS = ("no-lease", "no-fence")  # plants that need several coordinators
NEEDED = {  # kinds of faults that a plant cannot show without
    "no-lease": ("cut_etcd",), "no-fence": ("cut_etcd",),
    "read-torn": ("crash_writing",), "old-line": ("replace_node",), "no-confirm": ("kill_in",),
}  # fmt: skip
SHARDED = ("late-at-hold", "late-unawares")  # plants in what a distributed optimizer needs
SEVERAL_TASKS = ("wrong-row", "save-without-parts")  # plants that need decisions between tasks
NODE_WEIGHT = 8.0  # of lost nodes, at least, where shards have copies
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
    coverage: set[tuple[Any, ...]]

    @property
    def is_good(self) -> bool:
        return not self.violations


def options_of(seed: int, plant: str = "") -> Options:
    rng = random.Random(f"{seed}/options")
    tp, pp, dp = rng.choice(LAYOUTS)
    if plant not in SEVERAL_TASKS and (plant or seed % 3 != 2):
        return _one_task(seed, plant, rng, (tp, pp, dp))
    return _disturbed(replace(swarm_options(seed, rng), plant=plant))


def _disturbed(options: Options) -> Options:
    """Which faults, how often, and whether clocks drift: a part of every history's seed."""
    rng = random.Random(f"{options.seed}/disturbed")
    if options.plant in LEADERS or (not options.plant and options.seed % 5 == 4):
        options.coordinators = 2 if rng.random() < 0.8 else 3
        options.num_faults += rng.randint(1, 4)
        options.faults_ms = max(options.faults_ms, 4_000.0) * 1.5
    options.weights = drawn_weights(rng, options.coordinators)
    if any(task.layout.copies_shards for task in options.tasks):  # whose way on without a node is what there is to see
        options.weights["node"] = max(options.weights["node"], NODE_WEIGHT)
    options.weights.update(dict.fromkeys(NEEDED.get(options.plant, ()), 30.0))
    if options.plant == "keep-all":
        options.num_faults = 14
    if rng.random() < 0.5:
        options.killed_in = tuple(rng.sample(ACTIONS, rng.randint(1, 3)))
    if options.plant == "no-confirm":
        options.killed_in = ("Commit",)
    options.drift = rng.choice((0.0, 0.0, 1e-4, 0.02))
    return options


def _one_task(seed: int, plant: str, rng: random.Random, shape: tuple[int, int, int]) -> Options:
    tp, pp, dp = shape
    if plant:  # the planted mistakes need replicas of several ranks, or several replicas
        tp, pp, dp = rng.choice(((2, 1, 2), (1, 2, 2), (2, 1, 3)))
    sharded = plant in SHARDED or (not plant and random.Random(f"{seed}/sharded").random() < 0.4)
    num_micro_batches = dp * rng.randint(1, 4) + rng.randint(0, 1)
    layout = Layout(tp=tp, pp=pp, dp=dp, num_micro_batches=num_micro_batches, sharded=sharded)
    if sharded and not plant and dp > 1 and random.Random(f"{seed}/buddy").random() < 0.7:  # loses nodes, and narrows
        layout = structs.replace(layout, buddy=True, buddy_every=random.Random(f"{seed}/every").choice((0, 0, 2, 3)))
    elif sharded and dp % 2 == 0 and random.Random(f"{seed}/instances").random() < 0.5:
        layout = structs.replace(layout, instances=2)
    spares = 0 if plant and plant not in SHARDED else random.Random(f"{seed}/standbys").choice((0, 0, 1, 2))
    slow = rng.random() < 0.2
    iterations = rng.randint(40, 120) if rng.random() < 0.15 else 1_000_000
    options = Options(
        seed=seed,
        tasks=(
            TaskOptions(layout=layout, iterations=iterations, checkpoint_every=rng.choice((0, 5, 10)), standbys=spares),
        ),
        num_nodes=dp + spares,
        slots=tp * pp,
        num_wishes=random.Random(f"{seed}/drains").randint(0, 5) if spares else 0,
        only_drains=True,
        stopped_grace_ms=rng.choice((0, 0, 200)),
        delay_ms=(0.1, 20.0) if slow else (0.1, 1.0),
        twice=0.1 if rng.random() < 0.3 else 0.0,
        num_faults=rng.randint(1, 7),
        faults_ms=rng.uniform(500.0, 5_000.0),
        crash_rate=0.003 if rng.random() < 0.2 else 0.0,
        plant=plant,
    )
    return _disturbed(options)


def run_seed(seed: int, plant: str = "", options: Options | None = None) -> Result:
    begin_s = time.perf_counter()
    options = options or options_of(seed, plant)
    world = Cluster(options)
    world.start()
    end_ms = schedule(world)
    if options.num_wishes:
        schedule_wishes(world)
        end_ms = max(end_ms, 1_500.0 + 2 * options.faults_ms)
    _set_crash_rate(world, 0.0)
    world.scheduler.at(1_500.0, lambda: _set_crash_rate(world, options.crash_rate))
    world.scheduler.run_until(end_ms, lambda: bool(world.violations))
    _set_crash_rate(world, 0.0)
    outcome, cause = _demand_progress(world)
    if not world.violations and world.coordinator.is_ready and world.coordinator.is_newest:
        world.checkers.compare_replay(world.coordinator)
    if world.counts["rescue"] and not world.counts["fault:deadlock"] and not world.violations:
        world.violate("nobody advanced until a bound ran out: only that ended a hang")
    layout = options.layout
    return Result(
        seed, (layout.tp, layout.pp, layout.dp), world.violations, outcome, cause, world.digest(),
        dict(world.counts), world.checkers.committed, world.scheduler.num_events,
        world.scheduler.now_ms, time.perf_counter() - begin_s, world.lines,
        world.coverage,
    )  # fmt: skip


def _set_crash_rate(world: Cluster, rate: float) -> None:
    for coordinator in world.coordinators:
        coordinator.crash_rate = rate


def _demand_progress(world: Cluster) -> tuple[str, str]:
    """Faults have stopped. Whole again and PROGRESS iterations further within the bound, or ended with a cause."""
    deadline_ms = world.scheduler.now_ms + LIVENESS_MS
    goal: dict[str, int] = {}

    def is_over() -> bool:
        if world.violations:
            return True
        running = [t for t in world.tasks() if t.phase is TaskPhase.RUNNING and t.plan is not None]
        if not goal:
            if not world.is_whole():
                return False
            for task in running:
                width = len(task.plan.members) if task.plan else 0
                goal[task.name] = world.checkers.of(task.name).num_steps + PROGRESS * width
            return not running
        steps = {name: world.checkers.of(name).num_steps for name in goal}
        late = [t.name for t in running if steps.get(t.name, 0) < goal.get(t.name, 0)]
        return not late and world.is_whole()

    world.scheduler.run_until(deadline_ms, is_over)
    if world.violations:
        return "violated", ""
    outcomes = [_outcome(world, task) for task in world.tasks()]
    if world.violations:
        return "violated", ""
    if not is_over():
        world.violate(f"no progress within {LIVENESS_MS:g} ms after the last fault: {describe(world)}")
        return "hung", ""
    return next((o for o in outcomes if o[0] != "healed"), ("healed", ""))


def _outcome(world: Cluster, task: TaskState) -> tuple[str, str]:
    if task.phase is TaskPhase.DONE:
        wanted = world.options.of(task.name).iterations - 1
        if world.checkers.of(task.name).committed != wanted:
            world.violate(f"{task.name} done after iteration {world.checkers.of(task.name).committed}: {task.cause}")
        return "done", task.cause
    if task.phase is TaskPhase.STOPPED:
        return _judge_stop(world, task.cause), task.cause
    return "healed", ""


def _judge_stop(world: Cluster, cause: str) -> str:
    if "no checkpoint to return to" not in cause and cause != "cancelled":
        world.violate(f"a task stopped without need: {cause}")
    return "stopped"


def describe(world: Cluster) -> str:
    """Who waits where: the first thing one wants to know of a hang."""
    parts = []
    for task in world.tasks():
        target = world.coordinator.machine.state.target(task.name)
        placed = {m.rank: m.node for m in task.plan.members} if task.plan else {}
        parts.append(
            f"{task.name} {task.phase.value}, epoch {task.epoch}, lost {task.lost}, placed {placed}, target {target}, "
            f"leaving {task.leaving!r}"
        )
    if strangers := world.strangers():
        parts.append(f"unknown to the coordinator: {', '.join(strangers)}")
    for worker in world.members():
        machine = worker.machine
        phase = machine.phase.value if machine else "no role yet"
        newest = worker.newest.epoch if worker.newest else 0
        parts.append(
            f"{worker.task} rank {worker.rank} {worker.name} {phase} (epoch {newest}, it {worker.memory.iteration})"
        )
    return "; ".join(parts) or "no task"
