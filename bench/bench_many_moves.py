"""Moves all the time, and many at once: a node drained every 20 iterations, and several nodes drained together.

`sustained`: a task's nodes are drained in turn, one every --every iterations, and each is free again when its roles
have left it. ETTR is the time of the same iterations undisturbed (mean of a run before it and one after it) over its
own; their spread says how far the machine alone moves it. A slow rank that is named is the machine's, and no move.
`at once`: so many nodes are drained together; their pause is the longest time from commit to commit, less the median
one; their time is that from the request until the last role has left: most of it is imports of new processes. Losses
must be those of an undisturbed run, bit for bit.

With --own-cores each node has cores of its own, as machines have; else who prepares for a move takes them from those
who train. A pause does not depend on the iteration's length: of 20 iterations of 75 ms 46 ms are 3 %. --micro-batches
makes them longer, as they are in training. Source of the goals: TrainMover (OSDI'26), sections 5, 7.

    python bench/bench_many_moves.py --layout 1,1,4 --iterations 400 --json
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import common
from bench_moves import Run
from unicron.demo import runner
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

FIRST_COUNTED = 4  # iterations before it load code
DRAINED_AT = 12
AT_ONCE_ITERATIONS = 40
LOOK_S = 0.1  # for processes that are new


class Moving(Run):
    """One task; drains: iteration -> how many of its nodes are drained after it. look: called again and again."""

    look: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    def __init__(self, layout: Layout, folder: Path, iterations: int, drains: dict[int, int]) -> None:
        super().__init__(layout, "warm-up", folder, iterations)
        self.drains = drains
        self.num_moves = 0
        self.times_ms: list[float] = []  # from a request to drain until the last role had left

    def carry_out(self, cluster: LocalCluster) -> None:
        task = cluster.submit(self._job())
        for turn, (iteration, count) in enumerate(sorted(self.drains.items())):
            self._wait(lambda at=iteration: self._read() >= at)
            homes = self._homes(cluster, task)
            leaving = [homes[(turn + k) % len(homes)] for k in range(count)]
            begun = time.monotonic()
            for node in leaving:
                cluster.drain(node)
            self._wait(lambda gone=leaving: not set(gone) & set(self._homes(cluster, task)))
            self.times_ms.append((time.monotonic() - begun) * 1e3)
            for node in leaving:
                cluster.undrain(node)
        self._wait(lambda: cluster.task(task)["phase"] in ("done", "stopped"))
        self.require_done(cluster, task)
        incidents = cluster.incidents(task)
        self.num_moves = sum(i["fault"] == "move" for i in incidents)
        if others := [f"{i['fault']}: {i['cause']}" for i in incidents if i["fault"] not in ("move", "slow")]:
            raise SystemExit("incidents that are no moves: " + "\n".join(others))

    def _wait(self, is_over: Any) -> None:
        def looked() -> Any:
            Moving.look()
            return is_over()

        super()._wait(looked)

    @staticmethod
    def _homes(cluster: LocalCluster, task: str) -> list[str]:
        members = [w for w in cluster.task(task)["workers"] if w["is_member"]]
        return list(dict.fromkeys(w["node"] for w in sorted(members, key=lambda w: int(w["rank"]))))

    def training_ms(self) -> float:
        return sum(self.iteration_ms().values())

    def pauses_ms(self) -> list[float]:
        """The longest iteration between one drain and the next, less the median."""
        times = self.iteration_ms()
        usual = statistics.median(times.values())
        starts = [*sorted(self.drains), self.iterations]
        return [
            max(ms for i, ms in times.items() if begin < i <= end) - usual for begin, end in itertools.pairwise(starts)
        ]


def sustained(
    layout: Layout, top: Path, cluster: LocalCluster, iterations: int, every: int
) -> tuple[Moving, list[Moving]]:
    """The run with its moves, and the undisturbed ones before and after it."""
    run = Moving(layout, top / "sustained", iterations, dict.fromkeys(range(every, iterations - every // 2, every), 1))
    before, after = (Moving(layout, top / name, iterations, {}) for name in ("before", "after"))
    for each in (before, run, after):
        each.carry_out(cluster)
        require_same(each, before, each.folder.name)
    return run, [before, after]


def at_once(layout: Layout, top: Path, cluster: LocalCluster, counts: list[int], runs: int) -> dict[int, list[Moving]]:
    found: dict[int, list[Moving]] = {count: [] for count in counts}
    reference = Moving(layout, top / "alone", AT_ONCE_ITERATIONS, {})
    reference.carry_out(cluster)
    for number in range(runs):
        for count in counts:
            run = Moving(layout, top / f"{count}-at-once-{number}", AT_ONCE_ITERATIONS, {DRAINED_AT: count})
            run.carry_out(cluster)
            require_same(run, reference, f"{count} at once")
            found[count].append(run)
    return found


class OwnCores:
    """Gives each node's processes cores of the node's own, soon after they are there; daemons stay anywhere."""

    def __init__(self, cluster: LocalCluster, slots: int) -> None:
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // len(cluster.nodes)
        if share < slots:
            raise SystemExit(
                f"--own-cores: {len(cluster.nodes)} nodes of {slots} slots need more than {len(cores)} cores"
            )
        self._own = {node: cores[i * share : (i + 1) * share] for i, node in enumerate(cluster.nodes)}
        self._cluster, self._known = cluster, set[int]()
        self._at = 0.0

    def look(self) -> None:
        if time.monotonic() < self._at:
            return
        self._at = time.monotonic() + LOOK_S
        for worker in self._cluster.workers():
            if worker.pid not in self._known:
                self._known.add(worker.pid)
                for thread in Path("/proc").glob(f"{worker.pid}/task/*"):
                    with contextlib.suppress(OSError):  # one that just ended
                        os.sched_setaffinity(int(thread.name), self._own[worker.node])


def require_same(run: Moving, reference: Moving, name: str) -> None:
    if run.losses != reference.losses:
        raise SystemExit(f"{name}: the losses are not those of the undisturbed run; logs: {run.folder}")


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--layout", default="1,1,4", help="tp,pp,dp")
    parser.add_argument("--micro-batches", type=int, default=runner.MICRO_BATCHES_PER_REPLICA, help="of a replica")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="iterations between two moves")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 2, 4], help="nodes drained together")
    parser.add_argument("--own-cores", action="store_true", help="for each node")
    arguments = parser.parse_args()
    layout = runner.layout_of(*map(int, arguments.layout.split(",")))
    layout = msgspec.structs.replace(layout, num_micro_batches=arguments.micro_batches * layout.num_replicas)
    counts = [count for count in arguments.at_once if count <= layout.dp]
    configuration: dict[str, Any] = {
        "layout": arguments.layout, "micro-batches": layout.num_micro_batches,
        "iterations": arguments.iterations, "every": arguments.every,
        "nodes": layout.dp + max(counts, default=1), "own cores": arguments.own_cores,
    }  # fmt: skip
    with (
        common.scratch() as top,
        LocalCluster(
            num_agents=configuration["nodes"], slots=layout.replica_size, understudies=0, imports=runner.IMPORTS,
            log_dir=top / "logs",
        ) as cluster,
    ):  # fmt: skip
        if arguments.own_cores:
            Moving.look = OwnCores(cluster, layout.replica_size).look
        run, undisturbed = sustained(layout, top, cluster, arguments.iterations, arguments.every)
        found = at_once(layout, top, cluster, counts, arguments.runs) if counts else {}
    alone = [each.training_ms() for each in undisturbed]
    configuration |= {
        "moves": run.num_moves,
        "ETTR": round(statistics.mean(alone) / run.training_ms(), 4),
        "undisturbed, longest over shortest": round(max(alone) / min(alone), 4),
    }
    bench = common.Bench("many moves", unit="ms", configuration=configuration)
    bench.add("undisturbed iteration", [ms for each in undisturbed for ms in each.iteration_ms().values()])
    bench.add("iteration", list(run.iteration_ms().values()))
    bench.add("sustained: pause of a move", run.pauses_ms())
    for name, of in (("pause", Moving.pauses_ms), ("time", lambda run: run.times_ms)):
        samples = {count: [ms for run in runs for ms in of(run)] for count, runs in found.items()}
        for count, each in samples.items():
            ratio = statistics.median(each) / statistics.median(samples[counts[0]])
            bench.add(f"{count} at once: {name}", each, ratio=round(ratio, 2))
    bench.finish(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
