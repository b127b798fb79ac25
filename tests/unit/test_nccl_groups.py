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


BESIDE = """
    import contextlib, threading
    dist.ProcessGroupNCCL = Backend
    from unicron.training.groups import GroupInterrupted, Groups
    from unicron.training.nccl_groups import NcclGroups
    from unicron.types import EpochPlan, Layout, Member, PlanKind

    NcclGroups.beside = contextlib.contextmanager(lambda self: (yield lambda: True))
    LAYOUT = Layout(dp=2, num_micro_batches=2)
    old, new = (
        EpochPlan("t", epoch, PlanKind.START, LAYOUT, (0, 1),
                  tuple(Member(rank, f"n{rank}", f"n{rank}.w{epoch}", 1) for rank in range(2)), store="")
        for epoch in (1, 2)
    )
    store = dist.HashStore()
    fine = Helpers, lambda seconds: None

    class Rank:
        def __init__(self, rank):
            self.page = _core.PulsePage(_core.create_pulse_pages(1), 0)
            self.ours, theirs = socket.socketpair()
            self.monitor = _core.WorkerMonitor(theirs.detach(), self.page)
            self.groups = Groups(rank, LAYOUT, self.monitor, self.page, 0)
            self.groups._lists = [(0, 1)]

        def prepare(self, check=lambda seconds: None):
            try:
                self.count = self.groups.prepare(new, store, (Helpers(), check))
            except InterruptedError as error:
                self.count = error

    ranks = [Rank(0), Rank(1)]

    def everybody(what):
        threads = [threading.Thread(target=what, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def eventually(is_so):
        begun = time.monotonic()
        while not is_so() and time.monotonic() - begun < 30:
            time.sleep(0.01)
        assert is_so()
"""


def test_groups_of_an_announced_plan_stand_beside_those_in_use() -> None:
    """The arrival of their plan ends what is in use, and not them; from then on the next plan ends them, too."""
    run(
        PREPARE
        + BESIDE
        + """
    everybody(lambda rank: rank.prepare())
    assert [rank.count for rank in ranks] == [1, 1]
    first = ranks[0]
    assert first.monitor.shut_groups([1]) == 0, "in no table yet"
    prepared = first.groups._prepared[(0, 1)][1]

    def switch(rank):
        rank.groups._make(new, (0, 1), (0, 1), lambda name: store, world=False)

    everybody(switch)
    assert not first.groups._prepared and not Backend.aborted
    number = first.groups._ids[(0, 1)]
    assert first.groups._nccl._backends[number] is prepared, "made before, and not at the switch"
    first.groups._nccl.require_whole([number])
    first.groups.drop_prepared()  # the move is over: nothing of it is left to drop
    assert first.monitor.shut_groups([1]) == 1
    os._exit(0)
"""
    )


def test_what_was_prepared_for_a_move_that_is_called_off_is_taken_apart() -> None:
    run(
        PREPARE
        + BESIDE
        + """
    everybody(lambda rank: rank.prepare())
    for rank in ranks:
        rank.groups.drop_prepared(old)
    assert ranks[0].groups._prepared and not Backend.aborted, "of another plan"
    for rank in ranks:
        rank.groups.drop_prepared(new)
    eventually(lambda: len(Backend.aborted) == 2)

    def check(seconds):
        raise InterruptedError("a newer epoch")

    store = dist.HashStore()
    everybody(lambda rank: rank.prepare(check))
    assert all(isinstance(rank.count, InterruptedError) for rank in ranks)
    assert not ranks[0].groups._prepared
    eventually(lambda: len(Backend.aborted) >= 4)
    os._exit(0)
"""
    )


def test_state_goes_from_leaver_to_joiner_and_an_epoch_ends_it() -> None:
    run(
        PREPARE
        + BESIDE
        + """
    pairs = {}

    def connect(rank):
        rank.groups.rank = 1  # leaver and joiner of one role
        place = ranks.index(rank)
        pairs[place] = rank.groups.connect_pair(store, place, (Helpers(), lambda seconds: None), lambda: False)
        pairs[place]._nccl.place = torch.device("cpu")

    everybody(connect)
    given = [torch.arange(10), torch.ones(3)]
    taken = [torch.empty_like(piece) for piece in given]
    everybody(lambda rank: pairs[0].give(given) if rank is ranks[0] else pairs[1].take(taken))
    assert all(torch.equal(a, b) for a, b in zip(given, taken, strict=True))
    assert ranks[0].monitor.shut_groups([]) == 1, "whatever the epoch, the pair is of no use any more"
    try:
        pairs[0]._settle(lambda: True)
    except LostOperation:
        pass
    else:
        raise AssertionError("what an epoch ended is no result")
    for pair in pairs.values():
        pair.close()
        pair.close()
    eventually(lambda: len(Backend.aborted) == 2)
    os._exit(0)
"""
    )
