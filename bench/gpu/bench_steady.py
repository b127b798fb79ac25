"""What being managed costs a GPU when nothing fails: wall time of an iteration, and memory.

Sets of processes hold their place on the same GPUs and train blocks of iterations in turn, in an order drawn anew each
round: A and A' unmanaged, B under unicron, with --buddy-every also C, whose optimizer's shards are copied to the other
node. Within a block time goes from the first commit to the last, on the slowest rank. A round gives one pair of each
comparison, so what a GPU's clock does over minutes is in both; A'/A says what can be told apart at all.

Memory is the whole GPU's: what is free again when a set, or its understudies alone, are ended. Nothing of a process's
own view is missed (context, kernels, communicators), and a container's pids need not be the driver's.

With --overlap the script asks for overlapped communication: Megatron's own in A and A', unicron's in the others
(UNICRON_EAGER_MIB says how much of the gradient is reduced under the backward).

    UNICRON_DEMO_SIZE=1b python bench/gpu/bench_steady.py --seconds 80
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# So large that an iteration waits for the GPU: what the launching CPU does varies by ten percent.
os.environ.setdefault("UNICRON_DEMO_SIZE", "1b")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import common
import last_lines
from bench_overhead import Set, blocks, ratios, unmanaged
from unicron.coordinator.job import Job
from unicron.demo import runner
from unicron.runtime.client import CoordinatorRefused
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

WARM_UP = 6
READY_S_MAX = 60.0
FREED_S = 1.2  # a killed process's memory is free then, and nobody has come in its place
ROUNDS_MAX = 200


def used_mib() -> list[int]:
    """Of each GPU; [] where nobody can say."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return [int(line) for line in text.split()]
    except (OSError, subprocess.SubprocessError, ValueError) as problem:
        print(f"nvidia-smi: {problem}", file=sys.stderr)
        return []


def lowest_mib(seconds: float) -> list[int]:
    """Of each GPU, within so long: a process that ends gives its memory back after a while."""
    found = used_mib()
    deadline = time.monotonic() + seconds
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [min(pair) for pair in zip(found, used_mib() or found, strict=True)]
    return found


def difference(before: list[int], after: list[int]) -> float:
    """MiB per GPU; nan where nobody can say."""
    return statistics.mean(b - a for b, a in zip(before, after, strict=True)) if before and after else math.nan


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def memory_of(sets: dict[str, Set], clusters: dict[str, Any], waiting: dict[str, list[int]]) -> dict[str, float]:
    """MiB of a GPU that each set held, and its understudies. Ends the sets. A managed one's state is in its agent's
    hands, and stays until the task is over."""
    memory = {}
    for name, each in sets.items():
        before = used_mib()
        if name in clusters:
            cluster, task = clusters[name]
            kill(waiting[name])
            between = lowest_mib(FREED_S)
            memory[f"{name} understudy"] = difference(before, between)
            with contextlib.suppress(CoordinatorRefused):
                cluster.cancel(task)
            memory[name] = difference(between, lowest_mib(3 * FREED_S))
        else:
            kill(each.parts["workers"])
            memory[name] = difference(before, lowest_mib(FREED_S))
    return memory


@contextlib.contextmanager
def managed(name: str, root: Path, layout: Layout, overlap: bool) -> Iterator[tuple[Set, Any, str]]:
    """(set, cluster, task), which are not awaited yet."""
    made = Set(name, root / name, layout, overlap)
    made.folder.mkdir()
    with LocalCluster(
        num_agents=layout.dp, slots=layout.replica_size, understudies=1, imports=runner.IMPORTS,
        log_dir=root / f"cluster-{name}",
    ) as cluster:  # fmt: skip
        job = Job(
            name="steady", command=tuple(made.command()), layout=layout, cwd=str(root),
            log_dir=str(root / f"logs-{name}"), understudies=1,
        )  # fmt: skip
        task = cluster.submit(job)
        yield made, cluster, task
        with contextlib.suppress(CoordinatorRefused):
            cluster.cancel(task)


def understudies(cluster: Any, task: str, wanted: int) -> list[int]:
    """Their pids, when they are built: what they do until then would be in the measurement."""
    deadline = time.monotonic() + READY_S_MAX
    while True:
        rows = [row for row in cluster.task(task)["workers"] if not row["is_member"]]
        if len(rows) >= wanted and all(row.get("phase", "ready") == "ready" for row in rows):
            return [row["pid"] for row in rows]
        if time.monotonic() > deadline:
            print(f"understudies are not ready: {rows}", file=sys.stderr, flush=True)
            return [row["pid"] for row in rows]
        time.sleep(0.2)


def measure(sets: dict[str, Set], arguments: argparse.Namespace) -> None:
    order, drawn = list(sets.values()), random.Random(arguments.seed)
    for each in order:
        blocks([each], WARM_UP, count=False)
    deadline, longest = time.monotonic() + arguments.seconds, 0.0
    for number in range(ROUNDS_MAX):
        begun = time.monotonic()
        drawn.shuffle(order)
        for each in order:
            blocks([each], arguments.block)
        ms = " ".join(f"{name} {sets[name].commit_to_commit[-1]:.2f}" for name in sorted(sets))
        print(f"round {number}: {ms} ms", file=sys.stderr, flush=True)
        longest = max(longest, time.monotonic() - begun)
        if time.monotonic() + longest > deadline:
            return


def report(sets: dict[str, Set], memory: dict[str, float], arguments: argparse.Namespace) -> common.Bench:
    a = sets["A"].commit_to_commit
    bench = common.Bench(
        "steady state on GPUs", "ms per iteration", baseline="A",
        configuration={
            "size": os.environ["UNICRON_DEMO_SIZE"], "dp": arguments.dp, "micro-batch": arguments.micro_batch,
            "sharded": arguments.sharded, "overlap": arguments.overlap,
            "block": arguments.block, "rounds": len(a),
        },
    )  # fmt: skip
    for name, each in sets.items():
        facts: dict[str, Any] = {}
        if name != "A":
            mean, half = ratios(a, each.commit_to_commit)
            facts = {"mean of pairs, % of A": f"{mean:+.3f}", "+- (95 %)": f"{half:.3f}"}
        if name == "C":
            mean, half = ratios(sets["B"].commit_to_commit, each.commit_to_commit)
            facts |= {"of pairs with B, %": f"{mean:+.3f}", "so +- (95 %)": f"{half:.3f}"}
        if name in memory:
            facts["GPU MiB a rank"] = f"{memory[name]:.0f}"
        if f"{name} understudy" in memory:
            facts["of its understudy"] = f"{memory[f'{name} understudy']:.0f}"
        bench.add(name, each.commit_to_commit, **facts)
    return bench


@contextlib.contextmanager
def told(root: Path) -> Iterator[None]:
    """What the processes said last, when it fails: their logs may be out of reach later."""
    try:
        yield
    except (Exception, SystemExit):
        logs = [path for path in root.rglob("*.log") if path.stat().st_size]
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[-12:]:
            last_lines.show(path)
        raise


def layouts(arguments: argparse.Namespace) -> tuple[Layout, Layout]:
    """Of A, A' and B; of C."""
    micro_batches = arguments.micro_batches * arguments.dp
    sizes = {
        "dp": arguments.dp, "micro_batch": arguments.micro_batch, "num_micro_batches": micro_batches,
        "sharded": arguments.sharded,
    }  # fmt: skip
    return Layout(**sizes), Layout(**sizes, buddy=True, buddy_every=max(0, arguments.buddy_every))


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=1)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of a replica")
    parser.add_argument("--micro-batch", type=int, default=8, help="sequences in one")
    parser.add_argument("--block", type=int, default=8, help="iterations in a block")
    parser.add_argument("--seconds", type=float, default=75.0, help="of rounds")
    parser.add_argument("--sharded", action="store_true", help="the distributed optimizer")
    parser.add_argument(
        "--overlap", action="store_true", help="A, A' with Megatron's own overlapped communication, B with unicron's"
    )
    parser.add_argument("--buddy-every", type=int, default=-1, help="also with copies of shards; 0: at every step")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.sharded = arguments.sharded or arguments.buddy_every >= 0
    plain, with_copies = layouts(arguments)
    wanted = {"B": plain} | ({"C": with_copies} if arguments.buddy_every >= 0 else {})
    with common.scratch() as root, told(root), contextlib.ExitStack() as stack:
        sets = {
            name: stack.enter_context(unmanaged(name, root, plain, is_awaited=False, overlap=arguments.overlap))
            for name in ("A", "A'")
        }
        clusters = {}
        for name, layout in wanted.items():
            sets[name], *clusters[name] = stack.enter_context(managed(name, root, layout, arguments.overlap))
        for each in sets.values():
            each.ready()
        waiting = {name: understudies(cluster, task, plain.dp) for name, (cluster, task) in clusters.items()}
        print(f"all stand ready; GPU memory used: {used_mib()} MiB", file=sys.stderr, flush=True)
        measure(sets, arguments)
        report(sets, memory_of(sets, clusters, waiting), arguments).finish(arguments)


if __name__ == "__main__":
    main()
