"""A parcel's way where state is on a GPU: packed there, from GPU to GPU to the other node, and to the host by a thread.

Training goes on meanwhile: packing is a copy inside the GPU, the message lies between two iterations' collectives of
the same group, and the rest is done on a stream of its own. Two parcels of GPU memory are the price. Then it goes
through two small pinned pieces: a process that has pinned a lot dies slowly, and its heir waits for it (MECHANICS 4.2).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from unicron.training.watched_group import LostOperation

PIECE_BYTES = 32 << 20
CARRIED_S_MAX = 60.0  # without coming on
LOOK_S = 0.02


class Courier:
    """Of one worker. The next parcel leaves when the last has arrived."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        self.leaving = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.arriving = torch.zeros_like(self.leaving)
        self._is_on_gpu = device.type == "cuda"
        size = min(PIECE_BYTES, nbytes)
        self._pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=self._is_on_gpu) for _ in range(2)]
        self._stream = torch.cuda.Stream(device) if self._is_on_gpu else None

    def begin(
        self,
        group: Any,
        to: int,
        source: int,
        own: torch.Tensor | None,
        ward: torch.Tensor,
        is_right: Callable[[], bool],
    ) -> Carriage:
        """What is in `leaving` goes to a member, and to `own`; what arrives from another to `ward`, if it is right."""
        return Carriage(self, exchange_both(self, group, to, source), own, ward, is_right)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """On the stream of its own: from any thread."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def to_host(self, source: torch.Tensor, place: torch.Tensor, check: Callable[[], None]) -> None:
        """One piece comes from the GPU while the one before is put in its place. check() before each may end it."""
        before: tuple[torch.Tensor, torch.Tensor, Any] | None = None
        for number, start in enumerate(range(0, source.numel(), PIECE_BYTES)):
            check()
            part = source[start : start + PIECE_BYTES]
            piece = self._pieces[number % 2][: part.numel()]
            piece.copy_(part, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True) if self._is_on_gpu else None
            if arrived is not None:
                arrived.record()
            self._put(before)
            before = piece, place[start : start + part.numel()], arrived
        self._put(before)

    def _put(self, arriving: tuple[torch.Tensor, torch.Tensor, Any] | None) -> None:
        if arriving is None:
            return
        piece, place, arrived = arriving
        if arrived is not None:
            arrived.synchronize()
        place.copy_(piece)


def exchange_both(courier: Courier, group: Any, to: int, source: int) -> list[Any]:
    """Begun in the order of this thread's stream: what was packed is there before it is sent."""
    sending = dist.P2POp(dist.isend, courier.leaving, group=group, group_peer=to)
    receiving = dist.P2POp(dist.irecv, courier.arriving, group=group, group_peer=source)
    return list(dist.batch_isend_irecv([sending, receiving]))


class Carriage:
    """One parcel each way, with a thread that sees it through."""

    def __init__(
        self, courier: Courier, works: list[Any], own: torch.Tensor | None, ward: torch.Tensor,
        is_right: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._courier, self._works, self._own, self._ward = courier, works, own, ward
        self._check = is_right
        self._error: Exception | None = None
        self._is_given_up = False
        self._progress = 0  # pieces on the host
        self.is_right = False  # what arrived, and all of it lies in its place
        self.is_kept = False  # the own parcel lies in its place
        # What was packed is packed on the stream of the thread that begins this; the other one waits for it.
        self._packed = torch.cuda.Event() if courier.device.type == "cuda" else None
        if self._packed is not None:
            self._packed.record(torch.cuda.current_stream(courier.device))
        self._thread = threading.Thread(target=self._run, name="unicron-buddy", daemon=True)
        self._thread.start()

    def wait(self, moves: Callable[[], None] = lambda: None) -> None:
        """moves() is called whenever it has come on. Raises LostOperation when it did not get through: its group was
        ended, as a rule."""
        seen, deadline = -1, time.monotonic() + CARRIED_S_MAX
        while self._thread.is_alive() and time.monotonic() < deadline:
            if seen != self._progress:
                seen, deadline = self._progress, time.monotonic() + CARRIED_S_MAX
                moves()
            self._thread.join(LOOK_S)
        if self._thread.is_alive():
            self.give_up()
            raise LostOperation(f"a copy has not come on for {CARRIED_S_MAX:.0f} s")
        if self._error is not None:
            raise LostOperation(f"a copy was not carried: {self._error}")

    def give_up(self) -> None:
        """It ends with the piece that is on its way to the host: a recovery does not wait for a whole shard."""
        self._is_given_up = True

    @property
    def is_stuck(self) -> bool:
        """Given up, and still not at its end: what it writes to must not be used again."""
        return self._is_given_up and self._thread.is_alive()

    def _come_on(self) -> None:
        if self._is_given_up:
            raise LostOperation("it was given up")
        self._progress += 1

    def _run(self) -> None:
        try:
            with self._courier.aside():
                self._carry()
        except Exception as error:
            self._error = error

    def _carry(self) -> None:
        courier = self._courier
        if self._packed is not None:
            self._packed.wait()
        if self._own is not None:
            courier.to_host(courier.leaving, self._own, self._come_on)
            self.is_kept = True
        for work in self._works:
            work.wait()
        courier.settle()
        if self._check():
            courier.to_host(courier.arriving, self._ward, self._come_on)
            self.is_right = True
