"""What a failure costs: detection, resumption and lost time per fault, and torchrun on the same model in the same run.

Four workers train the demo's GPT on a local cluster; faults are armed one after the other at random points of random
ranks (seeded), each when the one before is healed. `lost` is the wall time of the interrupted iteration minus the
median iteration; `lost less recompute` takes off the time of micro-batches computed again. torchrun restarts all
workers from a checkpoint written after every iteration (so it loses as little work as it can).

    python bench/bench_recovery.py --layout 1,1,4 --json
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
import torchrun_restart
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.demo.watch import failures
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

FAULTS = ("kill", "exception", "stop")
POINTS = ("compute", "reduce", "commit")
ITERATIONS = 100_000  # the bench cancels the task when it has what it wants
HEALED_S_MAX = 60.0
SETTLE_S = 4.0  # a new understudy is up, the median is of undisturbed iterations again


@dataclass
class Samples:
    detect: list[float] = field(default_factory=list)
    resume: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)  # lost less the time of micro-batches computed again

    def take(self, incident: dict[str, Any]) -> None:
        if incident["detect_ms"] is not None:
            self.detect.append(incident["detect_ms"])
        self.resume.append(incident["resume_ms"])
        self.lost.append(incident["lost_ms"])
        self.bare.append(max(0.0, incident["lost_ms"] - incident.get("recompute_ms", 0.0)))


class Victims:
    """A task on a living cluster, wounded again and again."""

    def __init__(self, cluster: LocalCluster, layout: Layout, seed: int, log_dir: Path) -> None:
        self.cluster, self.layout = cluster, layout
        self.random = random.Random(seed)
        self.results = log_dir / "results"
        command = (sys.executable, *runner.SCRIPT, "--iterations", str(ITERATIONS), "--results", str(self.results))
        self.task = cluster.submit(
            Job(
                name=f"recovery-{layout.tp}-{layout.pp}-{layout.dp}", command=(*command, "--gradients", ""),
                layout=layout, cwd=str(log_dir), log_dir=str(log_dir), understudies=1, stopped_grace_ms=0,
                restart_max=1_000_000,
            )
        )  # fmt: skip
        self._known: set[str] = set()

    def wait_running(self, timeout_s: float = 180.0) -> None:
        """All roles held, an understudy waiting on every node, some iterations done."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            workers = self.cluster.task(self.task)["workers"]
            members = [w for w in workers if w["is_member"]]
            waiting = [w for w in workers if not w["is_member"] and w["phase"] == "ready"]
            if len(members) == self.layout.world_size and len(waiting) >= self.layout.dp:
                time.sleep(SETTLE_S)
                return
            time.sleep(0.2)
        raise SystemExit(f"the task was not whole again within {timeout_s} s; see its logs")

    def one(self, fault: str) -> dict[str, Any]:
        rank = self.random.randrange(self.layout.world_size)
        point = self.random.choice(POINTS)
        micro_batch = -1
        if point == "compute":
            share = self.layout.num_micro_batches // self.layout.dp
            micro_batch = self.layout.replica_of(rank) * share + self.random.randrange(share)
        self.cluster.arm_fault(self.task, rank, fault, point, -1, micro_batch)
        return self.healed()

    def node_lost(self) -> dict[str, Any]:
        node = self.random.choice(self.cluster.nodes)
        time.sleep(self.random.random())
        self.cluster.kill_agent(node)
        incident = self.healed()
        self.cluster.start_agent(node)
        return incident

    def healed(self) -> dict[str, Any]:
        """The next incident, when it is over."""
        deadline = time.monotonic() + HEALED_S_MAX
        while time.monotonic() < deadline:
            for incident in failures(self.cluster.incidents(self.task)):
                if incident["id"] in self._known or incident["resume_ms"] is None:
                    continue
                self._known.add(incident["id"])
                return dict(incident)
            time.sleep(0.05)
        raise SystemExit(f"not healed within {HEALED_S_MAX} s; see the logs")


def measure(layout: Layout, arguments: argparse.Namespace) -> dict[str, Samples]:
    found = {fault: Samples() for fault in (*FAULTS, "node lost")}
    with common.scratch() as log_dir:
        with LocalCluster(
            num_agents=layout.dp, slots=layout.replica_size, understudies=1, imports=runner.IMPORTS,
            log_dir=log_dir / "cluster",
        ) as cluster:  # fmt: skip
            victims = Victims(cluster, layout, arguments.seed, log_dir)
            for number in range(arguments.runs):
                for fault in FAULTS:
                    victims.wait_running()
                    found[fault].take(victims.one(fault))
                if number < arguments.nodes:
                    victims.wait_running()
                    found["node lost"].take(victims.node_lost())
                print(f"{number + 1} of {arguments.runs} rounds", file=sys.stderr, flush=True)
            victims.wait_running()
            cluster.cancel(victims.task)
    return found


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=7)
    parser.add_argument("--layout", default="1,1,4", help="tp,pp,dp")
    parser.add_argument("--nodes", type=int, default=3, help="how often a node is lost (and grown back)")
    parser.add_argument("--torchrun", type=int, default=2, help="how often torchrun is measured; 0: not")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    layout = runner.layout_of(*map(int, arguments.layout.split(",")))
    bench = common.Bench(
        "recovery", "ms",
        configuration={
            "layout": arguments.layout, "points": "random", "seed": arguments.seed, "model": "GPT 4 x 64, seq 64",
            "micro-batches": layout.num_micro_batches,
        },
    )  # fmt: skip
    found = measure(layout, arguments)
    for fault, samples in found.items():
        for name, values in vars(samples).items():
            if values:
                label = {"bare": "lost less recompute"}.get(name, name)
                bench.add(f"{fault}: {label}", values)
    if arguments.torchrun:
        try:
            lost = torchrun_restart.measure(layout, arguments.torchrun)
        except torchrun_restart.DidNotComeBack as problem:
            bench.configuration["torchrun"] = str(problem)
        else:
            ours = statistics.median(found["kill"].lost)
            bench.add("torchrun, kill: lost", lost, **{"x unicron's": statistics.median(lost) / max(ours, 1.0)})
    bench.finish(arguments)


if __name__ == "__main__":
    main()
