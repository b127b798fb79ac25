"""A node of the next version in a cluster of this one, and the way there: its task trains on, and loses nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import unicron
from clusters import end, eventually, make_cluster, plain_job, running
from unicron.messages import PROTOCOL_VERSION
from unicron.runtime.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(120)


def next_version(folder: Path) -> Path:
    """This package as a later release may be: another number, and more in a message that agents send all the time."""
    source = Path(unicron.__file__).parent
    shutil.copytree(source, folder / "unicron", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "unicron" / "messages.py"
    text = path.read_text()
    newer = text.replace(f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n", f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}\n")
    newer = newer.replace("    loss: float | None", "    temperature_c: float = 40.5\n    loss: float | None")
    assert newer.count("temperature_c") == 1 and len(newer) > len(text)
    path.write_text(newer)
    return folder


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    made = make_cluster(tmp_path)
    try:
        made.start(60)
        yield made
    finally:
        end(made)


def test_a_cluster_is_upgraded_node_by_node(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=1_000_000, replicas_min=1))
    running(cluster, task)

    def width() -> int:
        return sum(w["is_member"] and w["phase"] == "ready" for w in cluster.task(task)["workers"])

    cluster._environment = {**cluster._environment, "PYTHONPATH": f"{next_version(tmp_path / 'next')}"}
    cluster.kill_coordinator()
    cluster.start_coordinator()
    cluster.wait_for_nodes(30)
    for node in ("n0", "n1"):
        cluster.ask("drain", node=node)
        eventually(partial(is_empty, cluster, node), 30)
        cluster._terminate((node,))
        cluster.start_agent(node)
        cluster.wait_for_nodes(30)
        cluster.ask("undrain", node=node)
        eventually(lambda: width() == 2 and cluster.task(task)["phase"] == "running", 30)
    view = cluster.task(task)
    assert view["phase"] == "running" and view["epoch"] > 1
    assert [i for i in cluster.incidents(task) if i["iterations_lost"] or i["severity"] not in ("INFO",)] == []
    assert "UnknownVersion" not in (cluster.log_dir / "coordinator.log").read_text()


def is_empty(cluster: LocalCluster, node: str) -> bool:
    return not next(n for n in cluster.ask("nodes") if n["node"] == node)["used"]
