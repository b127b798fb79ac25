"""Roles of a real GPT that move from GPU to GPU while it trains: each case against an undisturbed run.

    python tests/gpu/moves.py --layout 1,1,1 --size 350m --cases all,no-warm-up,no-groups

A cluster of dp + 1 nodes, each with the GPUs of one replica, one node free. Of a case's task one node after the other
is drained (--moves times, to and fro), and its roles move to the free one; `node-lost` kills an agent with its workers
beside a node that stands by; `restart` goes through a checkpoint. One row a case: did it end as it must, are
parameters, optimizer state and all losses the same bits, the longest iteration of each move less the median one
(pause), the iteration after it as a multiple of the median (first), how fast the state went, and the most memory used
of each GPU. Exit code 1 when a case did not end as it must; then the ends of its logs are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from managed import IMPORTS, pretended

from unicron.coordinator.job import Job
from unicron.runtime.local_cluster import ClusterProblem, LocalCluster
from unicron.types import Layout

WITHOUT = {"all": "none", "no-groups": "groups", "no-warm-up": "warm-up", "bare": "groups,warm-up"}
RESTART = "restart"  # saves, leaves, and begins elsewhere from its checkpoint
NODE_LOST = "node-lost"
SIZES = ("small", "350m")
PROBED = 60  # iterations that say how long one takes
MOVE_S = 10.0  # a new process on a GPU, mostly
FIRST_COUNTED = 4  # kernels are loaded in those before
LOG_LINES = 40
MEMORY_MS = 20


class Failed(Exception):
    """A case did not go as it must."""


class Case:
    """One task on a living cluster."""

    def __init__(self, name: str, cluster: LocalCluster, options: argparse.Namespace, layout: Layout) -> None:
        self.name, self._cluster, self._options, self._layout = name, cluster, options, layout
        self.folder = (options.folder / "runs" / name).resolve()
        shutil.rmtree(self.folder, ignore_errors=True)  # records of an earlier call are added to
        self.folder.mkdir(parents=True)
        self.logs = (options.folder / "logs").resolve()
        self._deadline = time.monotonic() + options.timeout
        self._seen_bytes: dict[Path, int] = {}
        self.losses: dict[int, float] = {}
        self.commits: dict[int, float] = {}  # ms
        self.drained_after: list[int] = []  # iterations
        self.moved_s: list[float] = []  # from a drain until the node is left
        self.task = ""
        self.memory_mib: dict[int, list[tuple[float, int]]] = {}  # of each GPU: (when in ms, used) where it changed

    def carry_out(self, disturb: Callable[[Case], None] | None = None) -> dict[str, Any]:
        begun = time.monotonic()
        result: dict[str, Any] = {"case": self.name, "error": ""}
        try:
            with memory_noted(self.memory_mib):
                self.task = self._cluster.submit(self._job())
                if disturb is not None:
                    disturb(self)
                self._cluster.wait(self.task, max(1.0, self._deadline - time.monotonic()))
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
            if not isinstance(error, (Failed, ClusterProblem)):
                traceback.print_exc()
            self._dump_stacks()
        except SystemExit:  # told to end: the last chance to say why
            self._dump_stacks()
            print_logs(self, self._options.folder / "logs" / "cluster")
            raise
        self.read()
        row = next((row for row in self._cluster.ask("ps") if row["task"] == self.task), {})
        result |= {"phase": row.get("phase", "never began"), "seconds": round(time.monotonic() - begun, 1)}
        result["incidents"] = self._cluster.incidents(self.task) if self.task else []
        states = sorted(self.folder.glob("state_*.json"))
        result["digests"] = [json.loads(path.read_text())["sha256"] for path in states]
        for path in self.folder.glob("*.npy"):
            path.unlink()
        self._clear_up(result["phase"])
        return result

    def _dump_stacks(self) -> None:
        """Of workers that are still there, into their logs (PYTHONFAULTHANDLER); it is their end."""
        for worker in self._cluster.workers(self.task) if self.task else []:
            with contextlib.suppress(OSError):
                os.kill(worker.pid, signal.SIGABRT)
        time.sleep(2.0)

    def _clear_up(self, phase: str) -> None:
        if phase not in ("done", "stopped") and self.task:
            self._cluster.cancel(self.task)
            end = time.monotonic() + 30
            while self._cluster.task_row(self.task)["phase"] not in ("done", "stopped") and time.monotonic() < end:
                time.sleep(0.1)
        for node in self._cluster.ask("nodes"):
            if node["drained"]:
                self._cluster.undrain(node["node"])

    def _job(self) -> Job:
        command = (sys.executable, "-m", "unicron.demo.train", "--iterations", str(self._options.iterations),
                   "--results", str(self.folder))  # fmt: skip
        return Job(
            name=self.name, command=command, layout=self._layout, cwd=os.getcwd(), understudies=0, stopped_grace_ms=0,
            stop_grace_ms=3_000,
            standbys=int(self.name == NODE_LOST), log_dir=str(self.logs),
            checkpoint_dir=str(self.folder / "checkpoints"),  # of one replica that cannot save nothing leaves its node
            env={"UNICRON_MOVES_WITHOUT": WITHOUT.get(self.name, "none")},
        )  # fmt: skip

    # ------------------------------------------------------------ what it says

    def wait(self, is_there: Callable[[], bool], what: str) -> None:
        """Raises Failed when the task is over before, or the time of a run is."""
        while not is_there():
            phase = self._cluster.task_row(self.task)["phase"]
            if phase in ("done", "stopped"):
                cause = self._cluster.task(self.task)["cause"] or "more --iterations are needed"
                raise Failed(f"{phase} at iteration {self.read()}, while waiting for {what}: {cause}")
            if time.monotonic() > self._deadline:
                raise Failed(f"{what} did not come in {self._options.timeout:g} s; iteration {self.read()}")
            time.sleep(0.05)

    def read(self) -> int:
        """The newest iteration that any rank has committed."""
        for path in self.folder.glob("rank_*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._seen_bytes.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._seen_bytes[path] = self._seen_bytes.get(path, 0) + len(whole) + len(newline)
            for said in map(json.loads, whole.splitlines()):
                if said["event"] == "iteration":
                    iteration, at_ms = said["iteration"], said["commit_ns"] / 1e6
                    self.losses[iteration] = said["loss"]
                    self.commits[iteration] = min(at_ms, self.commits.get(iteration, at_ms))
        return max(self.losses, default=-1)

    def homes(self) -> list[str]:
        """Nodes of its members, in the order of ranks."""
        members = [w for w in self._cluster.task(self.task)["workers"] if w["is_member"]]
        return list(dict.fromkeys(w["node"] for w in sorted(members, key=lambda w: int(w["rank"]))))

    def times_ms(self) -> dict[int, float]:
        known = sorted(i for i in self.commits if i > FIRST_COUNTED and i - 1 in self.commits)
        return {i: self.commits[i] - self.commits[i - 1] for i in known}


@contextlib.contextmanager
def memory_noted(noted: dict[int, list[tuple[float, int]]]) -> Iterator[None]:
    """What is used of each GPU's memory meanwhile, looked at every MEMORY_MS."""
    if shutil.which("nvidia-smi") is None:
        yield
        return
    told = subprocess.Popen(
        ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", f"-lms={MEMORY_MS}"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    def read() -> None:
        for line in told.stdout or ():
            index, used = map(int, line.split(","))
            before = noted.setdefault(index, [])
            if not before or before[-1][1] != used:
                before.append((round(time.monotonic() * 1000), used))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        told.terminate()
        told.wait(5)
        reader.join(5)


def leave_a_node(case: Case, leave: Callable[[Case, str], None]) -> None:
    """The node of the last rank is left, in this way, and so on from wherever the roles are then."""
    for _ in range(case._options.moves):
        at = case.read() + 10
        case.wait(lambda at=at: case.read() >= at, f"iteration {at}")  # type: ignore[misc]
        node = case.homes()[-1]
        begun = time.monotonic()
        case.drained_after.append(case.read())
        leave(case, node)
        case.moved_s.append(round(time.monotonic() - begun, 1))
        case._cluster.undrain(node)


def through_checkpoint(case: Case, node: str) -> None:
    """What is done where nothing moves."""
    cluster = case._cluster
    cluster.ask("suspend", task=case.task)
    case.wait(lambda: cluster.task_row(case.task)["phase"] == "suspended", "its suspension")
    cluster.drain(node)
    cluster.ask("resume", task=case.task)
    at = case.read() + 1
    case.wait(lambda: case.read() >= at, f"iteration {at}, elsewhere")


def by_drain(case: Case, node: str) -> None:
    case._cluster.drain(node)
    case.wait(lambda: node not in case.homes(), f"{node} to be left")


def lose_a_node(case: Case) -> None:
    """An agent and its workers die, while a node stands by."""
    cluster = case._cluster

    def is_ready() -> bool:
        workers = cluster.task(case.task)["workers"]
        return sum(w["purpose"] == "standby" and w["phase"] == "ready" for w in workers) >= case._layout.replica_size

    case.wait(is_ready, "a standby")
    at = case.read() + 10
    case.wait(lambda: case.read() >= at, f"iteration {at}")
    node = case.homes()[-1]
    case.drained_after.append(case.read())
    cluster.kill_agent(node)
    at = case.read() + 20
    case.wait(lambda: case.read() >= at, f"iteration {at} after {node} was lost")
    cluster.start_agent(node)
    cluster.wait_for_nodes(60)


DISTURBANCES = {NODE_LOST: lose_a_node, RESTART: lambda case: leave_a_node(case, through_checkpoint)}


def measured(case: Case, result: dict[str, Any]) -> None:
    """Into the result: pauses, first iterations and bandwidths, one per move."""
    times = case.times_ms()
    median = statistics.median(times.values()) if times else 0.0
    starts = [*case.drained_after, max(times, default=0) + 1]
    pauses, firsts = [], []
    for begin, end in itertools.pairwise(starts):
        inside = {i: ms for i, ms in times.items() if begin < i < end}
        if inside:
            longest = max(inside, key=inside.__getitem__)
            pauses.append(round(inside[longest] - median, 1))
            firsts.append(round(times.get(longest + 1, 0.0) / median, 2))
    moves = [i for i in result["incidents"] if i["fault"] == "move"]
    rates = [round(t["nbytes"] / max(t["ms"], 1e-3) / 1e6, 1) for i in moves for t in i["transfers"]]
    result |= {"median_ms": round(median, 2), "pauses_ms": pauses, "first": firsts, "gb_per_s": rates,
               "moved_s": case.moved_s, "num_moves": len(moves), "iterations": len(case.losses),
               "peaks_mib": [max(used for _, used in case.memory_mib[gpu]) for gpu in sorted(case.memory_mib)],
               "memory_mib": case.memory_mib}  # fmt: skip


def wrongs(result: dict[str, Any], case: Case, reference: Case, wanted: list[str], layout: Layout) -> list[str]:
    """What is not as it must be, in words."""
    found = [result["error"]] if result["error"] else []
    if result["phase"] != "done":
        found.append(f"the task is {result['phase']}")
    if len(result["digests"]) != layout.world_size or result["digests"] != wanted:
        found.append("the final state is not that of the undisturbed run")
    if differing := [i for i, loss in case.losses.items() if reference.losses.get(i, loss) != loss]:
        found.append(f"losses differ from iteration {min(differing)} on")
    incidents = [i for i in result["incidents"] if i["fault"] != "slow"]
    if case.name in WITHOUT and (result["num_moves"] != case._options.moves or len(incidents) != result["num_moves"]):
        told = [f"{i['fault']}: {i['cause']}" for i in incidents]
        found.append(f"{result['num_moves']} moves, must be {case._options.moves}; incidents: {told}")
    if case.name == NODE_LOST and not incidents:
        found.append("a node was lost, and nobody told")
    return found


def row(case: Case, result: dict[str, Any], wrong: list[str]) -> str:
    without = WITHOUT.get(case.name, "")
    lost = [i for i in result["incidents"] if i["fault"] not in ("move", "slow")]
    resumed = ", ".join(f"{i['resume_ms']:.0f}" for i in lost if isinstance(i.get("resume_ms"), (int, float))) or "-"
    is_same = not any("state" in text or "losses" in text for text in wrong)
    words = [
        case.name, result["phase"], "same" if is_same else "DIFFERENT", result["num_moves"], result["median_ms"],
        _list(result["pauses_ms"]), _list(result["first"]), _list(result["gb_per_s"]), _list(result["moved_s"]),
        resumed, "off" if "warm-up" in without else "on", _list(result["peaks_mib"]), result["seconds"],
    ]  # fmt: skip
    return f"| {' | '.join(map(str, words))} |"


def _list(values: list[float]) -> str:
    return " ".join(map(str, values)) or "-"


def print_logs(case: Case, cluster_logs: Path) -> None:
    """The end of everything that may say why."""
    paths = sorted((case.logs / case.task).rglob("*.log"), key=lambda path: path.stat().st_mtime)[-8:]
    paths += [*sorted(cluster_logs.glob("*.log")), *sorted(cluster_logs.glob("*.err"))]
    for path in paths:
        lines = path.read_text(errors="replace").splitlines()[-LOG_LINES:]
        if lines:
            print(f"--- {path}", *(line[:300] for line in lines), sep="\n", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", default="1,1,1", help="tp,pp,dp; (dp + 1) x tp x pp GPUs are needed")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--sharded", action="store_true", help="the distributed optimizer")
    parser.add_argument(
        "--cases", default="all,no-warm-up,no-groups", help=f"of {', '.join(WITHOUT)}, {RESTART}, {NODE_LOST}"
    )
    parser.add_argument("--iterations", type=int, default=0, help="of a run; 0: enough for its moves")
    parser.add_argument("--moves", type=int, default=2, help="of a run")
    parser.add_argument("--timeout", type=float, default=150, help="of a run, in seconds")
    parser.add_argument("--pretend", action="store_true", help="no GPU here: tests/support/pretend_gpu.py")
    parser.add_argument("--folder", type=Path, default=Path("results/moves"))
    return parser.parse_args()


def enough(cluster: LocalCluster, options: argparse.Namespace, layout: Layout) -> int:
    """Iterations in whose time all moves can be."""
    options.iterations = PROBED
    probe = Case("probe", cluster, options, layout)
    result = probe.carry_out()
    measured(probe, result)
    if result["phase"] != "done" or not result["median_ms"]:
        print(f"the first run is {result['phase']}: {result['error']}", flush=True)
        print_logs(probe, options.folder / "logs" / "cluster")
    found = int((options.moves * MOVE_S + 5) * 1000 / max(result["median_ms"], 1.0))
    return min(max(found, PROBED), 20_000)


def run_cases(cluster: LocalCluster, options: argparse.Namespace, layout: Layout) -> int:
    """Cases that went wrong."""
    options.iterations = options.iterations or enough(cluster, options, layout)
    reference = Case("reference", cluster, options, layout)
    undisturbed = reference.carry_out()
    measured(reference, undisturbed)
    cases = [(reference, undisturbed)]
    num_wrong = 0
    log = (options.folder / "moves.jsonl").open("a")
    for name in ["reference", *filter(None, options.cases.split(","))]:
        if name == NODE_LOST and layout.dp == 1:
            print(f"| {name} | not run: no other replica has the state of a lost node (dp 1) |", flush=True)
            continue
        if name != "reference":
            case = Case(name, cluster, options, layout)
            cases.append((case, case.carry_out(DISTURBANCES.get(name, lambda case: leave_a_node(case, by_drain)))))
            measured(*cases[-1])
        case, result = cases[-1]
        wrong = wrongs(result, case, reference, undisturbed["digests"], layout)
        num_wrong += bool(wrong)
        print(row(case, result, wrong), flush=True)
        if wrong:
            print(f"{name} is wrong: {'; '.join(wrong)}", flush=True)
            print_logs(case, options.folder / "logs" / "cluster")
        setting = {"layout": options.layout, "size": options.size, "sharded": options.sharded, "wrong": wrong}
        log.write(json.dumps({**setting, **result}, default=str) + "\n")
        log.flush()
    return num_wrong


def main() -> int:
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    tp, pp, dp = map(int, options.layout.split(","))
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=2, num_micro_batches=4 * dp, sharded=options.sharded)
    options.folder = options.folder / f"{options.size}-{options.layout.replace(',', '-')}"
    (options.folder / "logs" / "cluster").mkdir(parents=True, exist_ok=True)
    num_needed = (dp + 1) * layout.replica_size
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_there = len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    num_there = num_there if named is None else len(named.split(","))
    environment = {
        "UNICRON_DEMO_SIZE": options.size, "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",  # as run.sh
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    imports = IMPORTS
    if options.pretend:
        imports = IMPORTS.replace("unicron.demo.model", "pretend_gpu,unicron.demo.model")
        environment |= pretended()
    elif num_there < num_needed:
        print(f"{num_there} GPUs here, {num_needed} needed for {options.layout} and a free node", file=sys.stderr)
        return 2
    print(f"\nmoves, {options.size}, tp {tp} pp {pp} dp {dp}; times in ms\n")
    print("| case | end | bits | moves | iteration | pause | first | state GB/s | left after s | lost node: committed "
          "| warm-up | peak MiB of each GPU | run s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    with LocalCluster(
        num_agents=dp + 1, slots=layout.replica_size, understudies=0, imports=imports, environment=environment,
        log_dir=options.folder / "logs" / "cluster",
    ) as cluster:  # fmt: skip
        return 1 if run_cases(cluster, options, layout) else 0


if __name__ == "__main__":
    sys.exit(main())
