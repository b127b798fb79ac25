"""The way of one role's state from its leaver to its joiner: a group of these two, connected beside training.

give() and take() name the same pieces in the same order. Both end when all has arrived, or with an error: what the
group says, or LostOperation once a newer epoch came.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from unicron.training.nccl_groups import NcclGroups, begin_here
from unicron.training.watched_group import Helpers, LostOperation, WatchedGroup

LEAVER, JOINER = 0, 1  # their places
POLL_S = 0.0005
OVER_S = 5.0  # a newer epoch ends the communicator (csrc/monitor/nccl_table.h); who still waits then ends it himself


class GlooPair:
    """Between CPUs. is_over: did a newer epoch come?"""

    def __init__(self, backend: Any, helpers: Helpers, is_over: Callable[[], bool], pulse: Any) -> None:
        self._group: WatchedGroup | None = WatchedGroup(
            backend, helpers, lambda: "shut" if is_over() else "whole", pulse
        )

    def give(self, pieces: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        for piece in pieces:
            self._group.send([piece], JOINER, 0).wait()

    def take(self, pieces: Sequence[torch.Tensor]) -> None:
        assert self._group is not None
        for piece in pieces:
            self._group.recv([piece], LEAVER, 0).wait()

    def has_served(self) -> None:
        """All is there. The other end may not know it yet, so this one stays."""

    def close(self) -> None:
        """Connections that nobody uses any more. Destructors join threads that are on their way out: not here."""
        group, self._group = self._group, None
        if group is not None and group.lost:
            _lost.append(group)
        elif group is not None:
            going = [group]
            del group
            threading.Thread(target=going.clear, name="unicron-release", daemon=True).start()


#: Their destructors would wait for the operation that was lost.
_lost: list[WatchedGroup] = []


class NcclPair:
    """Between GPUs. Broadcasts of the leaver, because torch makes another communicator for a send, which no table
    knows: no epoch would end it. A piece on the host travels through the GPU.

    A broadcast waits for its peer on the GPU, on a stream that training does not wait for, and this thread asks
    whether it has ended: an epoch's arrival ends it (the table has this communicator), and nothing else does.
    """

    def __init__(self, nccl: NcclGroups, number: int, backend: Any, is_over: Callable[[], bool], pulse: Any) -> None:
        self._nccl, self._number, self._backend = nccl, number, backend
        self._is_over, self._pulse = is_over, pulse

    def give(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pass_on(pieces, receives=False)

    def take(self, pieces: Sequence[torch.Tensor]) -> None:
        self._pass_on(pieces, receives=True)

    def has_served(self) -> None:
        """All is there. To take a communicator apart costs the more the later, when training goes on."""
        self.close()

    def close(self) -> None:
        """A peer that is gone, or a collective that hangs, makes no difference: it is taken apart in the background."""
        backend, self._backend = self._backend, None
        if backend is not None:
            self._nccl.drop(self._number)

    def _pass_on(self, pieces: Sequence[torch.Tensor], *, receives: bool) -> None:
        backend, options = self._backend, dist.BroadcastOptions()
        options.rootRank, options.rootTensor = LEAVER, 0
        place = self._nccl.place
        under_way: list[torch.Tensor] = []  # alive until they have been sent
        with self._nccl.beside() as has_ended:
            for piece in pieces:
                is_there = piece.device == place
                on_gpu = piece if is_there else torch.empty_like(piece, device=place) if receives else piece.to(place)
                under_way.append(on_gpu)
                begin_here(options, functools.partial(backend.broadcast, [on_gpu], options))
                if receives and on_gpu is not piece:
                    self._settle(has_ended)  # before a copy that would wait for it without a bound
                    piece.copy_(on_gpu)
            self._settle(has_ended)

    def _settle(self, has_ended: Callable[[], bool]) -> None:
        """What was begun has ended, and its result is good."""
        over_at: float | None = None
        while not has_ended():
            self._pulse.set_waiting(True)
            if self._is_over():
                over_at = over_at or time.monotonic()
            if over_at is not None and time.monotonic() - over_at > OVER_S:
                self.close()
                raise LostOperation("the state of a role is on its way, and a newer epoch did not end that")
            time.sleep(POLL_S)
        self._pulse.set_waiting(False)
        self._nccl.require_whole([self._number])
