"""Where a GPU stands still in an iteration, and which kernels it runs more of, managed beside unmanaged.

Both train the same script; iterations of rank 0 are traced by torch's profiler. `busy` is the time in which some kernel
or copy runs on any stream, `idle` the rest, `gaps` the pauses above GAP_US. Then the kernels that differ most, and the
gaps that come again, each by what ran before it and after it. A profiler costs time itself: look at what differs.

    UNICRON_DEMO_SIZE=1b python bench/gpu/bench_idle.py --dp 2
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("UNICRON_DEMO_SIZE", "1b")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

SCRIPT = Path(__file__).with_name("traced_train.py")
FIRST, COUNT = 8, 4
GAP_US = 20.0
RUN_S_MAX = 150.0
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
NAME_CHARS = 60


@dataclass
class Trace:
    """All times in ms of an iteration."""

    wall: float = 0.0
    busy: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)
    gaps: Counter[str] = field(default_factory=Counter)
    num_gaps: int = 0


def read(path: Path) -> Trace:
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") in ON_GPU]
    events.sort(key=lambda event: event["ts"])
    trace, until, before = Trace(), events[0]["ts"], ""
    per_iteration = 1 / (1000 * COUNT)
    for event in events:
        name, begin, end = event["name"][:NAME_CHARS], event["ts"], event["ts"] + event["dur"]
        trace.kernels[name] += event["dur"] * per_iteration
        if begin - until > GAP_US:
            trace.gaps[f"{before} -> {name}"] += (begin - until) * per_iteration
            trace.num_gaps += 1
        if end > until:
            trace.busy += (end - max(until, begin)) * per_iteration
            until, before = end, name
    trace.wall = (until - events[0]["ts"]) * per_iteration
    return trace


def traced(folder: Path) -> dict[str, str]:
    return {"TRACE_INTO": str(folder), "TRACE_FIRST": str(FIRST), "TRACE_COUNT": str(COUNT)}


def unmanaged(folder: Path, layout: Layout) -> Trace:
    port, ranks = runner.free_port(), []
    for rank in range(layout.world_size):
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.world_size),
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
        command = [sys.executable, str(SCRIPT), *words(folder), "--tp", str(layout.tp), "--pp", str(layout.pp)]
        command += ["--micro-batch", str(layout.micro_batch), "--num-micro-batches", str(layout.num_micro_batches)]
        command += ["--sharded"] if layout.sharded else []
        ranks.append(subprocess.Popen(command, env={**os.environ, **where, **traced(folder)}))
    codes = [rank.wait(RUN_S_MAX) for rank in ranks]
    if any(codes):
        raise SystemExit(f"the unmanaged run ended with {codes}")
    return read(folder / "trace_0.json")


def managed(folder: Path, layout: Layout) -> Trace:
    with LocalCluster(
        num_agents=layout.dp, slots=layout.replica_size, understudies=1, imports=runner.IMPORTS,
        log_dir=folder / "cluster",
    ) as cluster:  # fmt: skip
        job = Job(
            name="idle", command=(sys.executable, str(SCRIPT), *words(folder)), layout=layout, cwd=str(folder),
            log_dir=str(folder / "logs"), understudies=1, env=traced(folder),
        )  # fmt: skip
        task = cluster.submit(job)
        view = cluster.wait(task, RUN_S_MAX)
        if view["phase"] != "done":
            raise SystemExit(f"the managed run is {view['phase']}: {view['cause']}; logs: {folder}")
    return read(folder / "trace_0.json")


def words(folder: Path) -> list[str]:
    return ["--iterations", str(FIRST + COUNT + 2), "--results", str(folder)]


def differences(ours: Counter[str], theirs: Counter[str], most: int) -> list[tuple[str, float, float]]:
    names = sorted({*ours, *theirs}, key=lambda name: theirs[name] - ours[name])
    return [(name, ours[name], theirs[name]) for name in names[:most]]


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=1)
    for name, default in (("tp", 1), ("pp", 1), ("dp", 2), ("micro-batch", 8), ("micro-batches", 4), ("most", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sharded", action="store_true")
    arguments = parser.parse_args()
    layout = Layout(
        tp=arguments.tp, pp=arguments.pp, dp=arguments.dp, micro_batch=arguments.micro_batch,
        num_micro_batches=arguments.micro_batches * arguments.dp, sharded=arguments.sharded,
    )  # fmt: skip
    with common.scratch() as root:
        found: dict[str, Trace] = {}
        for name, run in (("unmanaged", unmanaged), ("managed", managed)):
            (root / name).mkdir()
            found[name] = run(root / name, layout)
    bench = common.Bench(
        "a GPU's iteration", "ms", baseline="unmanaged",
        configuration={"size": os.environ["UNICRON_DEMO_SIZE"], "layout": f"{layout.tp},{layout.pp},{layout.dp}",
                       "micro-batch": layout.micro_batch, "sharded": layout.sharded, "iterations": COUNT},
    )  # fmt: skip
    for name, trace in found.items():
        facts: dict[str, Any] = {"busy": f"{trace.busy:.2f}", "idle": f"{trace.wall - trace.busy:.2f}"}
        bench.add(name, [trace.wall], **facts, gaps=trace.num_gaps // COUNT)
    bench.finish(arguments)
    ours, theirs = found["managed"], found["unmanaged"]
    for title, pair in (("kernels", (ours.kernels, theirs.kernels)), ("gaps", (ours.gaps, theirs.gaps))):
        print(f"\n{title}, ms of an iteration: managed, unmanaged", file=sys.stderr)
        for name, a, b in differences(*pair, arguments.most):
            print(f"{a:9.3f} {b:9.3f}  {name}", file=sys.stderr)


if __name__ == "__main__":
    main()
