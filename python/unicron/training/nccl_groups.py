"""NCCL groups whose hung collectives the native monitor ends, whoever holds the GIL.

A collective on a GPU returns before it has run, and one that was ended returns as if it had: `require_whole` says,
after a synchronisation, whether what the last collectives left is good. NCCL itself does not say that a peer is dead
(MECHANICS 4.1); a plan's arrival ends the groups that it makes useless (csrc/monitor/nccl_table.h), and then this
worker finds out here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from unicron import _core
from unicron.training.watched_group import COLLECTIVE_TIMEOUT, Check, Helpers, LostOperation

FORGET_MS_MAX = 15_000  # the table's own bound of an ending, and half of it again


class NcclGroups:
    """Makes this worker's groups on one GPU and knows which of them were ended."""

    def __init__(self, monitor: Any, device: int, helpers: Helpers) -> None:
        self.device = device
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
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        backend = dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)
        backend._set_sequence_number_for_group()
        # The first collective connects, and what it costs is not paid inside an iteration.
        backend.allreduce([torch.zeros(1, device=f"cuda:{self.device}")]).wait()
        return backend

    def _wrap(self, backend: Any) -> Any:
        group = dist.ProcessGroup(backend.rank(), backend.size())
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        return group

    def alone(self) -> Any:
        """The group of this worker by itself; also pays for NCCL's first communicator."""
        return self._wrap(self._backend(dist.HashStore(), "alone", 0, 1))

    def register(self, number: int, backend: Any, ranks: Iterable[int], cross: bool) -> None:
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

    def release(self) -> None:
        """Take the retired ones apart, in the background and all at once."""
        going, self._retired = self._retired, []
        for number, backend in going:
            threading.Thread(target=self._abort, args=(number, backend), name="unicron-abort", daemon=True).start()

    def close(self, timeout_s: float) -> None:
        """Take all of them apart: a process that ends with communicators waits for them in a destructor."""
        for number in list(self._backends):
            self.retire(number)
        going, self._retired = self._retired, []
        threads = [threading.Thread(target=self._abort, args=each, daemon=True) for each in going]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _abort(self, number: int, backend: Any) -> None:
        # Not while a native thread is in the communicator; one that is stuck there keeps it for ever.
        if self._table.forget(number, FORGET_MS_MAX):
            torch.cuda.set_device(self.device)
            backend.abort()


def exchange(piece: torch.Tensor, peer: int, group: Any, device: torch.device, *, receives: bool) -> None:
    """One piece to or from a member, over the group's own communicator (a plain send would make another one, which no
    table knows). A piece on the host travels through the GPU."""
    on_gpu = piece if piece.is_cuda else (torch.empty_like(piece, device=device) if receives else piece.to(device))
    operation = dist.irecv if receives else dist.isend
    for work in dist.batch_isend_irecv([dist.P2POp(operation, on_gpu, group=group, group_peer=peer)]):
        work.wait()
    if receives and on_gpu is not piece:
        piece.copy_(on_gpu)
