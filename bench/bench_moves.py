"""What a drained node costs a training task, technique by technique (TrainMover's ablation), each switched on in turn.

The same work every time: the demo's GPT, one node drained in mid-training, one node free. `restart`: the task saves,
leaves and begins elsewhere from its checkpoint. `state`: joiners take it from the leavers at an iteration boundary; all
groups are made there. `groups`: they are made beforehand, beside training. `warm-up`: the joiners have done a whole
iteration without peers, too. The pause is the longest time from commit to commit, less the median one; `first` is the
first iteration after the move. Losses must be those of an undisturbed run, bit for bit.

    python bench/bench_moves.py --layout 1,1,4 --runs 3 --json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

WAYS = {"restart": "", "state": "groups,warm-up", "groups": "warm-up", "warm-up": "none"}
DRAINED_AFTER = 12
ITERATIONS = 60
WAIT_S = 600.0


class Run:
    """One task, drained once. commits: iteration -> when the first of the ranks that stayed had committed it, in ms."""

    def __init__(self, layout: Layout, way: str, folder: Path, iterations: int = ITERATIONS) -> None:
        self.layout, self.way, self.folder, self.iterations = layout, way, folder, iterations
        self.records = folder / "records"
        self.records.mkdir(parents=True)
        self.losses: dict[int, float] = {}
        self.commits: dict[int, float] = {}
        self.incident: dict[str, Any] = {}
        self._seen_bytes: dict[Path, int] = {}

    def carry_out(self, cluster: LocalCluster) -> None:
        task = cluster.submit(self._job())
        self._wait(lambda: self._read() >= DRAINED_AFTER)
        members = [w for w in cluster.task(task)["workers"] if w["is_member"]]
        node = max(members, key=lambda w: int(w["rank"]))["node"]
        if self.way == "restart":
            cluster.ask("suspend", task=task)
            self._wait(lambda: cluster.task(task)["phase"] == "suspended")
            cluster.drain(node)
            cluster.ask("resume", task=task)
        elif self.way:
            cluster.drain(node)
        self._wait(lambda: cluster.task(task)["phase"] in ("done", "stopped"))
        self.require_done(cluster, task)
        moves = [i for i in cluster.incidents(task) if i["fault"] == "move"]
        if self.way in ("state", "groups", "warm-up") and len(moves) != 1:
            raise SystemExit(f"{self.way}: {len(moves)} moves, must be 1")
        self.incident = moves[0] if moves else {}
        if self.way:
            cluster.undrain(node)

    def require_done(self, cluster: LocalCluster, task: str) -> None:
        view = cluster.task(task)
        if view["phase"] != "done" or self._read() < self.iterations - 1:
            raise SystemExit(f"{self.way}: {view['phase']} after iteration {self._read()}: {view['cause']}")

    def _job(self) -> Job:
        command = [*runner.SCRIPT, "--iterations", str(self.iterations), "--results", str(self.records)]
        return Job(
            name=f"{self.way or 'undisturbed'}-{self.folder.name}",
            command=(sys.executable, *command),
            layout=self.layout,
            cwd=str(self.folder),
            env={"UNICRON_MOVES_WITHOUT": WAYS.get(self.way, "none")},
            log_dir=str(self.folder / "logs"),
            checkpoint_dir=str(self.folder / "checkpoints"),
        )

    def _wait(self, is_over: Any) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_over():
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.way}: nothing came of it in {WAIT_S:g} s; logs: {self.folder}")
            time.sleep(0.05)

    def _read(self) -> int:
        for path in self.records.glob("rank_*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._seen_bytes.get(path, 0))
                whole, _, _ = file.read().rpartition(b"\n")  # the rest is being written
            self._seen_bytes[path] = self._seen_bytes.get(path, 0) + (len(whole) + 1 if whole else 0)
            for said in map(json.loads, whole.splitlines()):
                if said["event"] == "iteration":
                    iteration, at_ms = said["iteration"], said["commit_ns"] / 1e6
                    self.losses[iteration] = said["loss"]
                    self.commits[iteration] = min(at_ms, self.commits.get(iteration, at_ms))
        return max(self.losses, default=-1)

    def iteration_ms(self) -> dict[int, float]:
        return {
            i: self.commits[i] - self.commits[i - 1] for i in sorted(self.commits) if i > 3 and i - 1 in self.commits
        }

    def pause_ms(self) -> float:
        times = self.iteration_ms()
        after = {i: ms for i, ms in times.items() if i > DRAINED_AFTER}
        return max(after.values()) - statistics.median(times.values())

    def first_ratio(self) -> float:
        """The iteration after the longest one, against the median."""
        times = self.iteration_ms()
        longest = max((i for i in times if DRAINED_AFTER < i < ITERATIONS - 1), key=times.__getitem__)
        return times[longest + 1] / statistics.median(times.values())


def main() -> int:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--layout", default="1,1,4", help="tp,pp,dp")
    arguments = parser.parse_args()
    tp, pp, dp = map(int, arguments.layout.split(","))
    layout = runner.layout_of(tp, pp, dp)
    bench = common.Bench(
        "moves", unit="ms", baseline="restart",
        configuration={"layout": arguments.layout, "iterations": ITERATIONS, "nodes": dp + 1},
    )  # fmt: skip
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    firsts: dict[str, list[float]] = {way: [] for way in WAYS}
    with (
        common.scratch() as top,
        LocalCluster(
            num_agents=dp + 1,
            slots=layout.replica_size,
            understudies=0,
            imports=runner.IMPORTS,
            log_dir=top / "logs",
        ) as cluster,
    ):
        reference = Run(layout, "", top / "0")
        reference.carry_out(cluster)
        for number in range(1, arguments.runs + 1):
            for way in WAYS:
                run = Run(layout, way, top / f"{way}-{number}")
                run.carry_out(cluster)
                if run.losses != reference.losses:
                    raise SystemExit(f"{way}: the losses are not those of the undisturbed run")
                samples[way].append(run.pause_ms())
                firsts[way].append(run.first_ratio())
    for way, pauses in samples.items():
        bench.add(way, pauses, first=round(statistics.median(firsts[way]), 2))
    bench.finish(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
