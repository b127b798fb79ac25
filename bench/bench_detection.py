"""Milliseconds from a fault until the coordinator has the right verdict, per fault; beside it the Unicron paper's.

A local cluster of real processes: three nodes of one worker and one understudy. A verdict is right when the incident
names the rank that was wounded and says what happened (`expected`); a run that ends otherwise stops the bench. Faults
that are done from outside count from just before the signal, those a worker does to itself from its own mark in the
pulse page. A slow rank is told, not ended; an agent that stands still is suspected, and nothing is lost for it. A node
whose network is cut trains the demo's GPT in namespaces, where these can be made.
`--healthy N` also runs the statistics over N simulated iterations without a fault (bench/healthy.py), `--soak` trains
for `--minutes` on a loaded machine (bench/soak.py).

    python bench/bench_detection.py --runs 20 --json
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import healthy
import soak
from unicron.coordinator.job import Job
from unicron.demo.runner import NEVER_RESTS
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

WORKER = Path(__file__).with_name("detection_worker.py")
NODES, VICTIM = 3, 1
VERDICT_S_MAX, WHOLE_S_MAX = 60.0, 60.0
SETTLE_ITERATIONS = 70  # of every member after a change: what is usual is known again, also to who compares ranks
TOGETHER_ITERATIONS = 5  # where nothing is compared with what is usual: all train together again
POLL_S = 0.02


@dataclass(frozen=True)
class Expected:
    """What is right of an incident."""

    fault: str
    words: str  # in its cause or text, once that is known
    severity: str = "SEV2"
    rank: int = VICTIM

    def __str__(self) -> str:
        return f"{self.fault}: {self.words}" if self.words else self.fault


class Wrong(SystemExit):
    pass


class Task:
    """Living workers, wounded again and again."""

    def __init__(self, cluster: LocalCluster, folder: Path, micro_batch_ms: float, ballast_mib: int = 0) -> None:
        self.cluster = cluster
        shared = folder / f"shared-{ballast_mib}"
        shared.mkdir()
        command = (sys.executable, str(WORKER), str(shared), str(micro_batch_ms))
        self.name = cluster.submit(
            Job(
                name=f"detection-{ballast_mib}", command=command,
                layout=Layout(dp=NODES, num_micro_batches=4 * NODES), log_dir=str(folder), stopped_grace_ms=0,
                restart_max=1_000_000, env={"BALLAST_MIB": str(ballast_mib)}, stop_grace_ms=0,
            )
        )  # fmt: skip
        self.known: set[str] = set()

    def wait_whole(self, iterations: int = SETTLE_ITERATIONS) -> None:
        """All roles held, understudies ready, and iterations enough for the statistics."""
        deadline, begun = time.monotonic() + WHOLE_S_MAX, None
        while time.monotonic() < deadline:
            view = self.cluster.task(self.name)
            members = [w for w in view["workers"] if w["is_member"]]
            ready = [w for w in view["workers"] if w["phase"] == "ready"]
            if view["phase"] != "running" or len(members) != NODES or len(ready) < 2 * NODES:
                begun = None
            else:
                now = min(w["iteration"] for w in members)
                begun = now if begun is None else begun
                if now >= begun + iterations:
                    self.known |= {i["id"] for i in self.cluster.incidents(self.name)}
                    return
            time.sleep(0.1)
        view = self.cluster.task(self.name)
        states = {w["worker"]: w["phase"] for w in view["workers"]}
        raise Wrong(f"the task was not whole again within {WHOLE_S_MAX} s: {view['phase']}, {states}")

    def pid(self) -> int:
        return self.cluster.member(self.name, VICTIM).pid

    def iteration(self) -> int:
        return max(int(w["iteration"]) for w in self.cluster.task(self.name)["workers"] if w["is_member"])

    def verdict(self, expected: Expected, begun_ms: float | None) -> float:
        """ms until the first incident after the fault, which must be the expected one."""
        deadline = time.monotonic() + VERDICT_S_MAX
        incident: dict[str, Any] = {}
        while time.monotonic() < deadline:
            new = [i for i in self.cluster.incidents(self.name) if i["id"] not in self.known]
            new = [i for i in new if i["is_only_told"] == (expected.severity == "INFO")]
            if new:
                incident = new[0]
                if expected.words in f"{incident['cause']} {incident['text']}":
                    break
            time.sleep(POLL_S)
        found = (incident.get("fault"), incident.get("severity"), incident.get("root", {}).get("rank"))
        if found != (expected.fault, expected.severity, expected.rank) or (
            expected.words not in f"{incident['cause']} {incident['text']}"
        ):
            raise Wrong(f"expected {expected}, got {found} {incident.get('cause', 'nothing')!r}")
        if begun_ms is None:
            return float(incident["detect_ms"])
        return float(incident["timeline"][0][0]) - begun_ms


def now_ms() -> float:
    return time.monotonic_ns() / 1e6


# ---------------------------------------------------------------- faults


def sent(number: int) -> Callable[[Task], float | None]:
    def fault(task: Task) -> float | None:
        pid, begun_ms = task.pid(), now_ms()
        os.kill(pid, number)
        return begun_ms

    return fault


def armed(kind: str, point: str = "compute") -> Callable[[Task], float | None]:
    def fault(task: Task) -> float | None:
        task.cluster.arm_fault(task.name, VICTIM, kind, point)
        return None

    return fault


def agent_killed(task: Task) -> float | None:
    begun_ms = now_ms()
    task.cluster.kill_agent_alone(f"n{VICTIM}")
    return begun_ms


@dataclass(frozen=True)
class Case:
    name: str
    fault: Callable[[Task], float | None]
    expected: Expected
    paper: str = "-"
    heals: Callable[[Task], None] = lambda task: None
    is_large: bool = False

    @property
    def settles(self) -> int:
        """Iterations before the fault."""
        return SETTLE_ITERATIONS if self.expected.fault == STALLED else TOGETHER_ITERATIONS


LOST, STALLED = "worker lost", "stalled"
STOPPED_AGENT, SLOW_RANK, CUT_NETWORK = "agent stopped", "slow rank +10 %", "network of a node cut"
HANG = "3 x D_iter"
CASES = (
    Case("SIGKILL", sent(signal.SIGKILL), Expected(LOST, "signal 9"), "1800"),
    Case("SIGKILL, 2 GiB", sent(signal.SIGKILL), Expected(LOST, "signal 9"), "1800", is_large=True),
    Case("SIGSEGV", sent(signal.SIGSEGV), Expected(LOST, "Segmentation fault"), "1800"),
    Case("exception", armed("exception"), Expected("exception", "InjectedFault"), "300"),
    Case("C++ terminate", armed("abort"), Expected(LOST, "std::terminate was called"), "1800"),
    Case("exit(0) unfinished", armed("leave"), Expected(LOST, "exit code 0"), "1800"),
    Case("SIGSTOP", sent(signal.SIGSTOP), Expected("stopped", ""), HANG),
    Case("deadlock, GIL held", armed("gil"), Expected(STALLED, "waits for nobody"), HANG),
    Case("one does not join", armed("deadlock", "reduce"), Expected(STALLED, "waits for nobody"), HANG),
    Case(
        "agent killed", agent_killed, Expected("node lost", "", "SEV1"), "5600",
        heals=lambda task: task.cluster.start_agent(f"n{VICTIM}"),
    ),
)  # fmt: skip


def one(task: Task, case: Case) -> float:
    task.wait_whole(case.settles)
    took_ms = task.verdict(case.expected, case.fault(task))
    case.heals(task)
    return took_ms


def agent_stopped(task: Task) -> float:
    """Until it is suspect; the task must go on meanwhile, and nothing be lost."""
    task.wait_whole()  # its beats are as regular as ever again: who was silent just now is given more time
    pid, node = task.cluster.agent_pid(f"n{VICTIM}"), f"n{VICTIM}"
    before, begun_ms = task.iteration(), now_ms()
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + VERDICT_S_MAX
        while phase(task.cluster, node) != "suspect":
            if time.monotonic() > deadline:
                raise Wrong("a stopped agent was not suspected")
            time.sleep(POLL_S)
        took_ms = now_ms() - begun_ms
        while not (went_on := task.iteration() > before + 1) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # it may be suspect within an iteration
    finally:
        os.kill(pid, signal.SIGCONT)
    new = [i for i in task.cluster.incidents(task.name) if i["id"] not in task.known and not i["is_only_told"]]
    if new or not went_on:
        raise Wrong(f"a stopped agent cost something: {[i['cause'] for i in new]}, training went on: {went_on}")
    return took_ms


def phase(cluster: LocalCluster, node: str) -> str:
    return str(next(row["phase"] for row in cluster.ask("nodes") if row["node"] == node))


def slow_rank(task: Task) -> tuple[float, int]:
    """(ms, iterations) until rank 1, ten percent slower, is named; then it is as fast as before again."""
    task.wait_whole()
    pid, before, begun_ms = task.pid(), task.iteration(), now_ms()
    os.kill(pid, signal.SIGUSR1)
    took_ms = task.verdict(Expected("slow", "computes", "INFO"), begun_ms)
    iterations = task.iteration() - before
    os.kill(pid, signal.SIGKILL)  # a fresh process: the next run is an incident of its own
    task.verdict(Expected(LOST, ""), begun_ms)
    return took_ms, iterations


# ---------------------------------------------------------------- all of it


def cut_network(bench: common.Bench, runs: int) -> None:
    """Real training over a link that is taken down, in namespaces (unicron.demo.cut_network): rows of its own."""
    command = [sys.executable, "-m", "unicron.demo.cut_network", "--rounds", str(runs), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120 + 60 * runs)
    if done.returncode == 2:
        return  # it said what this machine lacks
    if done.returncode:
        raise Wrong(f"{CUT_NETWORK}: exit code {done.returncode}; see above")
    found = json.loads(done.stdout)["rounds"]
    bench.add(f"{CUT_NETWORK}: suspect", [each["suspect_ms"] for each in found], verdict="suspect, nothing lost")
    bench.add(f"{CUT_NETWORK}: lost", [each["lost_ms"] for each in found], paper="5600", verdict="node lost")


def measure(bench: common.Bench, runs: int, micro_batch_ms: float, only: list[str]) -> None:
    def is_wanted(name: str) -> bool:
        return any(part in name for part in only)

    if is_wanted(CUT_NETWORK):
        cut_network(bench, runs)
    if any(is_wanted(name) for name in (STOPPED_AGENT, SLOW_RANK, *(case.name for case in CASES))):
        local(bench, runs, micro_batch_ms, is_wanted)


def local(bench: common.Bench, runs: int, micro_batch_ms: float, is_wanted: Callable[[str], bool]) -> None:
    with common.scratch() as folder:
        with LocalCluster(
            NODES, 1, 1, imports="unicron._core,unicron.faults.perform", log_dir=folder / "d", coordinator=NEVER_RESTS
        ) as cluster:
            for is_large in (False, True):
                cases = [c for c in CASES if c.is_large == is_large and is_wanted(c.name)]
                if not cases and (is_large or not any(map(is_wanted, (STOPPED_AGENT, SLOW_RANK)))):
                    continue
                task = Task(cluster, folder, micro_batch_ms, 2048 if is_large else 0)
                for case in cases:
                    samples = [one(task, case) for _ in range(runs)]
                    bench.add(case.name, samples, paper=case.paper, verdict=str(case.expected))
                    print(f"{case.name}: {samples}", file=sys.stderr, flush=True)
                if not is_large and is_wanted(STOPPED_AGENT):
                    bench.add(
                        STOPPED_AGENT, [agent_stopped(task) for _ in range(runs)], verdict="suspect, nothing lost"
                    )
                if not is_large and is_wanted(SLOW_RANK):
                    found = [slow_rank(task) for _ in range(runs)]
                    iterations = max(number for _, number in found)
                    bench.add(SLOW_RANK, [ms for ms, _ in found], verdict=f"slow, <= {iterations} iterations")
                cluster.cancel(task.name)


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=5)
    parser.add_argument("--micro-batch-ms", type=float, default=25.0, help="an iteration is four of these")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name has one of these; none: no case")
    parser.add_argument("--healthy", type=int, default=0, help="also simulate so many healthy iterations")
    parser.add_argument("--soak", action="store_true", help="also train on a loaded machine, and listen")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    arguments = parser.parse_args()
    bench = common.Bench(
        "detection: fault to verdict", unit="ms",
        configuration={"nodes": NODES, "micro_batch_ms": arguments.micro_batch_ms, "iteration": "4 micro-batches"},
    )  # fmt: skip
    if arguments.only != ["none"]:
        measure(bench, arguments.runs, arguments.micro_batch_ms, arguments.only)
    if arguments.healthy:
        result = healthy.check(arguments.healthy)
        alarms = len(result.stalls) + len(result.slow)
        bench.configuration["healthy (modelled)"] = {
            "iterations": result.iterations, "intervals": result.intervals, "alarms": alarms,
        }  # fmt: skip
    outcome = soak.run(arguments.minutes) if arguments.soak else soak.Outcome()
    if arguments.soak:
        bench.configuration["soak"] = outcome.as_json()
    bench.finish(arguments)
    if arguments.healthy and alarms:
        raise SystemExit(f"a healthy run raised alarms: {result.stalls[:9]} {result.slow[:9]}")
    if outcome.incidents:
        raise SystemExit(f"real training, in which nothing failed, raised alarms: {outcome.as_json()['what']}")


if __name__ == "__main__":
    main()
