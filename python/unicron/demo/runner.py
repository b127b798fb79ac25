"""Runs scenarios of one layout on one living cluster, and judges each against one reference run.

The cluster has dp / ep nodes of tp x pp x ep slots: one replica and one understudy a node. The reference is
an undisturbed managed run of the same script, made once; beside it a short unmanaged one (plain
processes, no unicron) for the cost of being managed. A cluster that a scenario left broken is
replaced by a new one, and the scenario's verdict says so."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unicron.coordinator.config import CoordinatorConfig
from unicron.demo import compare, results, scenarios
from unicron.demo.progress import Progress, describe
from unicron.demo.scenarios import Scenario
from unicron.demo.variant import PLAIN, Variant
from unicron.demo.watch import OVER, Cluster, Seen, Watch, WatchProblem
from unicron.types import Layout

MICRO_BATCH = 2  # samples
MICRO_BATCHES_PER_REPLICA = 4
UNDERSTUDIES = 1  # a node
IMPORTS = "torch,megatron.core,unicron.training,unicron.demo.model,unicron.demo.record"
UNMANAGED_ITERATIONS = 20
UNMANAGED_TIMEOUT_S = 240.0
ENDED_S = 5.0  # how long the processes of a finished task may take to be gone
REFERENCE = "reference"
NEVER_RESTS = CoordinatorConfig(flaps_max=1_000_000)  # scenarios lose the same nodes again and again
SCRIPT = ("-m", "unicron.demo.train")


def layout_of(
    tp: int, pp: int, dp: int, *, ep: int = 1, sharded: bool = False, exact: bool = False, buddy: bool = False,
    buddy_every: int = 0, instances: int = 1,
) -> Layout:  # fmt: skip
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        micro_batch=MICRO_BATCH,
        num_micro_batches=MICRO_BATCHES_PER_REPLICA * dp,
        sharded=sharded,
        exact=exact,
        buddy=buddy,
        buddy_every=buddy_every,
        instances=instances,
    )


@dataclass(frozen=True)
class Options:
    layout: Layout
    iterations: int = scenarios.ITERATIONS
    seed: int = 0
    folder: Path = Path("unicron-demo")
    measure_unmanaged: bool = True
    keep: bool = False  # gradients and weights of the runs
    variant: Variant = PLAIN
    timeout_s: float | None = None  # of a run, beside its iterations; None: the watch's own

    @property
    def gathers_late(self) -> bool:
        return self.variant.overlap and self.layout.sharded and not self.layout.buddy


@dataclass
class Outcome:
    """One scenario: the JSON object, and what the report draws."""

    result: dict[str, Any]
    run: results.Run
    reference: results.Run
    marks: list[tuple[int, str]]


class Suite:
    """``with Suite(options, progress) as suite: for outcome in suite.run(names): ...``"""

    def __init__(self, options: Options, progress: Progress) -> None:
        self._options, self._progress = options, progress
        self._cluster: Any = None
        self._spares = 0  # of the living cluster
        self._references: dict[tuple[int, tuple[int, ...]], results.Run] = {}  # by iterations and window
        self._measure_unmanaged = options.measure_unmanaged
        self._unmanaged_ms: float | None = None

    def __enter__(self) -> Suite:
        self._options.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._end_cluster()

    def run(self, names: tuple[str, ...]) -> Iterator[Outcome]:
        for name in names:
            scenario = scenarios.make(name, self._options.layout, self._options.seed)
            yield self.one(scenario)

    def one(self, scenario: Scenario) -> Outcome:
        if scenario.iterations == scenarios.ITERATIONS:
            scenario = _with_iterations(scenario, self._options.iterations)
        if self._options.gathers_late and self._options.layout.replica_size > 1:
            # Who is lost while parameters are under way leaves whole replicas waiting inside, too: all groups go.
            scenario = replace(scenario, expect=replace(scenario.expect, groups_kept=False))
        reference = self.reference(scenario)
        if self._measure_unmanaged:
            self._measure_unmanaged = False
            self._unmanaged_ms = self._run_unmanaged(reference)
        extra = extra_iterations(scenario, compare.median_ms(reference))
        self._progress.begins(scenario.name, scenario.says, scenario.iterations)
        run, seen, left, problem = self.carry_out(scenario, extra, usual_ms=compare.median_ms(reference))
        setting = compare.Setting(
            self._options.layout,
            managed_median_ms=compare.median_ms(reference),
            unmanaged_median_ms=self._unmanaged_ms,
        )
        observed = compare.Observed(
            tuple(seen.incidents.values()),
            {**seen.view, "replicas": seen.replicas},
            self._blamed(),
            left,
        )
        result = compare.compare(run, reference, scenario, setting, observed)
        if problem:
            result["passed"] = False
            result["reasons"].insert(0, problem)
        self._progress.ends(result)
        if not result["passed"]:
            self._end_cluster()  # the next scenario shall not suffer from this one
        self._forget_arrays(run)
        return Outcome(result, run, reference, seen.marks)

    def renew(self) -> None:
        """The next task gets a new cluster."""
        self._end_cluster()

    def say(self, text: str) -> None:
        self._progress.happened(text)

    @contextlib.contextmanager
    def living_task(self, scenario: Scenario) -> Iterator[tuple[Any, str, Path]]:
        """(cluster, task, folder of its records), for somebody else to watch and break. Ended at the end."""
        self._progress.begins(scenario.name, scenario.says, scenario.iterations)
        folder, cluster = self._empty_folder(scenario.name), self._living_cluster()
        task = cluster.submit(self._job(scenario, folder, self._of_script(scenario, folder, 0, False)))
        try:
            yield cluster, task, folder
        finally:
            if cluster.task(task)["phase"] not in OVER:
                cluster.cancel(task)
                cluster.wait(task, ENDED_S)
            self._progress.ends(None)

    # ---------------------------------------------------------------- runs

    def reference(self, scenario: Scenario) -> results.Run:
        """An undisturbed run of as many iterations that keeps the same records."""
        iterations, window = scenario.iterations, scenario.window
        known = self._references.get((iterations, window))
        if known is not None:
            return known
        undisturbed = Scenario(
            f"{REFERENCE}-{iterations}" + "".join(f"-{i}" for i in window[:1] if window != scenarios.GRADIENT_WINDOW),
            "undisturbed, managed: what the others are compared with",
            scenarios.Expect("unaffected"),
            iterations=iterations,
            window=window,
            digests=scenario.digests,
            spares=scenario.spares,
        )
        self._progress.begins(undisturbed.name, undisturbed.says, iterations)
        run, seen, _, problem = self.carry_out(undisturbed, 0, magnitudes=True)
        if problem or seen.view.get("phase") != "done" or iterations - 1 not in run.losses:
            cause = (problem or seen.view.get("cause") or "no cause is known").splitlines()[0]
            raise WatchProblem(f"the undisturbed run did not finish: {cause}; logs: {self._logs}")
        if seen.incidents:
            told = "; ".join(describe(incident) for incident in seen.incidents.values())
            raise WatchProblem(f"the undisturbed run was disturbed: {told}; logs: {self._logs}")
        self._progress.ends(None)
        self._references[iterations, window] = run
        return run

    def carry_out(
        self, scenario: Scenario, extra: int, magnitudes: bool = False, usual_ms: float = 0.0
    ) -> tuple[results.Run, Seen, dict[str, int], str]:
        """(records, what was seen, what was left behind, a problem of the run itself). Faults and acts are done."""
        folder, cluster = self._empty_folder(scenario.name), self._living_cluster(scenario.spares)
        before = shared_segments(cluster)
        arguments = self._of_script(scenario, folder, extra, magnitudes)
        task = cluster.submit(self._job(scenario, folder, arguments))
        planned = scenario.iterations + extra
        watch = Watch(cluster, task, folder, scenario, planned, usual_ms, self._progress)
        problem = ""
        try:
            watch.until_over(self._options.timeout_s)
        except WatchProblem as error:
            problem = str(error)
            with contextlib.suppress(Exception):
                cluster.cancel(task)
        watch.put_right()
        left = self._left_behind(cluster, watch.seen.pids, before)
        return results.load(folder), watch.seen, left, problem

    def _empty_folder(self, name: str) -> Path:
        folder = self._options.folder / "runs" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _of_script(self, scenario: Scenario, folder: Path, extra: int, magnitudes: bool) -> list[str]:
        return [*_arguments(scenario, folder, extra, magnitudes), *self._options.variant.arguments()]

    def _job(self, scenario: Scenario, folder: Path, arguments: list[str]) -> Any:
        from unicron.coordinator.job import Job

        every = scenario.checkpoint_every
        return Job(
            name=scenario.name,
            command=(sys.executable, *SCRIPT, *arguments),
            layout=self._options.layout,
            layouts=scenario.layouts,
            cwd=os.getcwd(),
            log_dir=str(self._logs),
            understudies=UNDERSTUDIES,
            standbys=scenario.standbys,
            stopped_grace_ms=0,
            checkpoint_dir=str((folder / "checkpoints").resolve()) if every else "",
            checkpoint_every=every,
            # The matrix breaks one task all the time.
            restart_max=max(scenarios.RANDOM_KILLS + 10, scenario.iterations),
        )

    def _run_unmanaged(self, reference: results.Run) -> float | None:
        """The same script in plain processes: median iteration, in ms. It must learn the same."""
        scenario = Scenario("unmanaged", "", scenarios.Expect("unaffected"))
        folder = self._options.folder / "runs" / "unmanaged"
        shutil.rmtree(folder, ignore_errors=True)
        self._progress.begins("unmanaged", "the same script without unicron, for its speed", UNMANAGED_ITERATIONS)
        layout = self._options.layout
        arguments = self._of_script(_with_iterations(scenario, UNMANAGED_ITERATIONS), folder, 0, False)
        arguments += ["--gradients", "", "--tp", str(layout.tp), "--pp", str(layout.pp)]
        arguments += ["--ep", str(layout.ep)]
        arguments += ["--micro-batch", str(layout.micro_batch)]
        arguments += ["--num-micro-batches", str(layout.num_micro_batches)]
        arguments += ["--sharded"] if layout.sharded else []
        arguments += ["--instances", str(layout.instances)]
        try:
            plain_processes(arguments, layout.world_size, self._logs / "unmanaged")
        except WatchProblem as problem:  # a number is missing then; no scenario needs it
            self._progress.happened(str(problem))
        self._progress.ends(None)
        run = results.load(folder)
        difference = compare.early_loss_difference(run, reference)
        if difference > compare.UNMANAGED_LOSS_MAX and not self._options.variant.dropout:  # its masks are others
            raise WatchProblem(
                f"managed and unmanaged run do not learn the same: losses of the first iterations "
                f"differ by {difference:.2g}"
            )
        return compare.median_ms(run) or None

    # ---------------------------------------------------------------- cluster

    @property
    def _logs(self) -> Path:
        return (self._options.folder / "logs").resolve()

    def _living_cluster(self, spares: int = 0) -> Cluster:
        if self._spares != spares:
            self._end_cluster()
            self._spares = spares
        if self._cluster is None:
            from unicron.runtime.local_cluster import LocalCluster

            layout = self._options.layout
            self._progress.happened("starting the cluster")
            self._cluster = LocalCluster(
                num_agents=layout.num_replicas + spares,
                slots=layout.replica_size,
                understudies=UNDERSTUDIES,
                imports=IMPORTS,
                log_dir=self._logs / "cluster",
                owner="unicron demo",
                coordinator=NEVER_RESTS,
            )
            self._cluster.start()
        self._cluster.wait_for_nodes()  # one that an act ended is on its way back
        return self._cluster

    def _end_cluster(self) -> None:
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.stop()

    def _blamed(self) -> tuple[str, ...]:
        with contextlib.suppress(Exception):
            return tuple(n["node"] for n in self._cluster.ask("nodes") if n["phase"] == "lost")
        return ()

    def _left_behind(self, cluster: Cluster, pids: set[int], before: frozenset[str]) -> dict[str, int]:
        """Of a task that is over: its processes, and memory that somebody still holds open."""
        left = {"processes": 0, "shared_segments": 0}
        deadline = time.monotonic() + ENDED_S
        while time.monotonic() < deadline:
            left = {
                "processes": sum(map(is_alive, pids)),
                "shared_segments": len(shared_segments(cluster, pids) - before),
            }
            if not any(left.values()):
                break
            time.sleep(0.05)
        return left

    def _forget_arrays(self, run: results.Run) -> None:
        if not self._options.keep:
            for path in run.folder.glob("*.npy"):
                path.unlink()


def _with_iterations(scenario: Scenario, iterations: int) -> Scenario:
    return replace(scenario, iterations=iterations)


def extra_iterations(scenario: Scenario, usual_ms: float) -> int:
    return math.ceil(1000 * scenario.extra_s / usual_ms) if usual_ms else 0


def _arguments(scenario: Scenario, folder: Path, extra: int, magnitudes: bool) -> list[str]:
    window = scenario.window if scenario.iterations <= 100 else ()
    arguments = ["--iterations", str(scenario.iterations), "--extra", str(extra)]
    arguments += ["--results", str(folder.resolve())]
    arguments += ["--gradients", ",".join(map(str, window))]
    arguments += ["--magnitudes"] if magnitudes else []
    arguments += ["--digests"] if scenario.digests else []
    arguments += ["--evaluate-every", str(scenario.evaluate_every)] if scenario.evaluate_every else []
    if scenario.poison:
        arguments += ["--poison", ",".join(map(str, scenario.poison))]
    return arguments


# -------------------------------------------------------------------- this machine


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def shared_segments(cluster: Cluster, pids: Collection[int] = ()) -> frozenset[str]:
    """Arenas that the cluster's agents hold open, and files in /dev/shm that name these
    processes.
    """
    held: set[str] = set()
    for node in cluster.nodes:
        folder = Path(f"/proc/{cluster.agent_pid(node)}/fd")
        with contextlib.suppress(OSError):  # an agent that is gone holds nothing
            held.update(_arenas(folder))
    names = {str(pid) for pid in pids}
    with contextlib.suppress(OSError):
        for path in Path("/dev/shm").iterdir():
            if path.name.startswith("unicron") or names & set(path.name.split("_")):
                held.add(path.name)
    return frozenset(held)


def _arenas(folder: Path) -> Iterator[str]:
    for link in folder.iterdir():
        with contextlib.suppress(OSError):
            if "unicron-arena" in os.readlink(link):
                yield f"arena {link.stat().st_ino}"


def plain_processes(arguments: list[str], world_size: int, logs: Path) -> None:
    """The script without unicron (demo/plain.py), until its end."""
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "unicron.demo.plain"]
    command += [str(world_size), str(free_port()), str(logs)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with open(logs / "launcher.log", "wb") as log:
        process = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log)
    try:
        if process.wait(UNMANAGED_TIMEOUT_S):
            raise WatchProblem(f"the unmanaged run failed: see {logs}")
    except subprocess.TimeoutExpired:
        raise WatchProblem(f"the unmanaged run did not end in its time: see {logs}") from None
    finally:
        process.terminate()  # ends its children, too


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_plain(words: list[str], rank: int, size: int, port: int, logs: Path) -> subprocess.Popen[Any]:
    """One process of an unmanaged run, for those who want to stop and continue it (bench/)."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with open(logs / f"{rank}.log", "wb") as log:
        command = [sys.executable, *words]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)
