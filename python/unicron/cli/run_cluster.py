"""The life of `unicron run`: a cluster of its own, here or in a Slurm allocation, for one task."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from unicron.cli.common import Problem, print_json
from unicron.cli.run_view import RunView
from unicron.coordinator.job import Job
from unicron.runtime import slurm
from unicron.runtime.local_cluster import ClusterProblem, LocalCluster
from unicron.runtime.run_logs import make_room
from unicron.runtime.runner import Watch, run_task
from unicron.runtime.slurm_cluster import SlurmCluster

HINT = (
    "this script does not join unicron: it is supervised, and after a failure all of its workers"
    " start again. With unicron.join() in it the interrupted iteration would be finished instead"
    " (docs/TRAINING.md)"
)
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOTICE = signal.SIGUSR1
LOOPBACK = "127.0.0.1"
Cluster = TypeVar("Cluster", bound=LocalCluster)


class Interrupted(SystemExit):
    """A person, or the machine, ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.name = signal.Signals(number).name


@dataclass(frozen=True)
class InSlurm:
    drains: bool  # nodes that failed, so that other jobs do not get them
    save_before_s: float  # the job's end
    requeue: bool  # the job, once it saved


@dataclass
class Run:
    job: Job
    agents: int
    slots: int
    imports: str
    quiet: bool
    json: bool
    networks: tuple[str, str] = ("", "")  # --interface, --state-interface
    _notice: list[str] = field(default_factory=list)
    _left: bool = False  # it saved on a notice; a script may end with 75 for its own reasons

    def here(self) -> int:
        """On this machine."""
        logs = Path(self.job.log_dir)
        try:
            held, earlier = make_room(logs, self.job.name)
        except OSError as error:
            raise Problem(f"--log-dir {logs}: {error.strerror or error}") from None
        if earlier is not None:
            sys.stderr.write(f"unicron: logs of the run before: {earlier}\n")
        try:
            return self._here(logs)
        finally:
            os.close(held)

    def _here(self, logs: Path) -> int:
        return self._life(
            lambda: LocalCluster(
                self.agents,
                self.slots,
                self.job.understudies,
                imports=self.imports,
                log_dir=logs / ".unicron",
                owner=f"unicron run {self.job.name}",
                address=own_address(self.networks[0]),
                networks=self.networks,
            ),
            lambda cluster, view: view.watch(),
        )

    def in_allocation(self, allocation: slurm.Allocation, wanted: InSlurm) -> int:
        """On all its nodes; those that the task does not need stand by."""
        state = Path(self.job.log_dir) / f".unicron-{allocation.job}"

        def new() -> SlurmCluster:
            return SlurmCluster(
                allocation, self.slots, self.job.understudies, needed=self.agents, state=state, imports=self.imports,
                log_dir=state / "daemons", networks=self.networks,
            )  # fmt: skip

        def watch(cluster: SlurmCluster, view: RunView) -> Watch:
            watched = view.watch()
            # A requeued job's journal: what failed in its former run, and all of that run's agents, which it misses.
            former = {found["id"] for found in cluster.incidents()}

            def incident(found: dict[str, Any]) -> None:
                if found["id"] in former:
                    return
                shown(found)
                if found["severity"] == "SEV1" and found["outcome"] and found["root"]["node"]:
                    view.say(drain(found["root"]["node"], found["cause"] or found["fault"], wanted.drains))

            def row(found: dict[str, Any]) -> None:
                while cluster.news:
                    view.say(cluster.news.pop(0))
                row_shown(found)

            def notice() -> str:
                return self._notice[0] if self._notice else cluster.ending(wanted.save_before_s)

            shown, watched.incident = watched.incident, incident
            row_shown, watched.state = watched.state, row
            watched.notice = notice
            watched.refused = lambda text: view.say(f"cannot save before the end: {text}")
            return watched

        signal.signal(NOTICE, lambda number, _: self._notice.append(signal.Signals(number).name))
        code = self._life(new, watch)
        if self._left and wanted.requeue:
            sys.stderr.write(f"unicron: {again(allocation.job)}\n")
        return code

    def _life(self, new: Callable[[], Cluster], watch: Callable[[Cluster, RunView], Watch]) -> int:
        def interrupted(number: int, _: object) -> None:
            raise Interrupted(number)

        for number in ENDS:
            signal.signal(number, interrupted)
        sys.stderr.write("" if self.job.managed else f"unicron run: {HINT}\n")
        logs = Path(self.job.log_dir)
        cluster = new()
        view = RunView(logs / self.job.name, quiet=self.quiet, to_stderr=self.json)
        try:
            view.say("starting")
            cluster.start()
            view.say(f"from elsewhere: unicron ps --coordinator {cluster.address} --keys {cluster.state}/keys")
            result = run_task(cluster, self.job, watch(cluster, view))
            self._left = result.outcome == "suspended"
        except ClusterProblem as problem:
            raise Problem(str(problem)) from None
        except Interrupted as ended:
            where = f"{self.job.name} ends where it is, and its workers with it; logs in {logs / self.job.name}"
            view.say(f"{ended.name}: {where}")
            raise
        finally:
            for number in (*ENDS, NOTICE):
                signal.signal(number, signal.SIG_IGN)  # nothing may cut the cleaning short
            view.close()
            cluster.stop()
        if result.never_joined:
            sys.stderr.write(f"unicron run: {HINT}\n")
        if self.json:
            print_json({**vars(result), "log_dir": str(logs / self.job.name)})
        else:
            view.summary(result)
        return result.exit_code


def own_address(interface: str) -> str:
    """Where the coordinator of this machine listens: on loopback, unless another interface is wanted."""
    from unicron.runtime.networks import INTERFACE, choose_networks

    if not (interface or os.environ.get(INTERFACE)):
        return LOOPBACK
    return choose_networks((f"tcp://{LOOPBACK}:1",), interface, "", os.environ).control.address


def drain(node: str, reason: str, drains: bool) -> str:
    """What was done about a node that failed, or what a person may do."""
    if not drains:
        words = " ".join(f"'{word}'" if " " in word else word for word in slurm.drain_words(node, reason))
        return f"{node} failed; to keep other jobs off it: scontrol {words}"
    try:
        slurm.drain(node, reason)
    except slurm.SlurmProblem as problem:
        return f"{node} failed, and could not be drained: {problem}"
    return f"{node} failed, and is drained"


def again(job: str) -> str:
    try:
        slurm.requeue(job)
    except slurm.SlurmProblem as problem:
        return f"saved; job {job} is not queued again: {problem}"
    return f"saved; job {job} goes back into the queue"
