"""Real daemons: beats are heard, a frozen coordinator calls nobody silent, checks come before a node is used."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from clusters import closed_incident, end, eventually, happened, plain_job, running
from unicron.coordinator.config import CoordinatorConfig
from unicron.runtime.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(120)


def nodes(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    return {row["node"]: row for row in cluster.ask("nodes")}


def hearing(cluster: LocalCluster, node: str) -> str:
    return str(nodes(cluster)[node]["hearing"])


def test_who_beats_is_heard_and_nobody_is_lost_by_a_freeze(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=100_000))
    running(cluster, task)
    for node in cluster.nodes:
        eventually(lambda node=node: hearing(cluster, node) == "heard", 30)

    coordinator = cluster.coordinator_pid
    os.kill(coordinator, signal.SIGSTOP)
    time.sleep(4.0)  # four times what makes a node silent
    os.kill(coordinator, signal.SIGCONT)
    time.sleep(1.0)
    assert {row["phase"] for row in nodes(cluster).values()} == {"up"} and not happened(cluster, task)

    agent = cluster.agent_pid("n1")
    os.kill(agent, signal.SIGSTOP)
    try:
        eventually(lambda: nodes(cluster)["n1"]["phase"] == "suspect", 30)
        assert hearing(cluster, "n1") == "silent" and not happened(cluster, task)
    finally:
        os.kill(agent, signal.SIGCONT)
    eventually(lambda: nodes(cluster)["n1"]["phase"] == "up" and hearing(cluster, "n1") == "heard", 30)

    cluster.kill_agent_alone("n1")  # and a death is a death at once
    assert closed_incident(cluster, task)["fault"] == "node lost"


def test_checks_come_before_a_node_is_used_and_after_its_incidents(tmp_path: Path) -> None:
    cluster = LocalCluster(
        1, 2, 1, imports="unicron._core", log_dir=tmp_path / "daemons", checks=True,
        coordinator=CoordinatorConfig(check_delay_ms=10.0),
    )  # fmt: skip
    try:
        cluster.start(30)
        assert "checks have not ended" in nodes(cluster)["n0"]["why"]
        task = cluster.submit(plain_job("t", tmp_path, iterations=100_000))
        assert not cluster.task(task)["workers"]
        eventually(lambda: not nodes(cluster)["n0"]["why"], 60)
        row = nodes(cluster)["n0"]
        assert row["checks"]["shared_memory"].startswith("ok") and row["checks"]["gpu_product"].startswith("unknown")
        eventually(lambda: cluster.task(task)["phase"] == "running", 30)
        os.kill(cluster.member(task, 1).pid, signal.SIGSEGV)
        heavy = "unknown: not while workers run here"
        eventually(lambda: nodes(cluster)["n0"]["checks"]["gpu_product"] == heavy, 60)
        assert not nodes(cluster)["n0"]["why"]
    finally:
        end(cluster)
