"""One task on a local cluster from start to end: what `unicron run` does, without the printing."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from unicron.coordinator.job import Job
from unicron.runtime.client import CoordinatorRefused, CoordinatorSilent
from unicron.runtime.local_cluster import OVER, LocalCluster
from unicron.runtime.slurm import EXIT_REQUEUE

LOOK_S = 0.2
UNJOINED_S = 20.0  # until it is said that a script which speaks of unicron has not joined
EXITS_S_MAX = 35.0  # after the decision: the coordinator's own bound for the last exits is 30 s

_JOINS = re.compile(r"^\s*(?:import|from)\s+unicron\b", re.MULTILINE)
CANCELLED = "cancelled"  # a task's cause then
_EXIT = re.compile(r"\bexit code (\d+)")
_SIGNAL = re.compile(r"\bsignal (\d+)")


def seems_managed(command: tuple[str, ...]) -> bool:
    """Does the script speak of unicron? A guess: whoever knows better says --managed or
    --no-managed.
    """
    path = script_of(command)
    try:
        return path is not None and bool(_JOINS.search(path.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False


def script_of(command: tuple[str, ...]) -> Path | None:
    words = list(command)
    if words and Path(words[0]).name.startswith("python"):
        words.pop(0)
    if words[:1] == ["-m"] and len(words) > 1:
        return _module_file(words[1])
    return Path(words[0]) if words else None


def _module_file(name: str) -> Path | None:
    """Without importing anything."""
    path = [os.getcwd(), *sys.path]
    spec = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    if spec is not None and spec.submodule_search_locations:
        spec = PathFinder.find_spec("__main__", path)
    return Path(spec.origin) if spec is not None and spec.origin else None


@dataclass
class Watch:
    """What the caller wants to hear while the task runs."""

    state: Callable[[dict[str, Any]], None] = lambda row: None
    incident: Callable[[dict[str, Any]], None] = lambda incident: None
    restarted: Callable[[str], None] = lambda daemon: None
    notice: Callable[[], str] = lambda: ""  # why the slots will be gone soon: the task saves and leaves
    refused: Callable[[str], None] = lambda text: None  # it cannot
    unjoined: Callable[[float], None] = lambda seconds: None  # it runs for so long, and no epoch began


@dataclass
class Result:
    task: str
    outcome: str
    cause: str
    exit_code: int
    seconds: float
    never_joined: bool = False  # it was taken for a managed script, and no epoch ever began
    incidents: list[dict[str, Any]] = field(default_factory=list)


def run_task(cluster: LocalCluster, job: Job, watch: Watch) -> Result:
    """Submit, watch until it is over or has left on a notice, and say how it ended. The cluster is the caller's to
    stop."""
    start = time.monotonic()
    task = submit_or_go_on(cluster, job)
    notice = ""
    known: dict[str, str | None] = {}
    incidents: dict[str, dict[str, Any]] = {}
    ended_at = 0.0
    joins_from: float | None = start
    while True:
        for name in cluster.tend():
            watch.restarted(name)
        try:
            row = cluster.task_row(task)
            for incident in cluster.incidents(task):
                incidents[incident["id"]] = incident
                if known.get(incident["id"], "") != incident["outcome"]:
                    known[incident["id"]] = incident["outcome"]
                    watch.incident(incident)
        except CoordinatorSilent:
            continue  # it is tended to in the next turn
        watch.state(row)
        joins_from = _awaited(job, row, watch, joins_from)
        if not notice and (notice := watch.notice()):
            _leave(cluster, task, watch)
        if notice and row["phase"] == "suspended":
            break
        if row["outcome"] and not ended_at:
            ended_at = time.monotonic()
        if row["phase"] in OVER or (ended_at and time.monotonic() - ended_at > EXITS_S_MAX):
            break
        time.sleep(LOOK_S)
    found = list(incidents.values())
    seconds = time.monotonic() - start
    if row["phase"] == "suspended":
        return Result(task, "suspended", notice, EXIT_REQUEUE, seconds, False, found)
    code = exit_code(row["outcome"], row["cause"], found)
    never_joined = job.managed and row["epoch"] == 0 and row["outcome"] == "done"
    return Result(task, row["outcome"], row["cause"], code, seconds, never_joined, found)


def _awaited(job: Job, row: dict[str, Any], watch: Watch, since: float | None) -> float | None:
    """When its workers began to be waited for; None once that is over, or said."""
    if since is None or not job.managed or row["epoch"] > 0:
        return None
    if row["phase"] != "starting":
        return time.monotonic()
    if time.monotonic() - since < UNJOINED_S:
        return since
    watch.unjoined(UNJOINED_S)
    return None


def submit_or_go_on(cluster: LocalCluster, job: Job) -> str:
    """A journal that outlived an earlier run knows the task: it goes on where it was."""
    known = next((row for row in cluster.ask("ps") if row["task"] == job.name), None)
    if known is None or known["phase"] in OVER:
        return cluster.submit(job)
    if known["phase"] == "suspended":
        cluster.resume(job.name)
    return job.name


def _leave(cluster: LocalCluster, task: str, watch: Watch) -> None:
    try:
        cluster.suspend(task)
    except CoordinatorRefused as problem:
        watch.refused(str(problem))


def exit_code(outcome: str, cause: str, incidents: list[dict[str, Any]]) -> int:
    """The script's own: exit codes pass through, 128 + signal for signals, 1 for an exception. 137 for one that was
    cancelled, whatever was healed before."""
    if outcome == "done":
        return 0
    if cause == CANCELLED:
        return 128 + signal.SIGKILL
    for text in (cause, *(i["cause"] for i in reversed(incidents))):
        exited, signaled = _EXIT.search(text), _SIGNAL.search(text)
        if exited and int(exited[1]):
            return int(exited[1])
        if signaled:
            return 128 + int(signaled[1])
    return 1
