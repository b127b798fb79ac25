"""A real GPT under unicron on GPUs: each case against an undisturbed run of the same script.

    python tests/gpu/managed.py --layout 1,1,2 --size 350m --cases kill-compute,kill-reduce

One living cluster per call; a line of JSON and a row of the table per case: did it finish, are parameters and optimizer
state of all ranks the same bits, and what the incident cost. Exit code 1 when a case did not end as it must.

Columns, all in ms: detect, decide, resume: from the fault to its being known, answered, and to the commit of the
iteration that it interrupted; lost: that iteration less a usual one; gap: the longest time from one commit to the next;
outside: from a kill at a moment of its own (kill-now, node-now) to the first commit of the new holder of the role, by
the clock of this program. A case that does not end in time leaves the stacks and last lines of all workers behind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
import last_lines
from unicron.coordinator.job import Job
from unicron.faults.kinds import AFTER, BEFORE, INSIDE
from unicron.runtime.local_cluster import ClusterProblem, LiveWorker, LocalCluster
from unicron.types import Layout

IMPORTS = "torch,megatron.core,unicron.training,unicron.demo.model,unicron.demo.record"
CASES = {  # name: fault, point, micro-batch (-1: any; in the reduction the segment)
    "kill-compute": ("kill", "compute", -1),
    "kill-forward": ("kill", "forward", -1),
    "kill-eager-before": ("kill", "eager", BEFORE),  # those of eager with --overlap
    "kill-eager-inside": ("kill", "eager", INSIDE),
    "kill-eager-after": ("kill", "eager", AFTER),
    "illegal-access-eager": ("memory", "eager", INSIDE),
    "kill-reduce": ("kill", "reduce", -1),
    "kill-commit": ("kill", "commit", -1),
    "kill-step": ("kill", "step", -1),
    "segv-compute": ("segv", "compute", -1),
    "exception-compute": ("exception", "compute", -1),
    "exception-reduce": ("exception", "reduce", -1),
    "illegal-access": ("memory", "compute", -1),
    "illegal-access-reduce": ("memory", "reduce", -1),
    "illegal-access-step": ("memory", "step", -1),
    "hang": ("deadlock", "compute", -1),  # the others wait for it in their reduction
    "not-joining": ("deadlock", "reduce", -1),  # the others are in a collective that it never begins
    "gil-held": ("gil", "compute", -1),
    "stop": ("stop", "compute", -1),
    "stop-now": ("stop", "now", -1),
    "reset": ("reset", "reduce", -1),
    "node": ("node", "compute", -1),  # with --sharded --buddy or --instances, else what is lost stays lost
    "node-now": ("node", "now", -1),
    "exit-idle": ("exit", "idle", -1),
    "kill-now": ("kill", "now", -1),
}
COLUMNS = (
    "case", "end", "bits", "iteration", "fault", "category", "severity", "seen by", "state from", "detect", "decide",
    "resume", "lost", "gap", "outside", "run s",
)  # fmt: skip


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


class Victim(NamedTuple):
    rank: int
    pid: int
    begun_ns: int  # of a fault from outside; 0: the worker does it to itself


class Runs:
    def __init__(self, cluster: LocalCluster, options: argparse.Namespace, layout: Layout) -> None:
        self._cluster, self._options, self._layout = cluster, options, layout
        self._logs = (options.folder / "logs").resolve()
        self.present = ""  # the case that runs

    def one(self, name: str, fault: tuple[str, str, int] | None) -> dict[str, Any]:
        """Raises ClusterProblem when it does not end in its time."""
        self.present = name
        folder = (self._options.folder / "runs" / name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = (sys.executable, "-m", "unicron.demo.train", "--iterations", str(self._options.iterations),
                   "--results", str(folder), *script_of(self._options))  # fmt: skip
        job = Job(
            name=name, command=command, layout=self._layout, cwd=os.getcwd(), understudies=1, stopped_grace_ms=0,
            log_dir=str(self._logs), checkpoint_dir="",
        )  # fmt: skip
        begun = time.monotonic()
        task = self._cluster.submit(job)
        victim = self._disturb(task, folder, fault) if fault is not None else None
        view = self._cluster.wait(task, max(1.0, begun + self._options.timeout - time.monotonic()))
        result = {"case": name, "phase": view["phase"], "seconds": round(time.monotonic() - begun, 1)}
        result |= records(folder, victim)
        result["incidents"] = self._cluster.incidents(task)
        return result

    def tell(self) -> None:
        """Where the present case stands, when it does not end."""
        if self.present:
            last_lines.tell(self._cluster, self.present, self._logs)

    def _disturb(self, task: str, folder: Path, fault: tuple[str, str, int]) -> Victim:
        """Armed as soon as the rank lives; from outside at a moment of its own. A lost node comes back at once."""
        rank = 0 if self._layout.dp == 1 else self._layout.world_size - 1  # what the node's understudy is built for
        deadline = time.monotonic() + self._options.timeout
        member = self._member(task, rank, deadline)
        kind, point, micro_batch = fault
        if point == "now":
            while time.monotonic() < deadline and committed(folder) < self._options.at:
                time.sleep(0.005)
            begun_ns = time.monotonic_ns()
            if kind == "node":
                self._cluster.kill_agent(member.node)
            else:
                self._cluster.arm_fault(task, rank, kind)
        else:
            begun_ns = 0
            self._cluster.arm_fault(task, rank, kind, point, self._options.at, micro_batch)
        while kind == "node" and time.monotonic() < deadline:
            if self._cluster.tend():
                break
            time.sleep(0.02)
        return Victim(rank, member.pid, begun_ns)

    def _member(self, task: str, rank: int, deadline: float) -> LiveWorker:
        while True:
            try:
                return self._cluster.member(task, rank)
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def script_of(options: argparse.Namespace) -> list[str]:
    """What else the script is told."""
    return ["--overlap"] if options.overlap else []


def committed(folder: Path) -> int:
    lines = [line for path in folder.glob("rank_*.jsonl") for line in read_lines(path)]
    return max((line["iteration"] + 1 for line in lines if line.get("event") == "iteration"), default=0)


def records(folder: Path, victim: Victim | None) -> dict[str, Any]:
    digests = [json.loads(path.read_text())["sha256"] for path in sorted(folder.glob("state_*.json"))]
    lines = [line for path in folder.glob("rank_*.jsonl") for line in read_lines(path)]
    lines = [line for line in lines if line.get("event") == "iteration"]
    late = [line for line in lines if line["iteration"] >= 4]  # kernels are loaded in the ones before
    times = [(line["commit_ns"] - line["start_ns"]) / 1e6 for line in late]
    losses = {line["iteration"]: line["loss"] for line in late}
    commits: dict[int, int] = {}  # of an iteration by all ranks, as far as they wrote it
    for line in late:
        commits[line["iteration"]] = max(commits.get(line["iteration"], 0), line["commit_ns"])
    moments = [commits[iteration] for iteration in sorted(commits)]
    gaps = [(b - a) / 1e6 for a, b in itertools.pairwise(moments)]
    outside = None
    if victim is not None and victim.begun_ns:
        own = [line["commit_ns"] for line in read_lines(folder / f"rank_{victim.rank}.jsonl")
               if line.get("event") == "iteration" and line["pid"] != victim.pid]  # fmt: skip
        outside = round((min(own) - victim.begun_ns) / 1e6, 1) if own else None
    for path in folder.glob("*.npy"):
        path.unlink()
    return {
        "digests": digests, "median_ms": round(statistics.median(times), 1) if times else None,
        "gap_ms": round(max(gaps), 1) if gaps else None, "outside_ms": outside,
        "last_loss": losses[max(losses)] if losses else None, "iterations": len(losses),
    }  # fmt: skip


def unmanaged(options: argparse.Namespace, layout: Layout, environment: dict[str, str]) -> float | None:
    """The same script in plain processes: median iteration in ms."""
    folder = (options.folder / "runs" / "unmanaged").resolve()
    logs = options.folder / "logs" / "unmanaged"
    for made in (folder, logs):
        made.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "unicron.demo.plain", str(layout.world_size), str(port), str(logs)]
    command += ["--iterations", str(options.iterations), "--results", str(folder), "--tp", str(layout.tp)]
    command += ["--pp", str(layout.pp), "--micro-batch", str(layout.micro_batch)]
    command += ["--num-micro-batches", str(layout.num_micro_batches)]
    command += ["--instances", str(layout.instances), *(["--sharded"] if layout.sharded else [])]
    command += script_of(options)
    settings = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(command, env=settings)
    try:
        code = process.wait(options.timeout)
    except subprocess.TimeoutExpired:
        code = -1
        print(f"the unmanaged run did not end in {options.timeout:g} s")
    finally:
        process.terminate()  # ends its children, too
    times = [
        (line["commit_ns"] - line["start_ns"]) / 1e6
        for path in folder.glob("rank_*.jsonl")
        for line in read_lines(path)
        if line.get("event") == "iteration" and line["iteration"] >= 4
    ]
    if code or not times:
        for path in sorted(logs.glob("*.log")):
            last_lines.show(path)
        return None
    return round(statistics.median(times), 1)


def row(result: dict[str, Any], is_same: bool) -> str:
    """Of several incidents the first whose fault was seen itself; (+N): so many others, beside what is only told."""
    real = [incident for incident in result["incidents"] if not incident.get("is_only_told")]
    incident = next((i for i in real if i.get("detect_ms") is not None), real[0] if real else {})
    costs = [incident.get(name) for name in ("detect_ms", "decide_ms", "resume_ms", "lost_ms")]
    costs += [result["gap_ms"], result["outside_ms"]]
    words = [str(round(c, 1)) if isinstance(c, (int, float)) else "-" for c in costs]
    more = f" (+{len(real) - 1})" if len(real) > 1 else ""
    kind = [incident.get(name) or "-" for name in ("fault", "category", "severity", "method", "state_source")]
    cells = [result["case"], result["phase"], "same" if is_same else "DIFFERENT", result["median_ms"], kind[0] + more]
    return f"| {' | '.join(map(str, [*cells, *kind[1:], *words, result['seconds']]))} |"


class Cases:
    """All of one call, on a living cluster that is made anew when a case leaves it broken."""

    def __init__(self, options: argparse.Namespace, layout: Layout, environment: dict[str, str]) -> None:
        self._options, self._layout, self._environment = options, layout, environment
        self._cluster: LocalCluster | None = None
        self._runs: Runs | None = None
        self._reference: dict[str, Any] = {}
        self.wrong = 0

    def run(self) -> None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the time of the whole is over: tell, and tidy up
        names = ["reference", *filter(None, self._options.cases.split(","))]
        with (self._options.folder.parent / "managed.jsonl").open("a") as log:
            try:
                for name in names:
                    result = self._one(name)
                    setting = {
                        "layout": self._options.layout,
                        "size": self._options.size,
                        "optimizer": kind_of(self._layout),
                        "overlap": self._options.overlap,
                    }
                    log.write(json.dumps({**setting, **result}, default=str) + "\n")
                    log.flush()
            except SystemExit:
                if self._runs is not None:
                    self._runs.tell()
                raise
            finally:
                self._end()

    def _one(self, name: str) -> dict[str, Any]:
        try:
            result = self._living().one(name, CASES.get(name))
        except (ClusterProblem, RuntimeError, OSError) as problem:
            self.wrong += 1
            print(f"| {name} | {type(problem).__name__}: {problem} |", flush=True)
            if self._runs is not None:
                self._runs.tell()
            self._end()
            if name == "reference":
                raise SystemExit("no reference, nothing to compare with") from None
            return {"case": name, "problem": str(problem)}
        self._reference = self._reference or result
        digests = result["digests"]
        is_same = len(digests) == self._layout.world_size and digests == self._reference["digests"]
        self.wrong += not (is_same and result["phase"] == "done")
        print(row(result, is_same), flush=True)
        return result

    def _living(self) -> Runs:
        if self._cluster is None:
            imports = IMPORTS
            if self._options.pretend:
                imports = IMPORTS.replace("unicron.demo.model", "pretend_gpu,unicron.demo.model")
            self._cluster = LocalCluster(
                num_agents=self._layout.dp, slots=self._layout.replica_size, understudies=1, imports=imports,
                environment=self._environment, log_dir=self._options.folder / "logs" / "cluster",
            )  # fmt: skip
            self._runs = Runs(self._cluster, self._options, self._layout)
            self._cluster.start()
        assert self._runs is not None
        return self._runs

    def _end(self) -> None:
        cluster, self._cluster, self._runs = self._cluster, None, None
        if cluster is not None:
            cluster.stop()


def kind_of(layout: Layout) -> str:
    kind = "sharded" if layout.sharded else "plain"
    return (
        kind
        + "-buddy" * layout.buddy
        + f"-every{layout.buddy_every}" * bool(layout.buddy_every)
        + f"-instances{layout.instances}" * (layout.instances > 1)
        + "-exact" * layout.exact
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="1,1,2", help="tp,pp,dp")
    parser.add_argument("--size", default="small")
    parser.add_argument("--sharded", action="store_true", help="the distributed optimizer")
    parser.add_argument("--buddy", action="store_true", help="copies of the shards on the other node, at every step")
    parser.add_argument("--buddy-every", type=int, default=0, help="made beside the training, every so many steps")
    parser.add_argument("--instances", type=int, default=1, help="of the distributed optimizer")
    parser.add_argument("--exact", action="store_true", help="gradients are summed as integers")
    parser.add_argument("--overlap", action="store_true", help="the script asks for overlapped communication")
    parser.add_argument("--cases", default="kill-compute", help=", ".join(CASES))
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--at", type=int, default=12, help="iteration of the fault")
    parser.add_argument("--timeout", type=float, default=60, help="seconds for a case, of which a hang needs some")
    parser.add_argument("--unmanaged", action="store_true", help="also the same script in plain processes")
    parser.add_argument("--pretend", action="store_true", help="no GPU here: tests/support/pretend_gpu.py")
    parser.add_argument("--folder", type=Path, default=Path("results/managed"))
    options = parser.parse_args()
    if unknown := [name for name in filter(None, options.cases.split(",")) if name not in CASES]:
        parser.error(f"no case {', '.join(unknown)}; known: {', '.join(CASES)}")
    return options


def main() -> int:
    options = parse()
    tp, pp, dp = map(int, options.layout.split(","))
    layout = Layout(
        tp=tp, pp=pp, dp=dp, micro_batch=2, num_micro_batches=4 * dp, sharded=options.sharded, exact=options.exact,
        buddy=options.buddy or options.buddy_every > 0, buddy_every=options.buddy_every, instances=options.instances,
    )  # fmt: skip
    kind = kind_of(layout) + "-overlap" * options.overlap
    options.folder = options.folder / f"{options.size}-{options.layout.replace(',', '-')}-{kind}"
    options.folder.mkdir(parents=True, exist_ok=True)
    environment = {"UNICRON_DEMO_SIZE": options.size, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if options.pretend:
        environment |= pretended()
    print(f"\nmanaged, {options.size}, {kind}, tp {tp} pp {pp} dp {dp}, fault at iteration {options.at}; times in ms\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    if options.unmanaged:
        print(
            f"| unmanaged | - | - | {unmanaged(options, layout, environment)} |" + " - |" * (len(COLUMNS) - 4),
            flush=True,
        )
    cases = Cases(options, layout, environment)
    cases.run()
    return 1 if cases.wrong else 0


def pretended() -> dict[str, str]:
    import fakes

    return {"LD_LIBRARY_PATH": str(fakes.build()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


if __name__ == "__main__":
    sys.exit(main())
