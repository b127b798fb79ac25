"""Clusters for the process tests. Each must leave nothing behind, and this is asserted for every
one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron.coordinator.job import Job
from unicron.demo.watch import failures
from unicron.runtime import processes
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

PLAIN = Path(__file__).with_name("plain_worker.py")


def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """The condition's value as soon as it is true; fails when it is not in time."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.02)


def plain_job(name: str, logs: Path, iterations: int = 400, step_ms: float = 10, **more: Any) -> Job:
    return Job(
        name=name,
        command=(sys.executable, str(PLAIN), str(iterations), str(step_ms)),
        layout=Layout(dp=2, num_micro_batches=2),
        log_dir=str(logs),
        **{"stopped_grace_ms": 0, **more},
    )


def make_cluster(tmp: Path) -> LocalCluster:
    return LocalCluster(2, 1, 1, imports="unicron._core", log_dir=tmp / "daemons")


def end(cluster: LocalCluster) -> None:
    assert cluster.stop() == [], "daemons or workers had to be killed by their mark"
    assert processes.find(cluster.directory) == []
    assert not cluster.directory.exists()


def running(cluster: LocalCluster, task: str, iteration: int = 3) -> None:
    """All members ready, both understudies waiting, and the loop turning."""

    def is_running() -> bool:
        view = cluster.task(task)
        ready = [w for w in view["workers"] if w["phase"] == "ready"]
        moving = [w for w in ready if w["is_member"] and w["iteration"] >= iteration]
        return view["phase"] == "running" and len(moving) == 2 and len(ready) == 4

    eventually(is_running)


def happened(cluster: LocalCluster, task: str = "") -> list[dict[str, Any]]:
    """The incidents of something that failed: slow ranks of a busy machine are only told."""
    return failures(cluster.incidents(task))


def closed_incident(cluster: LocalCluster, task: str, number: int = 1) -> dict[str, Any]:
    """The number-th incident of something that failed, once it has an outcome."""

    def found() -> dict[str, Any] | None:
        incidents = happened(cluster, task)
        done = len(incidents) >= number and incidents[number - 1]["outcome"]
        return incidents[number - 1] if done else None

    return dict(eventually(found))
