"""What goes wrong, drawn from the seed: each fault at a random moment, or exactly inside some action of some rank.

With some probability a fault falls into the recovery of the one before it: that is where hangs hide.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from unicron.sim.worker import SimWorker

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster

ACTIONS = (
    "Compute", "Tie", "Reduce", "Commit", "Confirm", "Step", "Gather", "Settle", "ExchangeInside", "RebuildInside",
    "ExchangeWorld", "RebuildCross", "FetchState", "EndIteration", "AwaitPlan",
)  # fmt: skip

WEIGHTS = {
    "kill": 6,
    "kill_in": 10,
    "kill_understudy": 1,
    "exit": 2,
    "exception": 3,
    "stop": 2,
    "stop_and_go": 1,
    "deadlock": 1,
    "reset": 4,
    "node": 4,
    "disconnect": 3,
    "partition": 1,
    "coordinator": 3,
}


def schedule(world: Cluster) -> float:
    """Puts all faults on the heap; returns when the last of them (with its own end) is over."""
    rng = world.streams("faults")
    options = world.options
    at_ms, end_ms = 1_500.0, 1_500.0
    for number in range(options.num_faults):
        if number and rng.random() < 0.4:
            at_ms += rng.uniform(0.0, 150.0)  # into the recovery of the last one
        else:
            at_ms += rng.uniform(200.0, 2 * options.faults_ms / max(options.num_faults, 1))
        kind = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        lasts_ms = _lasts_ms(kind, rng)
        end_ms = max(end_ms, at_ms + lasts_ms)
        one = random.Random(rng.random())
        world.scheduler.at(at_ms, _fault(world, kind, lasts_ms, number, one))
    return end_ms


def _lasts_ms(kind: str, rng: random.Random) -> float:
    ranges = {
        "node": (200.0, 3_000.0),
        "stop_and_go": (5.0, 400.0),
        "partition": (50.0, 3_000.0),
        "coordinator": (50.0, 3_000.0),
    }
    low, high = ranges.get(kind, (0.0, 0.0))
    return rng.uniform(low, high)


def _fault(world: Cluster, kind: str, lasts_ms: float, number: int, rng: random.Random) -> Callable[[], None]:
    def happen() -> None:
        world.count(f"fault:{kind}")
        members = world.members()
        nodes = [h.node for h in world.hosts.values() if h.alive]
        if kind == "coordinator":
            world.coordinator.crash(lasts_ms, "killed")
        elif kind == "node" and nodes:
            world.kill_node(rng.choice(sorted(nodes)), lasts_ms)
        elif kind in ("disconnect", "partition") and nodes:
            node = rng.choice(sorted(nodes))
            world.log("fault", f"{kind} {node}")
            if kind == "partition":
                world.partitioned[node] = world.scheduler.now_ms + lasts_ms
            world.disconnect(node)
        elif kind == "kill_understudy":
            _kill_understudy(world, rng)
        elif members:
            _hurt(world, kind, lasts_ms, number, rng.choice(members), rng)

    return happen


def _kill_understudy(world: Cluster, rng: random.Random) -> None:
    roles = set(world.members())
    others = [w for h in world.hosts.values() for w in h.workers.values() if w.alive and w not in roles]
    if others:
        worker = rng.choice(others)
        world.log("fault", f"kill understudy {worker.name}")
        worker.faults.append("kill")
        worker.die("signaled", 9)


def _hurt(world: Cluster, kind: str, lasts_ms: float, number: int, worker: SimWorker, rng: random.Random) -> None:
    action = rng.choice(ACTIONS)
    where = f" in {action}" if kind == "kill_in" else f" in {type(worker.action).__name__}"
    world.log("fault", f"{kind} {worker.name} (rank {worker.rank}){where}")
    if kind != "reset":
        worker.faults.append(kind)
    if kind == "kill":
        worker.die("signaled", 9)
    elif kind == "kill_in":
        worker.kill_on = action
    elif kind == "exit":
        worker.die("exited", 40 + number)
    elif kind == "exception":
        worker.raise_exception(f"Injected{number}")
    elif kind in ("stop", "stop_and_go"):
        worker.stop()
        if kind == "stop_and_go":
            world.scheduler.after(lasts_ms, worker.go_on)
    elif kind == "deadlock":
        worker.is_deadlocked = True
    elif kind == "reset":
        groups = [g for g, _ in worker.groups]
        if groups:
            rng.choice(groups).shut(worker.rank)
