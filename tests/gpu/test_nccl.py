"""Collectives whose peer is dead end when the table says so, and the survivor's context is healthy."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from gpu_roles import Role, role

# torch's watchdog must not end a process whose communicator unicron revoked (training/nccl_environment).
TORCH_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def pass_ids(first: Role, second: Role, count: int) -> None:
    """The first rank makes each communicator's id; both get it."""
    for _ in range(count):
        identity = first.line.receive(90)[0]
        second.line.receive(90)
        for each in (first, second):
            each.line.send(identity)


def test_twelve_communicators_end_at_once(two_gpus: None) -> None:
    with (
        role("rank_of_twelve", rank=0, num_groups=12, die=False) as survivor,
        role("rank_of_twelve", rank=1, num_groups=12, die=True) as victim,
    ):
        pass_ids(survivor, victim, 12)
        survivor.line.receive(90)
        victim.line.receive(90)
        victim.line.send({})
        assert victim.wait_gone(30)
        survivor.line.send({})
        seen: dict[str, Any] = survivor.line.receive(90)[0]
        print(seen)
        assert seen["all_ended"] and seen["states"] == ["ended"] and seen["healthy"]
        assert seen["stream_free_ms"] and seen["stream_free_ms"][0] <= 10
        assert seen["all_ms"] <= 2000 and seen["called_ms"] <= 10


def test_a_communicator_shrinks_under_a_hung_collective(two_gpus: None) -> None:
    with role("shrinker", rank=0) as survivor, role("shrinker", rank=1) as victim:
        pass_ids(survivor, victim, 1)
        for each in (survivor, victim):
            each.line.receive(90)
        victim.line.send({})
        assert victim.wait_gone(30)
        survivor.line.send({})
        seen = survivor.line.receive(90)[0]
        print(seen)
        assert seen["num_ranks"] == 1 and seen["sum"] == 3.0


def test_torchs_groups_are_revoked_and_replaced(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCH_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with role("torch_rank", rank=0, port=port) as survivor, role("torch_rank", rank=1, port=port) as victim:
        for each in (survivor, victim):
            each.line.receive(90)
        assert victim.wait_gone(30)
        survivor.line.send({})
        seen = survivor.line.receive(90)[0]
        print(seen)
        assert seen["ended"] and seen["states"] == ["ended"] * 3 and seen["sum"] == 5.0
        assert seen["stream_free_ms"] <= 10


def test_the_library_that_torch_loads_is_found() -> None:
    import subprocess
    import sys

    program = "import torch; from unicron import _core; print(_core.nccl_version(), *_core.nccl_missing())"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, env=dict(os.environ))
    print(result.stdout)
    assert result.returncode == 0 and int(result.stdout.split()[0]) >= 22700, result.stderr
