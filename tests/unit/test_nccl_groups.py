"""NCCL groups without GPUs: torch's backend is gloo's with a communicator of the fault injector (tests/fakes)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes import run

# Torch's own NCCL would be found in the place of the injector.
pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has NCCL; tests/gpu is for that")

PREPARE = """
    import os, socket, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    class Options:
        _timeout = None

    class Backend(dist.ProcessGroupGloo):
        aborted = []
        Options = Options

        def __init__(self, store, rank, size, options):
            super().__init__(store, rank, size, timedelta(seconds=5))
            self.communicator = _core.NcclCommunicator(0, 2, 0, _core.make_nccl_id())

        def _comm_ptr(self):
            return self.communicator.handle

        def abort(self):
            Backend.aborted.append(self)

    dist.ProcessGroupNCCL = Backend
    torch.cuda.set_device = lambda device: None
    zeros = torch.zeros
    torch.zeros = lambda *size, **words: zeros(*size)
    from unicron.training.nccl_groups import NcclGroups
    from unicron.training.watched_group import Helpers, LostOperation

    page = _core.PulsePage(_core.create_pulse_pages(1), 0)
    ours, theirs = socket.socketpair()
    monitor = _core.WorkerMonitor(ours.detach(), page)
    groups = NcclGroups(monitor, 0, Helpers())
    made = [groups.connect(dist.HashStore(), f"g{n}", 0, 1, lambda seconds: None) for n in range(3)]
    for number, (group, backend) in enumerate(made):
        groups.register(number, backend, [number, 7], number == 2)
    groups.require_whole(range(3))
"""


def test_a_plan_ends_groups_and_who_used_them_finds_out(tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.touch()
    run(
        PREPARE
        + """
    assert monitor.shut_groups([1]) == 2  # the one that holds rank 1, and the one that spans replicas
    groups.require_whole([0])
    for number in (1, 2):
        try:
            groups.require_whole([number])
        except LostOperation as error:
            assert "ending" in str(error) or "ended" in str(error), error
        else:
            raise AssertionError(number)
    for number in (1, 2):
        groups.retire(number)
    groups.release()
    assert not Backend.aborted  # in the background, after NCCL's own ending
    os.unlink(os.environ["FAKE_NCCL_HELD_BY"])
    begun = time.monotonic()
    while len(Backend.aborted) < 2 and time.monotonic() - begun < 30:
        time.sleep(0.01)
    assert len(Backend.aborted) == 2
    groups.close(30)
    assert len(Backend.aborted) == 3
    os._exit(0)
""",
        FAKE_NCCL_HELD_BY=str(held),
    )


def test_a_group_that_does_not_connect_is_given_up() -> None:
    run(
        PREPARE
        + """
    class Never(Backend):
        def __init__(self, store, rank, size, options):
            time.sleep(30)

    dist.ProcessGroupNCCL = Never

    def check(seconds):
        if seconds > 0.1:
            raise InterruptedError("a newer epoch")

    begun = time.monotonic()
    try:
        groups.connect(dist.HashStore(), "never", 0, 2, check)
    except InterruptedError:
        pass
    assert time.monotonic() - begun < 20
    os._exit(0)
"""
    )


def test_calls_that_an_ended_group_left_open_are_closed() -> None:
    """torch leaves ncclGroupStart open when a coalesced send raises; what the thread began then was never launched."""
    run(
        PREPARE
        + """
    import ctypes

    nccl = ctypes.CDLL("libnccl.so.2")
    NOT_IN_A_GROUP = 5
    groups.close_calls()  # nothing is open
    assert nccl.ncclGroupEnd() == NOT_IN_A_GROUP
    for depth in (1, 2):
        for _ in range(depth):
            nccl.ncclGroupStart()
        groups.close_calls()
        assert nccl.ncclGroupEnd() == NOT_IN_A_GROUP, depth
    """
    )
