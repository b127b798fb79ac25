"""A real GPT under unicron on GPUs: each case against an undisturbed run of the same script.

    python tests/gpu/managed.py --layout 1,1,2 --size 350m --cases kill-compute,kill-reduce

One living cluster per call; a line of JSON and a row of the table per case: did it finish, are parameters and optimizer
state of all ranks the same bits, and what the incident cost. Exit code 1 when a case did not end as it must.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from unicron.coordinator.job import Job
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

IMPORTS = "torch,megatron.core,unicron.training,unicron.demo.model,unicron.demo.record"
CASES = {  # name: fault, point, micro-batch (-1: any)
    "kill-compute": ("kill", "compute", -1),
    "kill-forward": ("kill", "forward", -1),
    "kill-reduce": ("kill", "reduce", -1),
    "kill-commit": ("kill", "commit", -1),
    "kill-step": ("kill", "step", -1),
    "segv-compute": ("segv", "compute", -1),
    "exception-compute": ("exception", "compute", -1),
    "exit-idle": ("exit", "idle", -1),
    "kill-now": ("kill", "now", -1),
}


def read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


class Runs:
    def __init__(self, cluster: LocalCluster, options: argparse.Namespace, layout: Layout) -> None:
        self._cluster, self._options, self._layout = cluster, options, layout

    def one(self, name: str, fault: tuple[str, str, int] | None) -> dict[str, Any]:
        folder = (self._options.folder / "runs" / name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        command = (sys.executable, "-m", "unicron.demo.train", "--iterations", str(self._options.iterations),
                   "--results", str(folder))  # fmt: skip
        job = Job(
            name=name, command=command, layout=self._layout, cwd=os.getcwd(), understudies=1, stopped_grace_ms=0,
            log_dir=str((self._options.folder / "logs").resolve()),
        )  # fmt: skip
        begun = time.monotonic()
        task = self._cluster.submit(job)
        if fault is not None:
            self._disturb(task, fault)
        view = self._cluster.wait(task, self._options.timeout)
        result = {"case": name, "phase": view["phase"], "seconds": round(time.monotonic() - begun, 1)}
        result |= self._records(folder)
        result["incidents"] = self._cluster.incidents(task)
        return result

    def _disturb(self, task: str, fault: tuple[str, str, int]) -> None:
        """Armed as soon as the rank lives; a kill from outside at a moment of its own."""
        rank = 0 if self._layout.dp == 1 else self._layout.world_size - 1  # what the node's understudy is built for
        deadline = time.monotonic() + self._options.timeout
        while time.monotonic() < deadline:
            try:
                self._cluster.member(task, rank)
                break
            except Exception:
                time.sleep(0.05)
        kind, point, micro_batch = fault
        if point == "now":
            folder = self._options.folder / "runs" / task
            while time.monotonic() < deadline and self._committed(folder) < self._options.at:
                time.sleep(0.01)
            self._cluster.arm_fault(task, rank, kind)
        else:
            self._cluster.arm_fault(task, rank, kind, point, self._options.at, micro_batch)

    def _committed(self, folder: Path) -> int:
        lines = [line for path in folder.glob("rank_*.jsonl") for line in read_lines(path)]
        return max((line["iteration"] + 1 for line in lines if line.get("event") == "iteration"), default=0)

    def _records(self, folder: Path) -> dict[str, Any]:
        states = sorted(folder.glob("state_*.json"))
        digests = [json.loads(path.read_text())["sha256"] for path in states]
        times: list[float] = []
        losses: dict[int, float] = {}
        for path in folder.rglob("*.jsonl"):
            for line in read_lines(path):
                if line.get("event") == "iteration":
                    if line["iteration"] < 4:  # kernels are loaded in these
                        continue
                    times.append((line["commit_ns"] - line["start_ns"]) / 1e6)
                    losses[line["iteration"]] = line["loss"]
        for path in folder.glob("*.npy"):
            path.unlink()
        return {
            "digests": digests, "median_ms": round(statistics.median(times), 1) if times else None,
            "max_ms": round(max(times[-60:]), 1) if times else None,
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
    command += ["--sharded"] if layout.sharded else []
    settings = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run(command, env=settings, check=False, timeout=options.timeout)
    times = [
        (line["commit_ns"] - line["start_ns"]) / 1e6
        for path in folder.glob("rank_*.jsonl")
        for line in read_lines(path)
        if line.get("event") == "iteration" and line["iteration"] >= 4
    ]
    return round(statistics.median(times), 1) if times and result.returncode == 0 else None


def row(result: dict[str, Any], is_same: bool) -> str:
    incident = result["incidents"][0] if result["incidents"] else {}
    costs = [incident.get(name) for name in ("detect_ms", "decide_ms", "resume_ms", "lost_ms")]
    words = [str(round(c, 1)) if isinstance(c, (int, float)) else "-" for c in costs]
    return (
        f"| {result['case']} | {result['phase']} | {'same' if is_same else 'DIFFERENT'} | {result['median_ms']} | "
        f"{' | '.join(words)} | {result['seconds']} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="1,1,2", help="tp,pp,dp")
    parser.add_argument("--size", default="small")
    parser.add_argument("--sharded", action="store_true", help="the distributed optimizer")
    parser.add_argument("--cases", default="kill-compute")
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--at", type=int, default=12, help="iteration of the fault")
    parser.add_argument("--timeout", type=float, default=90)
    parser.add_argument("--unmanaged", action="store_true", help="also the same script in plain processes")
    parser.add_argument("--pretend", action="store_true", help="no GPU here: tests/support/pretend_gpu.py")
    parser.add_argument("--folder", type=Path, default=Path("results/managed"))
    options = parser.parse_args()
    tp, pp, dp = map(int, options.layout.split(","))
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=2, num_micro_batches=4 * dp, sharded=options.sharded)
    kind = "sharded" if options.sharded else "plain"
    options.folder = options.folder / f"{options.size}-{options.layout.replace(',', '-')}-{kind}"
    environment = {"UNICRON_DEMO_SIZE": options.size, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    imports = IMPORTS
    if options.pretend:
        imports = IMPORTS.replace("unicron.demo.model", "pretend_gpu,unicron.demo.model")
        environment |= pretended()
    cluster = LocalCluster(
        num_agents=dp, slots=tp * pp, understudies=1, imports=imports, environment=environment,
        log_dir=options.folder / "logs" / "cluster",
    )  # fmt: skip
    print(f"\nmanaged, {options.size}, {kind}, tp {tp} pp {pp} dp {dp}, fault at iteration {options.at}; times in ms\n")
    print("| case | end | bits | iteration | detect | decide | resume | lost | run s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    if options.unmanaged:
        print(f"| unmanaged | - | - | {unmanaged(options, layout, environment)} | - | - | - | - | - |", flush=True)
    wrong = 0
    with (options.folder.parent / "managed.jsonl").open("a") if _made(options.folder) else open(os.devnull, "w") as log:
        try:
            cluster.start()
            runs = Runs(cluster, options, layout)
            reference: dict[str, Any] = {}
            for name in ["reference", *filter(None, options.cases.split(","))]:
                result = runs.one(name, CASES.get(name))
                reference = reference or result
                digests = result["digests"]
                is_same = len(digests) == layout.world_size and digests == reference["digests"]
                wrong += not (is_same and result["phase"] == "done")
                print(row(result, is_same), flush=True)
                setting = {"layout": options.layout, "size": options.size, "optimizer": kind}
                log.write(json.dumps({**setting, **result}, default=str) + "\n")
        finally:
            cluster.stop()
    return 1 if wrong else 0


def pretended() -> dict[str, str]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
    import fakes

    return {"LD_LIBRARY_PATH": str(fakes.build()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def _made(folder: Path) -> bool:
    folder.mkdir(parents=True, exist_ok=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
