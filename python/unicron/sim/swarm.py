"""Several tasks on one cluster: what they are, when they come, and what people ask for meanwhile; all from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import structs

from unicron.coordinator.events import CancelRequested, DrainRequested, ResumeRequested, SuspendRequested
from unicron.sim.options import Options, TaskOptions
from unicron.types import Layout

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster

SHAPES = ((1, 1), (1, 1), (2, 1), (1, 2))
WISHES = {"suspend": 4, "resume": 5, "drain": 3, "undrain": 3, "cancel": 1}


def swarm_options(seed: int, rng: random.Random) -> Options:
    num_nodes, slots = rng.randint(2, 4), rng.randint(2, 4)
    tasks = tuple(_task(number, num_nodes * slots, rng) for number in range(rng.randint(2, 4)))
    return Options(
        seed=seed,
        tasks=tasks,
        num_nodes=num_nodes,
        slots=slots,
        delay_ms=(0.1, 20.0) if rng.random() < 0.2 else (0.1, 1.0),
        twice=0.1 if rng.random() < 0.3 else 0.0,
        num_faults=rng.randint(0, 5),
        num_wishes=rng.randint(0, 6),
        faults_ms=rng.uniform(1_500.0, 6_000.0),
        crash_rate=0.003 if rng.random() < 0.3 else 0.0,
    )


def _task(number: int, pool: int, rng: random.Random) -> TaskOptions:
    tp, pp = rng.choice(SHAPES)
    dp = rng.randint(1, max(1, min(4, pool // (tp * pp))))
    num_micro_batches = dp * rng.randint(1, 3) + rng.randint(0, 1)
    layout = Layout(tp=tp, pp=pp, dp=dp, num_micro_batches=num_micro_batches, sharded=rng.random() < 0.2)
    if layout.sharded and dp > 1:
        layout = structs.replace(layout, buddy=random.Random(f"{rng.getstate()[1][0]}/buddy/{number}").random() < 0.7)
        if layout.buddy:
            every = random.Random(f"{rng.getstate()[1][0]}/every/{number}").choice((0, 0, 2, 3))
            layout = structs.replace(layout, buddy_every=every)
        elif dp % 2 == 0 and random.Random(f"{rng.getstate()[1][0]}/instances/{number}").random() < 0.5:
            layout = structs.replace(layout, instances=2)
    return TaskOptions(
        name=f"t{number}",
        layout=layout,
        iterations=rng.randint(30, 120) if rng.random() < 0.3 else 1_000_000,
        checkpoint_every=rng.choice((0, 5, 10)),
        replicas_min=rng.choice((0, 1, min(2, dp))),
        weight=rng.choice((0.0, 0.5, 1.0, 1.0, 2.0)),
        priority=rng.choice((0, 0, 0, 1, 2)),
        standbys=random.Random(f"{rng.getstate()[1][0]}/standbys/{number}").choice((0, 0, 1)),
        speed=rng.choice((1.0, 0.8, 0.5)),
        has_directory=rng.random() < 0.85,
        at_ms=20.0 if number < 2 else rng.uniform(20.0, 5_000.0),
    )


def schedule_wishes(world: Cluster) -> None:
    """Spread over the time in which faults happen."""
    rng = world.streams("wishes")
    for number in range(world.options.num_wishes):
        at_ms = 1_500.0 + rng.uniform(0.0, 2 * world.options.faults_ms)
        kinds = {k: w for k, w in WISHES.items() if "drain" in k or not world.options.only_drains}
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        world.scheduler.at(at_ms, _wish(world, kind, f"wish{number}", random.Random(rng.random())))


def _kill(world: Cluster, name: str, rng: random.Random) -> None:
    members = [worker for worker in world.members() if worker.task == name]
    if members:
        worker = rng.choice(members)
        world.count("fault:kill")
        world.log("fault", f"kill {worker.name} (rank {worker.rank}), which is to leave")
        worker.faults.append("kill")
        worker.die("signaled", 9)


def _wish(world: Cluster, kind: str, request: str, rng: random.Random) -> Callable[[], None]:
    def ask() -> None:
        world.count(f"wish:{kind}")
        task = rng.choice([t.name for t in world.options.tasks])
        node = f"n{rng.randrange(world.options.num_nodes)}"
        world.log("person", f"{kind} {node if 'drain' in kind else task}")
        if kind == "suspend":
            world.coordinator.feed(SuspendRequested(request, task))
            if rng.random() < 0.5:  # a failure while it saves and holds: that is where iterations could be lost
                world.scheduler.after(rng.uniform(0.0, 200.0), lambda: _kill(world, task, rng))
        elif kind == "resume":
            world.coordinator.feed(ResumeRequested(request, task))
        elif kind == "cancel":
            world.coordinator.feed(CancelRequested(request, task))
        else:
            world.coordinator.feed(DrainRequested(request, node, kind == "drain"))

    return ask
