"""What being managed costs when nothing fails: CPU seconds per iteration against the same script unmanaged.

Three sets of four processes, A and A' unmanaged, B under unicron, train in blocks of 20 iterations: side by side, on
cores that they draw anew each round, when the machine has more than twelve; else in turn, in an order drawn anew each
round. The speed of a rented machine wanders over seconds (blocks 5 s apart: correlation 0.5); what the sets do at the
same time is compared free of that. CPU time is that of every process of a set (for B also agents, coordinator,
template and understudies), read from their CPU clocks around each block. A'/A shows what this machine can resolve:
rounds go on until its 95 % half-width is small enough. The parts of B are given apart.

    python bench/bench_overhead.py --layout 1,1,4 --json
    python bench/bench_overhead.py --minutes 8 --samples rounds.json    # and again, until the half-width is reached
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.runtime.client import CoordinatorRefused
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

BLOCK_S_MAX = 300.0
START_S_MAX = 180.0
WARM_UP = 10
STOP = 1_000_000  # overhead_worker.STOP
WORKER = str(Path(__file__).with_name("overhead_worker.py"))


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, living and ended; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


def physical_cores() -> list[list[int]]:
    """The logical processors this process may use, by physical core."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(topology.read_text() if topology.exists() else str(cpu), []).append(cpu)
    return list(cores.values())


def processors(cores: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(cores))


@dataclass
class Set:
    """Processes that train in blocks. parts: name -> pids, the workers first."""

    name: str
    folder: Path
    layout: Layout
    overlap: bool = False  # the script asks for communication under the computation
    parts: dict[str, list[int]] = field(default_factory=dict)
    done: int = 0
    samples: list[float] = field(default_factory=list)  # CPU ms per iteration, one per block
    wall: list[float] = field(default_factory=list)
    commit_to_commit: list[float] = field(default_factory=list)  # wall ms per iteration, as its slowest rank saw it
    part_samples: dict[str, list[float]] = field(default_factory=dict)
    _before: dict[str, float] = field(default_factory=dict)
    _start: float = 0.0

    @property
    def gate(self) -> Path:
        return self.folder / "gate"

    def command(self) -> list[str]:
        layout = self.layout
        sizes = (layout.tp, layout.pp, layout.num_micro_batches, layout.micro_batch, layout.sharded, self.overlap)
        return [sys.executable, WORKER, str(self.gate), str(self.folder), *map(str, map(int, sizes))]

    def wait(self, iteration: int, timeout_s: float) -> None:
        """Until every rank stands at the gate before `iteration`."""
        deadline = time.monotonic() + timeout_s
        for rank in range(self.layout.world_size):
            while self._progress(rank)[0] < iteration:
                if time.monotonic() > deadline:
                    raise SystemExit(f"set {self.name}: rank {rank} did not reach iteration {iteration}")
                time.sleep(0.01)

    def _progress(self, rank: int) -> tuple[int, int, float]:
        with contextlib.suppress(OSError, ValueError):
            iteration, pid, ms = (self.folder / str(rank)).read_text().split()
            return int(iteration), int(pid), float(ms)
        return -1, 0, 0.0

    def ready(self) -> None:
        self.wait(0, START_S_MAX)
        self.parts = {"workers": [self._progress(r)[1] for r in range(self.layout.world_size)], **self.parts}

    def _allow(self, iterations: int) -> None:
        new = self.gate.with_suffix(".new")
        new.write_text(str(iterations))
        new.rename(self.gate)

    def own_parts(self) -> dict[str, list[float]]:
        """What the ranks measured of unicron's own work in an iteration, summed over the ranks. Ends the set."""
        self._allow(STOP)
        total: dict[str, float] = {}
        deadline = time.monotonic() + BLOCK_S_MAX
        for rank in range(self.layout.world_size):
            path = self.folder / f"{rank}.parts"
            while not path.exists():
                if time.monotonic() > deadline:
                    raise SystemExit(f"set {self.name}: rank {rank} did not measure its parts")
                time.sleep(0.05)
            for part, ms in json.loads(path.read_text()).items():
                total[part] = total.get(part, 0.0) + ms
        return {part: [ms] for part, ms in total.items()}

    def pin(self, own: list[list[int]], rest: list[int]) -> None:
        """Each rank on processors of its own, everything else on others: two threads that happen to share a core cost
        each other a third of their speed, and a thread that moves loses its caches: far more than what is measured.
        """
        for part, pids in self.parts.items():
            for number, pid in enumerate(pids):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with contextlib.suppress(OSError):  # a thread that just ended
                        os.sched_setaffinity(int(thread.name), own[number] if part == "workers" else rest)

    def start_block(self, iterations: int) -> None:
        self._before = {part: sum(map(cpu_s, pids)) for part, pids in self.parts.items()}
        self._start = time.monotonic()
        self.done += iterations
        self._allow(self.done)

    def is_done(self) -> bool:
        return all(self._progress(rank)[0] >= self.done for rank in range(self.layout.world_size))

    def end_block(self, iterations: int, *, count: bool) -> None:
        wall_s = time.monotonic() - self._start
        used = {part: sum(map(cpu_s, pids)) - self._before[part] for part, pids in self.parts.items()}
        if count:
            self.samples.append(1e3 * sum(used.values()) / iterations)
            self.wall.append(1e3 * wall_s / iterations)
            self.commit_to_commit.append(max(self._progress(rank)[2] for rank in range(self.layout.world_size)))
            for part, seconds in used.items():
                self.part_samples.setdefault(part, []).append(1e3 * seconds / iterations)


def blocks(sets: list[Set], iterations: int, *, count: bool = True) -> None:
    """All of them train a block at the same time; each is read when its own is done."""
    for each in sets:
        each.start_block(iterations)
    running = list(sets)
    deadline = time.monotonic() + BLOCK_S_MAX
    while running:
        for each in [each for each in running if each.is_done()]:
            each.end_block(iterations, count=count)
            running.remove(each)
        if time.monotonic() > deadline:
            raise SystemExit(f"set {running[0].name} did not reach iteration {running[0].done}")
        time.sleep(0.005)


class Places:
    """Where the sets train: side by side, each rank on a physical core of its own, when the machine has so many and one
    to spare; else one set after the other, on cores of their own if there are enough for one set.
    """

    def __init__(self, world_size: int, sets: int) -> None:
        cores = physical_cores()
        self.together = len(cores) > sets * world_size
        groups = sets if self.together else 1
        self.width = len(cores) // (groups * world_size + 1) or len(cores) // (groups * world_size)
        own = [processors(cores[i * self.width : (i + 1) * self.width]) for i in range(groups * world_size)]
        self.groups = [own[i * world_size : (i + 1) * world_size] for i in range(groups)]
        self.rest = processors(cores[groups * world_size * self.width :]) or processors(cores)

    def take(self, order: list[Set]) -> None:
        for number, each in enumerate(order):
            if self.width:
                each.pin(self.groups[number % len(self.groups)], self.rest)

    def free(self, each: Set) -> None:
        """Anywhere: a part is measured by calling it over and over, and must not share one core with gloo's thread."""
        every = self.rest + [cpu for group in self.groups for rank in group for cpu in rank]
        each.pin([every] * each.layout.world_size, every)

    def train(self, order: list[Set], iterations: int, *, count: bool = True) -> None:
        if self.together:
            self.take(order)
            blocks(order, iterations, count=count)
        else:
            for each in order:
                blocks([each], iterations, count=count)


@contextlib.contextmanager
def unmanaged(
    name: str, root: Path, layout: Layout, *, is_awaited: bool = True, overlap: bool = False
) -> Iterator[Set]:
    made = Set(name, root / name, layout, overlap)
    made.folder.mkdir()
    processes = []
    port = runner.free_port()
    for rank in range(layout.world_size):
        processes.append(runner.start_plain(made.command()[1:], rank, layout.world_size, port, made.folder))
    try:
        if is_awaited:
            made.ready()
        yield made
    finally:
        end(processes)


def end(processes: list[subprocess.Popen[Any]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait(10)


@contextlib.contextmanager
def managed(root: Path, layout: Layout) -> Iterator[Set]:
    made = Set("B", root / "B", layout)
    made.folder.mkdir()
    with LocalCluster(
        num_agents=layout.dp, slots=layout.replica_size, understudies=1, imports=runner.IMPORTS,
        log_dir=root / "cluster",
    ) as cluster:  # fmt: skip
        task = cluster.submit(
            Job(
                name="overhead", command=tuple(made.command()), layout=layout, cwd=str(root),
                log_dir=str(root / "logs"), understudies=1,
            )
        )  # fmt: skip
        made.parts = {
            "coordinator": [cluster.coordinator_pid],
            "agents": [cluster.agent_pid(node) for node in cluster.nodes],
        }
        made.ready()
        time.sleep(2.0)  # understudies are built
        rows = cluster.task(task)["workers"]
        made.parts["understudies"] = [row["pid"] for row in rows if not row["is_member"]]
        yield made
        with contextlib.suppress(CoordinatorRefused):  # it ended by itself, after its parts were measured
            cluster.cancel(task)


def ratios(base: list[float], other: list[float]) -> tuple[float, float]:
    """(mean of the paired differences, 95 % half-width), in per cent of base."""
    pairs = [100 * (b / a - 1) for a, b in zip(base, other, strict=True)]
    if len(pairs) < 2:
        return pairs[0], math.inf
    return statistics.mean(pairs), 2.0 * statistics.stdev(pairs) / math.sqrt(len(pairs))


def kept(path: Path | None) -> dict[str, list[float]]:
    """CPU ms per iteration of each set's blocks in earlier runs on this machine, round by round."""
    return json.loads(path.read_text()) if path and path.exists() else {}


def measure(sets: dict[str, Set], places: Places, arguments: argparse.Namespace) -> None:
    order = list(sets.values())
    drawn = random.Random(arguments.seed + len(sets["A"].samples))
    places.take(order)
    places.train(order, WARM_UP, count=False)
    deadline = time.monotonic() + arguments.minutes * 60
    for _ in range(arguments.runs):
        drawn.shuffle(order)
        places.train(order, arguments.block)
        mean, half = ratios(sets["A"].samples, sets["A'"].samples)
        ms = " ".join(f"{name} {sets[name].samples[-1]:.2f}" for name in sorted(sets))
        if arguments.samples:
            arguments.samples.write_text(json.dumps({name: sets[name].samples for name in sets}))
        rounds = len(sets["A"].samples)
        print(f"round {rounds}: A'/A {mean:+.2f} % +- {half:.2f} %  ({ms} ms)", file=sys.stderr, flush=True)
        if (rounds >= 8 and half <= arguments.resolve) or time.monotonic() > deadline:
            return


def report(sets: dict[str, Set], places: Places, arguments: argparse.Namespace) -> common.Bench:
    a, b = sets["A"], sets["B"]
    noise, noise_half = ratios(a.samples, sets["A'"].samples)
    cost, cost_half = ratios(a.samples, b.samples)
    bench = common.Bench(
        "cost of being managed", "CPU ms per iteration", baseline="A: unmanaged",
        configuration={
            "layout": arguments.layout, "cores a rank": places.width, "sets at a time": len(places.groups),
            "block": arguments.block, "rounds": len(a.samples),
            "A'/A %": round(noise, 2), "A'/A half-width %": round(noise_half, 2),
            "B/A %": round(cost, 2), "B/A half-width %": round(cost_half, 2),
            "upper end of B/A %": round(cost + cost_half, 2), "allowed %": round(2.0 + noise_half, 2),
        },
    )  # fmt: skip
    bench.add("A: unmanaged", a.samples, **{"wall ms": statistics.median(a.wall)})
    bench.add("A': unmanaged", sets["A'"].samples, **{"wall ms": statistics.median(sets["A'"].wall)})
    bench.add("B: managed", b.samples, **{"wall ms": statistics.median(b.wall)})
    whole = statistics.median(a.samples)
    beside = {part: ms for part, ms in b.part_samples.items() if part != "workers"}
    for each in (a, b):
        places.free(each)
    parts = {**beside, **b.own_parts()}
    for part, samples in parts.items():
        bench.add(f"B, part: {part}", samples, **{"% of A": 100 * statistics.median(samples) / whole})
    total = sum(statistics.median(samples) for samples in parts.values())
    bench.configuration["parts, summed %"] = round(100 * total / whole, 2)
    for part, samples in a.own_parts().items():
        bench.add(f"A, part: {part}", samples, **{"% of A": 100 * statistics.median(samples) / whole})
        bench.configuration[f"parts, less what is {part}, %"] = round(100 * (total - samples[0]) / whole, 2)
    return bench


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=80)
    parser.add_argument("--layout", default="1,1,4", help="tp,pp,dp")
    parser.add_argument("--block", type=int, default=20, help="iterations in a block")
    parser.add_argument("--resolve", type=float, default=0.7, help="half-width of A'/A, in %%, at which to stop")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this long in any case")
    parser.add_argument("--samples", type=Path, help="keep the rounds in this file, and go on from those in it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    layout = runner.layout_of(*map(int, arguments.layout.split(",")))
    with common.scratch() as root, contextlib.ExitStack() as stack:
        sets = {
            "A": stack.enter_context(unmanaged("A", root, layout)),
            "A'": stack.enter_context(unmanaged("A'", root, layout)),
            "B": stack.enter_context(managed(root, layout)),
        }
        for name, samples in kept(arguments.samples).items():
            sets[name].samples.extend(samples)
        places = Places(layout.world_size, len(sets))
        measure(sets, places, arguments)
        report(sets, places, arguments).finish(arguments)


if __name__ == "__main__":
    main()
