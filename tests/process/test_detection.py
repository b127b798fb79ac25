"""What a live cluster says of a rank that is slow, held, ended by C++, or stands still: real processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import end, eventually
from unicron.coordinator.job import Job
from unicron.runtime import processes
from unicron.runtime.local_cluster import LocalCluster
from unicron.types import Layout

WORKER = Path(__file__).resolve().parents[2] / "bench" / "detection_worker.py"
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    cluster = LocalCluster(3, 1, 1, imports="unicron._core", log_dir=tmp_path_factory.mktemp("daemons"))
    cluster.start()
    yield cluster
    end(cluster)


@pytest.fixture
def task(cluster: LocalCluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Three ranks that compute 4 x 10 ms and wait for each other; the parameter: further fields of its job."""
    name = cluster.submit(
        Job(
            name=request.node.name.partition("[")[0], command=(sys.executable, str(WORKER), str(tmp_path), "10"),
            layout=Layout(dp=3, num_micro_batches=12), log_dir=str(tmp_path), stop_grace_ms=0,
            **getattr(request, "param", {}),
        )
    )  # fmt: skip
    eventually(lambda: moving(cluster, name, 60), 60)
    yield name
    cluster.cancel(name)
    eventually(lambda: cluster.workers(name) == [])


def moving(cluster: LocalCluster, task: str, iteration: int) -> bool:
    view = cluster.task(task)
    members = [w for w in view["workers"] if w["is_member"]]
    return view["phase"] == "running" and len(members) == 3 and min(w["iteration"] for w in members) >= iteration


def incident(cluster: LocalCluster, task: str, fault: str, seconds: float = 20.0) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        return next((i for i in cluster.incidents(task) if i["fault"] == fault), None)

    return dict(eventually(found, seconds))


@pytest.mark.parametrize("task", [{"env": {"SLOWER": "1.5"}}], indirect=True)
def test_a_slow_rank_is_named_and_left_alone(cluster: LocalCluster, task: str) -> None:
    """Half again as slow: ten percent are the bench's, on a machine that has nothing else to do."""
    victim = cluster.member(task, 1)
    os.kill(victim.pid, signal.SIGUSR1)
    slow = incident(cluster, task, "slow", 40)
    assert (slow["root"]["rank"], slow["severity"], slow["outcome"]) == (1, "INFO", "unaffected")
    assert "rank 1 computes" in slow["cause"] and "longer than its peers" in slow["cause"]
    assert cluster.member(task, 1) == victim


def test_a_debugger_is_respected_and_said(cluster: LocalCluster, task: str) -> None:
    victim = cluster.member(task, 1)
    if libc.ptrace(PTRACE_SEIZE, victim.pid, None, None) != 0:
        pytest.skip(f"this machine lets nobody attach: {os.strerror(ctypes.get_errno())}")
    assert libc.ptrace(PTRACE_INTERRUPT, victim.pid, None, None) == 0
    os.waitpid(victim.pid, os.WUNTRACED | 0x40000000)  # __WALL
    held = incident(cluster, task, "held")
    assert f"a debugger (pid {os.getpid()}) is attached" in held["cause"] and held["severity"] == "INFO"
    assert libc.ptrace(PTRACE_DETACH, victim.pid, None, None) == 0
    eventually(lambda: "runs again" in incident(cluster, task, "held")["timeline"][-1][1])
    assert processes.is_alive(victim.pid) and cluster.member(task, 1) == victim


def test_a_cpp_exception_is_quoted_and_classified(cluster: LocalCluster, task: str) -> None:
    cluster.arm_fault(task, 1, "abort", "compute")
    lost = incident(cluster, task, "worker lost")
    assert lost["root"]["rank"] == 1
    eventually(lambda: incident(cluster, task, "worker lost")["rule"])
    lost = incident(cluster, task, "worker lost")
    assert "std::terminate was called" in lost["text"] and "Fatal Python error: Aborted" in lost["text"]
    assert (lost["cause"], lost["category"]) == ("signal 6", "exited_abnormally")


@pytest.mark.parametrize("task", [{"observe_only": True}], indirect=True)
def test_observe_only_ends_nobody(cluster: LocalCluster, task: str) -> None:
    """A deadlock with the GIL held; the task is as it was, and the incident says what would have been done."""
    victim = cluster.member(task, 1)
    cluster.arm_fault(task, 1, "gil", "compute")
    stalled = incident(cluster, task, "stalled")
    assert stalled["severity"] == "INFO" and f"observed only: {victim.worker} would have been ended" in stalled["cause"]
    assert processes.is_alive(victim.pid)
