"""Clusters for the process tests. Each must leave nothing behind, and this is asserted for every
one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusters import end, make_cluster
from unicron.runtime.local_cluster import LocalCluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One after the other, in one process, when tests run side by side: each needs the machine to itself. But for
    Slurm's, which mostly wait for Slurm. (xdist 3.8 writes groups where pytest 9.2 does not read them: with these two
    the groups have no effect yet, and two of these tests may run at a time.)"""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("slurm" if item.path.stem == "test_slurm" else "processes"))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """Two nodes, one slot and one understudy each."""
    descriptors = len(os.listdir("/proc/self/fd"))
    cluster = make_cluster(tmp_path)
    try:
        cluster.start(30)
        yield cluster
    finally:
        end(cluster)
    # ZeroMQ keeps its context's descriptors; nothing grows with every cluster.
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
