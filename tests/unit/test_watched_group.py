"""Waits in gloo end whatever becomes of the peer: real gloo, a real process at the other end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unicron import _core
from unicron.training.watched_group import COLLECTIVE_TIMEOUT, Helpers, LostOperation, WatchedGroup

SENDS_MAX = 8
LARGE = 16 << 20  # bytes; more than fits into the buffers of a socket, so the operation is under way for long

PEER = f"""
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
store = dist.FileStore(sys.argv[1], 2)
group = dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=30))
tensor = torch.ones({LARGE}, dtype=torch.uint8)
what = sys.argv[2]
if what == "receive":  # says that it is ready, and reads nothing more when it is stopped
    group.recv([tensor], 0, 0)
elif what == "allreduce":
    group.allreduce([tensor], dist.AllreduceOptions())
elif what == "answer":
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    group.recv([tensor], 0, 0).wait()
    group.send([tensor + 1], 0, 0).wait()
    sys.exit()
os.kill(os.getpid(), signal.SIGSTOP)
"""


class Pair:
    """Rank 0 of two; rank 1 is another process that stops half-way."""

    def __init__(self, folder: Path, what: str) -> None:
        path = str(folder / "store")
        self.peer = subprocess.Popen([sys.executable, "-c", PEER, path, what], stdin=subprocess.DEVNULL)
        before = set(_core.connected_sockets())
        backend = dist.ProcessGroupGloo(dist.FileStore(path, 2), 0, 2, timedelta(seconds=30))
        backend._set_default_timeout(COLLECTIVE_TIMEOUT)
        sockets = [each for each in _core.connected_sockets() if each not in before]
        agent, worker = socket.socketpair()
        self._agent = agent
        self._pages = _core.create_pulse_pages(1)
        self.pulse = _core.PulsePage(self._pages, 0)
        self.monitor = _core.WorkerMonitor(worker.detach(), self.pulse)
        self.monitor.register_group(1, sockets, [0, 1], True)
        self.group = WatchedGroup(backend, Helpers(), lambda: self.monitor.group_state(1), self.pulse)

    def wait_stopped(self) -> None:
        deadline = time.monotonic() + 20
        while _core.process_state(self.peer.pid) != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.peer.pid, signal.SIGKILL)
        self.peer.wait(10)
        self.monitor.close()
        self._agent.close()
        os.close(self._pages)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Pair]]:
    pairs: list[Pair] = []

    def make_one(what: str) -> Pair:
        folder = tmp_path / str(len(pairs))
        folder.mkdir()
        pairs.append(Pair(folder, what))
        return pairs[-1]

    yield make_one
    for pair in pairs:
        pair.close()


def tensor() -> torch.Tensor:
    return torch.ones(LARGE, dtype=torch.uint8)


def under_way(pair: Pair, what: str) -> Any:
    """An operation that fills the socket and does not end. Its peer is stopped before it is begun: one that is stopped
    a little later may have read everything."""
    pair.wait_stopped()
    if what == "receive":
        work = pair.group.send([tensor()], 1, 0)
    else:
        work = pair.group.allreduce([tensor()], dist.AllreduceOptions())
    time.sleep(0.1)
    return work


def kept_for_ever(pair: Pair) -> WatchedGroup:
    """A lost operation's group must not be destroyed (its destructor waits): give it one more reference."""
    import ctypes

    ctypes.pythonapi.Py_IncRef(ctypes.py_object(pair.group))
    return pair.group


@pytest.mark.parametrize("what", ["receive", "allreduce"])
def test_an_operation_under_way_to_a_peer_that_dies(make: Callable[[str], Pair], what: str) -> None:
    pair = make(what)
    group = kept_for_ever(pair)
    work = under_way(pair, what)
    begun = time.monotonic()
    pair.peer.kill()
    with pytest.raises(RuntimeError, match="gloo"):
        work.wait()
    assert time.monotonic() - begun < 10
    assert isinstance(group.lost, str)


@pytest.mark.parametrize("what", ["receive", "allreduce"])
def test_an_operation_under_way_when_the_group_is_shut(make: Callable[[str], Pair], what: str) -> None:
    pair = make(what)
    group = kept_for_ever(pair)
    work = under_way(pair, what)
    assert pair.monitor.shut_groups([0]) == 1
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="gloo"):
        work.wait()
    assert time.monotonic() - begun < 5
    with pytest.raises(RuntimeError):  # and nothing new is begun on it
        group.allreduce([tensor()], dist.AllreduceOptions()).wait()


def small(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


#: What Megatron's tensor parallelism and unicron use, by the names that a process group has for it.
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda group: group.allreduce([small()], dist.AllreduceOptions()),
    "broadcast": lambda group: group.broadcast([small()], dist.BroadcastOptions()),
    "allgather": lambda group: group.allgather([[small(), small()]], [small()], c10d.AllgatherOptions()),
    "_allgather_base": lambda group: group._allgather_base(small(8), small(), c10d.AllgatherOptions()),
    "reduce_scatter": lambda group: group.reduce_scatter([small()], [[small(), small()]], dist.ReduceScatterOptions()),
    "_reduce_scatter_base": lambda group: group._reduce_scatter_base(small(), small(8), dist.ReduceScatterOptions()),
    "alltoall_base": lambda group: group.alltoall_base(small(), small(), [], [], dist.AllToAllOptions()),
    "barrier": lambda group: group.barrier(dist.BarrierOptions()),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_is_given_up_that_gloo_does_not_end(make: Callable[[str], Pair], name: str) -> None:
    """The work of gloo's reduce_scatter heeds no time: a rank with sequence parallelism waited half an hour."""
    pair = make("receive")  # who takes no part in it, and does not die
    group = WatchedGroup(pair.group.backend, Helpers(), lambda: "shut", pair.pulse)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            COLLECTIVES[name](group).wait()
        except BaseException as error:
            caught.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    waiter.join(10)
    kept_for_ever(pair)
    assert [type(error) for error in caught] == [LostOperation]
    assert name in group.lost


def ending(pair: Pair, work: Any) -> str:
    """What waiting for a send says; '' when it was sent."""
    group = WatchedGroup(pair.group.backend, Helpers(), lambda: pair.monitor.group_state(1), pair.pulse)
    try:
        group.wait_uncut(work, "send")
    except LostOperation as problem:
        assert group.lost
        return str(problem)
    except RuntimeError as problem:
        return str(problem)
    return ""


def test_gloo_still_loses_a_send_under_way(make: Callable[[str], Pair]) -> None:
    """Not always. When this fails, gloo was mended and watched_group.py can go."""
    for _ in range(SENDS_MAX):
        pair = make("receive")
        kept_for_ever(pair)
        pair.wait_stopped()
        work = pair.group.backend.send([tensor()], 1, 0)
        time.sleep(0.1)
        pair.monitor.shut_groups([0])
        if "send does not end although the group is shut" in ending(pair, work):
            return
    pytest.fail(f"none of {SENDS_MAX} sends under way was lost")


@pytest.mark.parametrize("what", ["receive", "allreduce"])
def test_who_waits_for_another_says_so(make: Callable[[str], Pair], what: str) -> None:
    pair = make(what)
    kept_for_ever(pair)
    work = under_way(pair, what)

    def wait() -> None:
        with pytest.raises(RuntimeError):
            work.wait()

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    time.sleep(0.2)
    assert pair.pulse.waiting
    pair.monitor.shut_groups([0])
    waiter.join(10)
    assert not waiter.is_alive() and not pair.pulse.waiting


def test_results_are_those_of_gloo(make: Callable[[str], Pair]) -> None:
    pair = make("answer")
    mine = tensor()
    assert pair.group.allreduce([mine], dist.AllreduceOptions()).wait()
    assert mine.tolist()[:3] == [2, 2, 2]
    assert pair.group.send([mine], 1, 0).wait()
    got = tensor()
    pair.group.recv([got], 1, 0).wait()
    assert got.tolist()[:3] == [3, 3, 3]
    assert not pair.group.lost


def test_a_helper_left_behind_is_replaced() -> None:
    helpers = Helpers()
    assert helpers.call(lambda: 1, lambda _: None) == 1
    with pytest.raises(ZeroDivisionError):
        helpers.call(lambda: 1 / 0, lambda _: None)

    def give_up(seconds: float) -> None:
        raise LostOperation(f"after {seconds}")

    with pytest.raises(LostOperation):
        helpers.call(lambda: time.sleep(10), give_up)
    begun = time.monotonic()
    assert helpers.call(lambda: 2, lambda _: None) == 2
    assert time.monotonic() - begun < 9
