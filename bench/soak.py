"""An hour of real training on a machine loaded to four times its cores: nothing fails, so nothing may be said.

The demo's GPT trains on a local cluster of four nodes, each with an understudy, beside as many busy processes as make
four for every core (some compute all the time, some in bursts, as neighbours do). An alarm is any incident at all, also
one that only tells; a node that is suspected for a moment and comes back is counted, and is none.

    python bench/bench_detection.py --only none --soak --minutes 60
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import common
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.runtime.client import CoordinatorSilent
from unicron.runtime.local_cluster import LocalCluster

LOAD = 4  # busy processes a core, the training's own among them
ITERATIONS = 10_000_000
START_S_MAX = 600.0
PROGRESS_S_MAX = 300.0
LOOK_S = 1.0
BURNER = "while True: sum(range(100_000))"
BURSTS = """
import random, time
while True:
    until = time.monotonic() + random.random() * 2
    while time.monotonic() < until:
        sum(range(100_000))
    time.sleep(random.random())
"""


@dataclass
class Outcome:
    minutes: float = 0.0
    iterations: int = 0
    longest_s: float = 0.0  # without a committed iteration, as seen from outside
    suspicions: int = 0
    load: float = 0.0  # of the machine, mean of the last minute's average
    incidents: list[dict[str, Any]] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        alarms = [words(incident) for incident in self.incidents]
        return {
            "minutes": round(self.minutes, 1), "iterations": self.iterations, "load": round(self.load, 1),
            "longest_s": round(self.longest_s, 1), "suspicions": self.suspicions, "alarms": len(alarms),
            "what": alarms[:9],
        }  # fmt: skip


def words(incident: dict[str, Any]) -> str:
    told = "told" if incident["is_only_told"] else incident["severity"]
    return f"{incident['fault']} of rank {incident['root']['rank']} ({told}): {incident['cause']}"


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Every third works in bursts."""
    busy = [
        subprocess.Popen([sys.executable, "-c", BURSTS if number % 3 == 2 else BURNER]) for number in range(count)
    ]  # fmt: skip
    try:
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait(10)


def run(minutes: float) -> Outcome:
    layout = runner.layout_of(1, 1, 4)
    outcome = Outcome()
    cores = len(os.sched_getaffinity(0))
    with common.scratch() as folder:
        with LocalCluster(
            num_agents=4, slots=1, understudies=1, imports=runner.IMPORTS, log_dir=folder / "cluster"
        ) as cluster:
            command = (sys.executable, *runner.SCRIPT, "--iterations", str(ITERATIONS), "--gradients", "")
            job = Job(
                name="soak", command=(*command, "--results", str(folder / "results")), layout=layout, cwd=str(folder),
                log_dir=str(folder), understudies=1,
            )  # fmt: skip
            task = cluster.submit(job)
            _wait_trained(cluster, task, 3)
            with neighbours(max(LOAD * cores - layout.world_size, 1)):
                _watch(cluster, task, minutes, outcome)
            cluster.cancel(task)
    return outcome


def _wait_trained(cluster: LocalCluster, task: str, iterations: int) -> None:
    deadline = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline:
        with suppress(CoordinatorSilent):  # starved
            if cluster.task(task)["iteration"] >= iterations:
                return
        time.sleep(LOOK_S)
    raise SystemExit("the training did not begin; see its logs")


def _watch(cluster: LocalCluster, task: str, minutes: float, outcome: Outcome) -> None:
    begun = moved = time.monotonic()
    first = last = int(cluster.task(task)["iteration"])
    suspected: set[str] = set()
    loads: list[float] = []
    while (now := time.monotonic()) < begun + minutes * 60:
        time.sleep(LOOK_S)
        try:
            iteration = int(cluster.task(task)["iteration"])
            incidents = list(cluster.incidents(task))
            for incident in incidents[len(outcome.incidents) :]:
                print(f"minute {(now - begun) / 60:.1f}: {words(incident)}", file=sys.stderr, flush=True)
            outcome.incidents = incidents
            suspects = {row["node"] for row in cluster.ask("nodes") if row["phase"] != "up"}
        except CoordinatorSilent:
            continue  # it starves as well; what it says later counts
        outcome.suspicions += len(suspects - suspected)
        suspected = suspects
        loads.append(os.getloadavg()[0])
        if iteration > last:
            outcome.longest_s = max(outcome.longest_s, now - moved)
            last, moved = iteration, now
        elif now - moved > PROGRESS_S_MAX:
            raise SystemExit(f"no iteration in {PROGRESS_S_MAX:g} s: {outcome.as_json()}")
    outcome.minutes = (time.monotonic() - begun) / 60
    outcome.iterations, outcome.load = last - first, sum(loads) / max(len(loads), 1)
