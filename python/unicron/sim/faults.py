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
    from unicron.sim.coordinator_host import CoordinatorHost

ACTIONS = (
    "Compute", "Tie", "Reduce", "Commit", "Confirm", "Step", "Gather", "FinishGather", "Settle", "ExchangeInside",
    "RebuildInside", "ExchangeWorld", "RebuildCross", "FetchState", "EndIteration", "AwaitPlan", "AwaitOthers", "Over",
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
    "one_way": 2,
    "slow_link": 2,
    "clock_step": 2,
    "disk_full": 2,
    "freeze": 2,
    "stuck_agent": 1,
    "replace_node": 1,
    "crash_writing": 2,
    "freeze_coordinator": 2,
}
#: Where there are several coordinators.
LEADER_WEIGHTS = {"freeze_coordinator": 6, "cut_etcd": 6, "slow_etcd": 2, "end_coordinator": 2, "etcd_silent": 1}
COORDINATOR_KINDS = ("coordinator", "crash_writing", "disk_full", *LEADER_WEIGHTS)


def drawn_weights(rng: random.Random, coordinators: int) -> dict[str, float]:
    """Swarm testing: each seed has some kinds of faults, at rates of its own; rare pairs meet more often so."""
    kinds = {**WEIGHTS, **LEADER_WEIGHTS} if coordinators > 1 else WEIGHTS
    drawn = {kind: weight * rng.choice((0.0, 0.0, 0.5, 1.0, 3.0)) for kind, weight in kinds.items()}
    return drawn if any(drawn.values()) else {"kill_in": 1.0}


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
        weights = options.weights or WEIGHTS
        kind = rng.choices(list(weights), list(weights.values()))[0]
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
        "one_way": (50.0, 8_000.0),
        "slow_link": (100.0, 5_000.0),
        "disk_full": (10.0, 3_000.0),
        "freeze": (10.0, 9_000.0),
        "stuck_agent": (10.0, 9_000.0),
        "replace_node": (100.0, 9_000.0),
        "crash_writing": (50.0, 3_000.0),
        "freeze_coordinator": (10.0, 9_000.0),
        "cut_etcd": (50.0, 9_000.0),
        "slow_etcd": (100.0, 5_000.0),
        "end_coordinator": (50.0, 3_000.0),
        "etcd_silent": (50.0, 6_000.0),
    }
    low, high = ranges.get(kind, (0.0, 0.0))
    return rng.uniform(low, high)


def _fault(world: Cluster, kind: str, lasts_ms: float, number: int, rng: random.Random) -> Callable[[], None]:
    def happen() -> None:
        world.count(f"fault:{kind}")
        members = world.members()
        nodes = [h.node for h in world.hosts.values() if h.alive]
        if kind in COORDINATOR_KINDS:
            hurt_coordinator(world, kind, lasts_ms, rng)
        elif kind == "node" and nodes:
            world.kill_node(rng.choice(sorted(nodes)), lasts_ms)
        elif kind in ("disconnect", "partition") and nodes:
            node = rng.choice(sorted(nodes))
            world.log("fault", f"{kind} {node}")
            if kind == "partition":
                world.partitioned[node] = world.scheduler.now_ms + lasts_ms
            world.disconnect(world.hosts[node])
        elif kind == "replace_node" and nodes:
            node = rng.choice(sorted(nodes))
            world.log("fault", f"{node} stands still and is replaced; its old life goes on in {lasts_ms / 2:.0f} ms")
            world.replace_node(node, lasts_ms / 2, lasts_ms / 2)
        elif kind == "kill_understudy":
            _kill_understudy(world, rng)
        elif kind in ("one_way", "slow_link", "clock_step", "freeze", "stuck_agent"):
            _disturb(world, kind, lasts_ms, sorted(nodes), rng)
        elif members:
            _hurt(world, kind, lasts_ms, number, rng.choice(members), rng)

    return happen


def hurt_coordinator(world: Cluster, kind: str, lasts_ms: float, rng: random.Random) -> None:
    """Mostly the one that decides."""
    host = world.coordinator if rng.random() < 0.8 else rng.choice(world.coordinators)
    until_ms = world.scheduler.now_ms + lasts_ms
    world.log("fault", f"{kind} {host.name} for {lasts_ms:.0f} ms")
    if kind == "coordinator":
        host.crash(lasts_ms, "killed")
    elif kind == "crash_writing":
        host.crash_in_write_ms = lasts_ms
    elif kind == "disk_full":
        host.disk.full_until_ms = until_ms
        world.etcd.full_until_ms = until_ms
    elif kind == "freeze_coordinator":
        if rng.random() < 0.5:
            host.freeze_in_step_ms = lasts_ms
        else:
            host.freeze(lasts_ms)
    elif kind == "end_coordinator":
        if host.alive and host.leading is not None and not host.frozen:
            host.leading.follow("told to end", lasts_ms)
    else:
        _disturb_etcd(world, kind, host, until_ms, rng)


def _disturb_etcd(world: Cluster, kind: str, host: CoordinatorHost, until_ms: float, rng: random.Random) -> None:
    lines = [c.leading.line.link for c in world.coordinators if c.leading and (c is host or kind == "etcd_silent")]
    for link in lines:
        if kind == "slow_etcd":
            link.slow_until_ms, link.slow_ms = until_ms, rng.uniform(5.0, 900.0)
            continue
        ways = ("up", "down") if kind == "etcd_silent" else rng.choice((("up",), ("down",), ("up", "down")))
        for way in ways:
            link.blocked_until_ms[way] = max(link.blocked_until_ms[way], until_ms)


def _disturb(world: Cluster, kind: str, lasts_ms: float, nodes: list[str], rng: random.Random) -> None:
    """Links, clocks and whole machines: nobody dies of it, so nobody may be killed for it."""
    until_ms = world.scheduler.now_ms + lasts_ms
    if kind == "clock_step" and rng.random() < 0.3 and world.coordinator.alive:
        world.log("fault", "the coordinator's clock jumps")
        jump_ms = rng.uniform(10.0, 5_000.0)
        world.coordinator.clock.step(jump_ms)
        if world.coordinator.leading is not None:
            world.coordinator.leading.clock.step(jump_ms)
        return
    if not nodes:
        return
    node = rng.choice(nodes)
    host, link = world.hosts[node], world.link(node, rng.choice(world.coordinators))
    world.log("fault", f"{kind} {node} for {lasts_ms:.0f} ms")
    if kind == "one_way":
        way = rng.choice(("up", "down"))
        link.blocked_until_ms[way] = max(link.blocked_until_ms[way], until_ms)
    elif kind == "slow_link":
        link.slow_until_ms, link.slow_ms = until_ms, rng.uniform(5.0, 400.0)
    elif kind == "clock_step":
        host.clock.step(rng.uniform(10.0, 5_000.0))
    else:
        for worker in host.workers.values() if kind == "freeze" else ():
            worker.faults.append("freeze")
        host.freeze(whole=kind == "freeze")
        world.scheduler.after(lasts_ms, host.thaw)
    if kind in ("one_way", "freeze"):
        world.watch(host)


def _kill_understudy(world: Cluster, rng: random.Random) -> None:
    roles = set(world.members())
    others = [w for h in world.hosts.values() for w in h.workers.values() if w.alive and w not in roles]
    if others:
        worker = rng.choice(others)
        world.log("fault", f"kill understudy {worker.name}")
        worker.faults.append("kill")
        worker.die("signaled", 9)


def _hurt(world: Cluster, kind: str, lasts_ms: float, number: int, worker: SimWorker, rng: random.Random) -> None:
    action = rng.choice(world.options.killed_in or ACTIONS)
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
