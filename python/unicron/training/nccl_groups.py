"""NCCL groups whose hung collectives the native monitor ends, whoever holds the GIL.

A collective on a GPU returns before it has run, and one that was ended returns as if it had: `require_whole` says,
after a synchronisation, whether what the last collectives left is good. NCCL itself does not say that a peer is dead
(MECHANICS 4.1); a plan's arrival ends the groups that it makes useless (csrc/monitor/nccl_table.h), and then this
worker finds out here.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from unicron import _core
from unicron.training.watched_group import COLLECTIVE_TIMEOUT, Check, Helpers, LostOperation

FORGET_MS_MAX = 15_000  # the table's own bound of an ending, and half of it again
FIRST_S_MAX = 10.0  # of a first collective whose members have all found each other
POLL_S = 0.001


class _Making:
    """A group on its way. Who gives it up may be ahead of the thread that makes it."""

    backend: Any = None
    is_given_up = False


class NcclGroups:
    """Makes this worker's groups on one GPU and knows which of them were ended."""

    def __init__(self, monitor: Any, device: int, helpers: Helpers) -> None:
        self.device, self.place = device, torch.device("cuda", device)
        self._table = _core.NcclTable()
        monitor.attach_nccl(self._table)
        self._helpers = helpers
        self._backends: dict[int, Any] = {}  # torch's backend of each group, by the group's number
        self._retired: list[Any] = []

    def connect(self, store: dist.Store, name: str, rank: int, size: int, check: Check) -> tuple[Any, Any]:
        """(group, its backend). Waits for all members; check(seconds) may end that wait."""
        backend = self._helpers.call(lambda: self._backend(store, name, rank, size), check)
        return self._wrap(backend), backend

    def _backend(self, store: dist.Store, name: str, rank: int, size: int) -> Any:
        backend = self._unconnected(store, name, rank, size)
        # The first collective connects, and what it costs is not paid inside an iteration.
        backend.allreduce([torch.zeros(1, device=self.place)]).wait()
        return backend

    def _unconnected(self, store: dist.Store, name: str, rank: int, size: int) -> Any:
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        backend = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)
        backend._set_sequence_number_for_group()
        return backend

    # ------------------------------------------------------------ beside training

    def connect_beside(
        self, store: dist.Store, name: str, rank: int, size: int, helpers: Helpers, check: Check
    ) -> tuple[Any, Any]:
        """(group, its backend), while training's collectives run; from any thread, one group after the other, in the
        same order by everybody. No table knows it yet: no epoch ends it, and who does not use it must discard it.

        Its first collective is a kernel that waits for its peers on the GPU, and so are training's. They cannot wait
        for one another in a ring, whatever order a rank launches them in:
        1. Neither is behind the other: this one has a stream of its own. On training's it would be a deadlock (A's
           training behind A's connecting kernel, which waits for B's, which is behind B's training, which waits for
           A's). Of high priority, because torch deals out its 32 usual streams in turn, and training has some.
        2. Neither thread waits for the other's: every rank launches both, sooner or later.
        3. Both fit on the GPU. A waiting kernel holds a block per channel (one or two for so few bytes, 32 for the
           largest) of over a hundred multiprocessors, and of its kind there is one at a time.
        Who synchronises the device meanwhile waits for this kernel, too: for milliseconds, because it is launched when
        all members have found each other. If one dies just then it hangs, and training with it, until FIRST_S_MAX.

        Rejected: eager_connect_single_device, which makes the communicator without a kernel. The connections would be
        made by the first collective after the switch: 140 ms a group, in the iteration for which all wait.
        """
        making = _Making()
        try:
            helpers.call(lambda: self._make_beside(making, store, name, rank, size), check)
        except BaseException:
            making.is_given_up = True
            self.discard([making.backend])
            raise
        return self._wrap(making.backend), making.backend

    def _make_beside(self, making: _Making, store: dist.Store, name: str, rank: int, size: int) -> None:
        backend = making.backend = self._unconnected(store, name, rank, size)
        with self.beside() as has_ended:
            one, options = torch.zeros(1, device=self.place), dist.AllreduceOptions()
            begin_here(options, lambda: backend.allreduce([one], options))
            deadline = time.monotonic() + FIRST_S_MAX
            while not has_ended() and not making.is_given_up:
                if time.monotonic() > deadline:
                    raise LostOperation(f"NCCL group {name} found its members and did not connect in {FIRST_S_MAX:g} s")
                time.sleep(POLL_S)
        if making.is_given_up:
            self.discard([backend])

    @contextlib.contextmanager
    def beside(self) -> Iterator[Callable[[], bool]]:
        """A stream for which training does not wait, nor it for training. Gives: has all ended that was begun here?"""
        torch.cuda.set_device(self.device)
        stream = torch.cuda.Stream(self.device, priority=-1)
        with torch.cuda.stream(stream):
            yield stream.query

    def discard(self, backends: Iterable[Any]) -> None:
        """Take apart, in the background, what was never registered."""
        for backend in backends:
            if backend is not None:
                _aside(self._end, backend)

    def _end(self, backend: Any) -> None:
        torch.cuda.set_device(self.device)
        backend.abort()

    # ------------------------------------------------------------ their life

    def _wrap(self, backend: Any) -> Any:
        group = dist.ProcessGroup(backend.rank(), backend.size())
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        return group

    def alone(self) -> Any:
        """The group of this worker by itself; also pays for NCCL's first communicator."""
        return self._wrap(self._backend(dist.HashStore(), "alone", 0, 1))

    def register(self, number: int, backend: Any, ranks: Iterable[int], cross: bool) -> None:
        torch.cuda.set_device(self.device)  # torch looks the communicator up by this thread's device
        self._table.register_torch(number, backend._comm_ptr(), self.device, list(ranks), cross)
        self._backends[number] = backend

    def require_whole(self, numbers: Iterable[int]) -> None:
        """After a synchronisation: raises LostOperation if one of these groups was ended."""
        for number in numbers:
            state = self._table.state(number)
            if state != "whole":
                raise LostOperation(f"NCCL group {number} is {state}: {self._table.error(number) or 'by a plan'}")

    def close_calls(self) -> None:
        """After an operation that raised. torch coalesces a pipeline's sends and receives between ncclGroupStart and
        ncclGroupEnd, and one that raises there (its communicator was ended) leaves that open: whatever this thread
        begins from then on is queued and never launched."""
        _core.close_nccl_group_calls()

    def retire(self, number: int) -> None:
        """Nobody uses it any more. It is taken apart by release(), because that takes half a second."""
        backend = self._backends.pop(number, None)
        if backend is not None:
            self._retired.append((number, backend))

    def drop(self, number: int) -> None:
        """A registered one that nobody uses any more, in the background."""
        backend = self._backends.pop(number, None)
        if backend is not None:
            _aside(self._abort, number, backend)

    def release(self) -> None:
        """Take the retired ones apart, in the background and all at once."""
        going, self._retired = self._retired, []
        for number, backend in going:
            _aside(self._abort, number, backend)

    def close(self, timeout_s: float, unregistered: Iterable[Any] = ()) -> None:
        """Take all of them apart: a process that ends with communicators waits for them in a destructor."""
        for number in list(self._backends):
            self.retire(number)
        going, self._retired = self._retired, []
        threads = [_aside(self._abort, *each) for each in going] + [_aside(self._end, each) for each in unregistered]
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _abort(self, number: int, backend: Any) -> None:
        # Not while a native thread is in the communicator; one that is stuck there keeps it for ever.
        if self._table.forget(number, FORGET_MS_MAX):
            self._end(backend)


def _aside(end: Callable[..., None], *of: Any) -> threading.Thread:
    """Begun: to take a communicator apart takes half a second."""
    thread = threading.Thread(target=end, args=of, name="unicron-abort", daemon=True)
    thread.start()
    return thread


def begin_here(options: Any, collective: Callable[[], Any]) -> None:
    """On this thread's stream, where torch can (since 2.8); else that stream waits for the group's own."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    work = collective()
    if work is not None:
        work.wait()


def exchange(piece: torch.Tensor, peer: int, group: Any, device: torch.device, *, receives: bool) -> None:
    """One piece to or from a member, over the group's own communicator (a plain send would make another one, which no
    table knows). A piece on the host travels through the GPU."""
    on_gpu = piece if piece.is_cuda else (torch.empty_like(piece, device=device) if receives else piece.to(device))
    operation = dist.irecv if receives else dist.isend
    for work in dist.batch_isend_irecv([dist.P2POp(operation, on_gpu, group=group, group_peer=peer)]):
        work.wait()
    if receives and on_gpu is not piece:
        piece.copy_(on_gpu)
