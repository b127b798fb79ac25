"""Milliseconds from a fault until the coordinator has the right verdict, per fault; beside it the Unicron paper's.

A local cluster of real processes: three nodes of one worker and one understudy. A verdict is right when the incident
names the rank that was wounded and says what happened (`expected`); a run that ends otherwise stops the bench. Faults
that are done from outside count from just before the signal, those a worker does to itself from its own mark in the
pulse page. A slow rank is told, not ended; an agent that stands still is suspected, and nothing is lost for it. A node
whose network is cut trains the demo's GPT in namespaces, where these can be made. Each row has its goal, and whether
the median meets it (`--strict`: else the bench fails). Of a hang the goal is a factor of the phase that it is in, never
less than what counts as a stall at all, and one look of its agent later it is seen: hence cases with micro-batches so
long that the factor decides (`--long-runs` of each), with and without evidence across ranks.
`--healthy N` also runs the statistics and the beats over N simulated iterations without a fault (bench/healthy.py, a
result of its own with `--only none`), `--soak` trains for `--minutes` on a loaded machine (bench/soak.py).

    python bench/bench_detection.py --runs 20 --json
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
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
from unicron.runtime.agent_process import SAMPLE_MS
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

WORKER = Path(__file__).with_name("detection_worker.py")
NODES, VICTIM = 3, 1
VERDICT_S_MAX, WHOLE_S_MAX = 60.0, 60.0
SETTLE_ITERATIONS = 70  # of every member after a change: what is usual is known again, also to who compares ranks
TOGETHER_ITERATIONS = 5  # where nothing is compared with what is usual: all train together again
POLL_S = 0.02
MICRO_BATCHES, LONG_MICRO_BATCHES = 4, 3  # of an iteration
LONG_SETTLE_ITERATIONS = 2  # an heir's first has a budget of its own
KNOWN_ITERATION = 3  # before it two of each stage have ended, besides those of the first iteration: all have budgets


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


@dataclass(frozen=True)
class Kind:
    """Of a task."""

    name: str
    ballast_mib: int = 0
    micro_batches: int = MICRO_BATCHES


SMALL, LARGE = Kind("small"), Kind("large", ballast_mib=2048)
LONG = Kind("long", micro_batches=LONG_MICRO_BATCHES)


class Task:
    """Living workers, wounded again and again."""

    def __init__(self, cluster: LocalCluster, folder: Path, kind: Kind, micro_batch_ms: float) -> None:
        self.cluster = cluster
        self.iteration_s = kind.micro_batches * micro_batch_ms / 1000
        shared = folder / f"shared-{kind.name}"
        shared.mkdir()
        command = (sys.executable, str(WORKER), str(shared), str(micro_batch_ms))
        env = {"BALLAST_MIB": str(kind.ballast_mib), "MICRO_BATCHES": str(kind.micro_batches)}
        self.name = cluster.submit(
            Job(
                name=f"detection-{kind.name}", command=command,
                layout=Layout(dp=NODES, num_micro_batches=kind.micro_batches * NODES), log_dir=str(folder),
                stopped_grace_ms=0, restart_max=1_000_000, env=env, stop_grace_ms=0,
            )
        )  # fmt: skip
        self.known: set[str] = set()

    def wait_whole(self, iterations: int = SETTLE_ITERATIONS) -> None:
        """All roles held, understudies ready, and iterations enough for the statistics."""
        whole_s_max = WHOLE_S_MAX + 2 * max(iterations, KNOWN_ITERATION + 1) * self.iteration_s
        deadline, begun = time.monotonic() + whole_s_max, None
        while time.monotonic() < deadline:
            view = self.cluster.task(self.name)
            members = [w for w in view["workers"] if w["is_member"]]
            ready = [w for w in view["workers"] if w["phase"] == "ready"]
            if view["phase"] != "running" or len(members) != NODES or len(ready) < 2 * NODES:
                begun = None
            else:
                now = min(w["iteration"] for w in members)
                begun = now if begun is None else begun
                if now >= max(begun + iterations, KNOWN_ITERATION):
                    self.known |= {i["id"] for i in self.cluster.incidents(self.name)}
                    return
            time.sleep(0.1)
        view = self.cluster.task(self.name)
        states = {w["worker"]: w["phase"] for w in view["workers"]}
        raise Wrong(f"the task was not whole again within {whole_s_max:.0f} s: {view['phase']}, {states}")

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


def armed(kind: str, point: str = "compute", micro_batch: int = -1) -> Callable[[Task], float | None]:
    def fault(task: Task) -> float | None:
        task.cluster.arm_fault(task.name, VICTIM, kind, point, micro_batch=micro_batch)
        return None

    return fault


def agent_killed(task: Task) -> float | None:
    begun_ms = now_ms()
    task.cluster.kill_agent_alone(f"n{VICTIM}")
    return begun_ms


@dataclass(frozen=True)
class Goal:
    """Of the median. A hang's is a factor of the phase."""

    ms: float = 0.0
    factor: float = 0.0

    def facts(self, samples: list[float], phase_ms: float) -> dict[str, Any]:
        median_ms = statistics.median(samples)
        if not self.factor:
            return {"goal": f"{self.ms:g} ms", "goal ms": self.ms, "met": says(median_ms <= self.ms)}
        wanted_ms = max(self.factor * phase_ms, STALL_MS_MIN)
        is_least = wanted_ms > self.factor * phase_ms
        return {
            "goal": f"{self.factor:g} x its phase{f', {STALL_MS_MIN:g} ms or more' if is_least else ''}",
            "goal ms": wanted_ms, "met": says(median_ms <= wanted_ms + SAMPLE_MS),
            **({} if is_least else {"phase ms": phase_ms, "x its phase": round(median_ms / phase_ms, 3)}),
        }  # fmt: skip


def says(is_met: bool) -> str:
    return "yes" if is_met else "no"


STALL_MS_MIN = healthy.AGENT.stall_ms_min
PROCESS, EXCEPTION, STOP, NODE = Goal(2.0), Goal(5.0), Goal(50.0), Goal(1_000.0)
WITH_EVIDENCE, WITHOUT = Goal(factor=1.5), Goal(factor=3.0)
SLOW_ITERATIONS = 20


@dataclass(frozen=True)
class Case:
    name: str
    fault: Callable[[Task], float | None]
    expected: Expected
    paper: str
    goal: Goal
    heals: Callable[[Task], None] = lambda task: None
    kind: Kind = SMALL

    @property
    def settles(self) -> int:
        """Iterations before the fault."""
        if self.kind is LONG:
            return LONG_SETTLE_ITERATIONS
        return SETTLE_ITERATIONS if self.expected.fault == STALLED else TOGETHER_ITERATIONS


LOST, STALLED = "worker lost", "stalled"
STOPPED_AGENT, SLOW_RANK, CUT_NETWORK = "agent stopped", "slow rank +10 %", "network of a node cut"
HANG, SUSPECT = "3 x D_iter", "suspect, nothing lost"
LAST = LONG_MICRO_BATCHES - 1
CASES = (
    Case("SIGKILL", sent(signal.SIGKILL), Expected(LOST, "signal 9"), "1800", PROCESS),
    Case("SIGKILL, 2 GiB", sent(signal.SIGKILL), Expected(LOST, "signal 9"), "1800", PROCESS, kind=LARGE),
    Case("SIGSEGV", sent(signal.SIGSEGV), Expected(LOST, "Segmentation fault"), "1800", PROCESS),
    Case("exception", armed("exception"), Expected("exception", "InjectedFault"), "300", EXCEPTION),
    Case("C++ terminate", armed("abort"), Expected(LOST, "std::terminate was called"), "1800", PROCESS),
    Case("exit(0) unfinished", armed("leave"), Expected(LOST, "exit code 0"), "1800", PROCESS),
    Case("SIGSTOP", sent(signal.SIGSTOP), Expected("stopped", ""), HANG, STOP),
    Case("deadlock, GIL held", armed("gil"), Expected(STALLED, "waits for nobody"), HANG, WITH_EVIDENCE),
    Case("one does not join", armed("deadlock", "reduce"), Expected(STALLED, "waits for nobody"), HANG, WITH_EVIDENCE),
    Case(
        "agent killed", agent_killed, Expected("node lost", "", "SEV1"), "5600", NODE,
        heals=lambda task: task.cluster.start_agent(f"n{VICTIM}"),
    ),
    Case(
        "long phase: sleeps, all others wait", armed("deadlock", micro_batch=LAST),
        Expected(STALLED, f"nothing of it runs, and all {NODES - 1} others wait"), HANG, WITH_EVIDENCE, kind=LONG,
    ),
    Case(
        "long phase: sleeps, nobody waits yet", armed("deadlock", micro_batch=0),
        Expected(STALLED, "waits for nobody; nothing of it runs"), HANG, WITHOUT, kind=LONG,
    ),
    Case(
        "long phase: computes, all others wait", armed("spin", micro_batch=LAST),
        Expected(STALLED, f"waits for nobody; {NODES - 1} of {NODES - 1} others wait"), HANG, WITHOUT, kind=LONG,
    ),
    Case(
        "long phase: computes, nobody waits yet", armed("spin", micro_batch=0),
        Expected(STALLED, "waits for nobody; for longer than its budget"), HANG, WITHOUT, kind=LONG,
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


# ---------------------------------------------------------------- measured


def cut_network(bench: common.Bench, runs: int) -> None:
    """Real training over a link that is taken down, in namespaces (unicron.demo.cut_network): rows of its own."""
    command = [sys.executable, "-m", "unicron.demo.cut_network", "--rounds", str(runs), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120 + 60 * runs)
    if done.returncode == 2:
        return  # it said what this machine lacks
    if done.returncode:
        raise Wrong(f"{CUT_NETWORK}: exit code {done.returncode}; see above")
    found = json.loads(done.stdout)["rounds"]
    suspect_ms, lost_ms = ([each[name] for each in found] for name in ("suspect_ms", "lost_ms"))
    bench.add(f"{CUT_NETWORK}: suspect", suspect_ms, paper="-", **NODE.facts(suspect_ms, 0), verdict=SUSPECT)
    bench.add(f"{CUT_NETWORK}: lost", lost_ms, paper="5600", **NODE.facts(lost_ms, 0), verdict="node lost")


def measure(bench: common.Bench, arguments: argparse.Namespace) -> None:
    def is_wanted(name: str) -> bool:
        return any(part in name for part in arguments.only)

    runs = {SMALL: arguments.runs, LARGE: arguments.runs, LONG: arguments.long_runs}
    cases = [case for case in CASES if is_wanted(case.name) and runs[case.kind]]
    if is_wanted(CUT_NETWORK):
        cut_network(bench, arguments.runs)
    others = [name for name in (STOPPED_AGENT, SLOW_RANK) if is_wanted(name)]
    if not cases and not others:
        return
    with common.scratch() as folder:
        with LocalCluster(
            NODES, 1, 1, imports="unicron._core,unicron.faults.perform", log_dir=folder / "d", coordinator=NEVER_RESTS
        ) as cluster:
            for kind in (SMALL, LARGE, LONG):
                mine = [case for case in cases if case.kind is kind]
                if not mine and (kind is not SMALL or not others):
                    continue
                micro_batch_ms = arguments.long_micro_batch_ms if kind is LONG else arguments.micro_batch_ms
                task = Task(cluster, folder, kind, micro_batch_ms)
                for case in mine:
                    samples = [one(task, case) for _ in range(runs[kind])]
                    goal = case.goal.facts(samples, micro_batch_ms)
                    bench.add(case.name, samples, paper=case.paper, **goal, verdict=str(case.expected))
                    print(f"{case.name}: {samples}", file=sys.stderr, flush=True)
                if kind is SMALL:
                    agents_and_slow_ranks(bench, task, others, arguments.runs)
                cluster.cancel(task.name)


def agents_and_slow_ranks(bench: common.Bench, task: Task, names: list[str], runs: int) -> None:
    if STOPPED_AGENT in names:
        samples = [agent_stopped(task) for _ in range(runs)]
        bench.add(STOPPED_AGENT, samples, paper="-", **NODE.facts(samples, 0), verdict=SUSPECT)
    if SLOW_RANK in names:
        found = [slow_rank(task) for _ in range(runs)]
        iterations = [number for _, number in found]
        median = statistics.median(iterations)
        bench.add(
            SLOW_RANK, [ms for ms, _ in found], paper="-", goal=f"{SLOW_ITERATIONS} iterations",
            met=says(median <= SLOW_ITERATIONS), iterations=median, verdict=f"slow, <= {max(iterations)} iterations",
        )  # fmt: skip


# ---------------------------------------------------------------- false alarms


def simulated(result: healthy.Result) -> dict[str, Any]:
    return {
        "iterations": result.iterations, "simulated hours": round(result.ended_ms / 3.6e6),
        "intervals": result.intervals, "alarms": result.alarms, **result.beats.as_json(),
    }  # fmt: skip


def false_alarms(result: healthy.Result) -> common.Bench:
    """A result that can be kept. Modelled: nothing in it is measured, so it has no times."""
    bench = common.Bench(
        "false alarms in simulated iterations (modelled)", unit="alarms", configuration=simulated(result)
    )
    stalls, nodes = result.stalls, result.beats.nodes
    for case, found, watched, suspicions in (
        ("a rank that stands still", stalls, f"{result.intervals} intervals", result.suspicions),
        ("a slow rank, stage or link", result.slow, f"{result.iterations} iterations", ""),
        ("a lost node", nodes, f"{result.beats.beats} beats", result.beats.suspicions),
    ):
        facts = {"watched": watched, "suspected only": suspicions, "goal": "none", "met": says(not found)}
        bench.add(case, [float(len(found))], **facts)
    return bench


# ---------------------------------------------------------------- all of it


def options() -> argparse.ArgumentParser:
    parser = common.parser(__doc__.splitlines()[0], runs=5)
    parser.add_argument("--micro-batch-ms", type=float, default=25.0, help="an iteration is four of these")
    parser.add_argument("--long-micro-batch-ms", type=float, default=4_000.0, help="of the cases with a long phase")
    parser.add_argument("--long-runs", type=int, default=2, help="of each of those: most of a minute a run; 0: none")
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name has one of these; none: no case")
    parser.add_argument("--strict", action="store_true", help="fail where a median misses its goal")
    parser.add_argument("--healthy", type=int, default=0, help="also simulate so many healthy iterations")
    parser.add_argument("--soak", action="store_true", help="also train on a loaded machine, and listen")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak")
    return parser


def main() -> None:
    arguments = options().parse_args()
    bench = common.Bench(
        "detection: fault to verdict", unit="ms",
        configuration={
            "nodes": NODES, "micro_batch_ms": arguments.micro_batch_ms, "iteration": "4 micro-batches",
            "an agent looks every ms": SAMPLE_MS,
        },
    )  # fmt: skip
    is_measured = arguments.only != ["none"]
    if is_measured:
        measure(bench, arguments)
        if not bench.rows:
            raise SystemExit(f"no case has one of {arguments.only} in its name; `--only` without a word runs all")
    result = healthy.check(arguments.healthy) if arguments.healthy else None
    if result is not None and (is_measured or arguments.soak):
        bench.configuration["healthy (modelled)"] = simulated(result)
    elif result is not None:
        bench = false_alarms(result)
    outcome = soak.run(arguments.minutes) if arguments.soak else soak.Outcome()
    if arguments.soak:
        bench.configuration["soak"] = outcome.as_json()
    bench.finish(arguments)
    if result is not None and result.alarms:
        raise SystemExit(f"a healthy run raised alarms: {result.stalls[:9]} {result.slow[:9]} {result.beats.nodes[:9]}")
    if outcome.incidents:
        raise SystemExit(f"real training, in which nothing failed, raised alarms: {outcome.as_json()['what']}")
    missed = [row.case for row in bench.rows if row.facts.get("met") == "no"]
    if missed:
        print(f"goals that are not met: {', '.join(missed)}", file=sys.stderr)
        raise SystemExit(1 if arguments.strict else 0)


if __name__ == "__main__":
    main()
