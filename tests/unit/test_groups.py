"""Groups of an epoch, made in the middle of failures."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch.distributed as dist

from unicron import _core
from unicron.training.engine import is_collective_error
from unicron.training.groups import GroupInterrupted, Groups
from unicron.types import EpochPlan, Layout, Member, PlanKind

LAYOUT = Layout(dp=2, num_micro_batches=2)


def plan() -> EpochPlan:
    members = tuple(Member(rank, f"n{rank}", f"n{rank}.w0", 1) for rank in range(2))
    return EpochPlan("t", 1, PlanKind.START, LAYOUT, (0, 1), members, store="")


def test_a_member_that_dies_just_after_its_group_was_made_breaks_a_collective_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo had closed the socket before the monitor was told of it: the survivor's script ended with an exception."""
    pulse = _core.PulsePage(_core.create_pulse_pages(1), 0)
    agent, worker = socket.socketpair()
    monitor = _core.WorkerMonitor(worker.detach(), pulse)
    groups = Groups(0, LAYOUT, monitor, pulse)
    backend = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    closed = os.dup(0)
    os.close(closed)
    monkeypatch.setattr(groups, "connect", lambda *_: (backend, [(closed, 1)]))
    store: Any = dist.HashStore()
    with pytest.raises(GroupInterrupted, match="ended before it was used") as caught:
        groups._make_gloo(plan(), (0, 1), (0, 1), store, "e1:0-1", 1)
    assert is_collective_error(caught.value)
    groups.release_retired()
    monitor.close()
    agent.close()
