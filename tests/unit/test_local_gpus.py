"""Which GPUs the nodes of a local cluster get: each its own, whatever the machine or its user leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.runtime.local_cluster import LocalCluster


def gpus(monkeypatch: pytest.MonkeyPatch, there: int, slots: int, named: str | None) -> list[str | None]:
    """Of two nodes."""
    names = [*(f"nvidia{number}" for number in range(there)), "nvidiactl"]
    monkeypatch.setattr(Path, "glob", lambda *_: [Path("/dev") / name for name in names])
    cluster = LocalCluster.__new__(LocalCluster)
    cluster.nodes, cluster._slots = ("n0", "n1"), slots
    cluster._environment = {} if named is None else {"CUDA_VISIBLE_DEVICES": named}
    return [cluster._gpus_of(node).get("CUDA_VISIBLE_DEVICES") for node in ("n0", "n1")]


def test_nodes_of_one_machine_share_out_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus(monkeypatch, 2, 1, None) == ["0", "1"]
    assert gpus(monkeypatch, 4, 2, None) == ["0,1", "2,3"]
    assert gpus(monkeypatch, 1, 1, None) == ["0", "0"]
    assert gpus(monkeypatch, 0, 1, None) == [None, None]


def test_only_those_that_are_named_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus(monkeypatch, 8, 1, "3,5") == ["3", "5"]
    assert gpus(monkeypatch, 8, 1, "3") == [None, None], "as it is: all see that one"
    assert gpus(monkeypatch, 8, 1, "") == [None, None]
