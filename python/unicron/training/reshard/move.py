"""Carries out a plan: own boxes by a copy in memory, the others in bounded messages, each with a digest of its bytes.

What is held is only read, what is wanted is written once. Nothing here knows what the memory is for: two flat buffers
and the pieces in them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from unicron import _core
from unicron.training.reshard.boxes import Box, Ints, Piece
from unicron.training.reshard.digest import WORD, digest_of
from unicron.training.reshard.plan import Copy, Message, Moves, common_shapes, cover, messages_of

MESSAGE_BYTES = 16 << 20
SENDING_BYTES_MAX = 64 << 20  # packed and not yet taken by their receivers
DIGEST_BYTES = 8
UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class ArrivedWrong(RuntimeError):
    """A message's bytes are not those that were sent."""


class Channel(Protocol):
    """To the other participants, by their numbers. Both return something to wait() for."""

    def send(self, data: torch.Tensor, target: int) -> Any: ...

    def receive(self, data: torch.Tensor, source: int) -> Any: ...


class Memories(NamedTuple):
    """Flat bytes: of the old arena (None: this participant held nothing), and of the new one (None: it leaves)."""

    held: np.ndarray | None
    wanted: np.ndarray | None


def view_of(memory: np.ndarray, piece: Piece, box: Box) -> np.ndarray:
    """The box's elements where they lie, as unsigned integers."""
    item = piece.item_bytes
    strides = tuple(item * step for step in piece.strides)
    place = piece.place_of(box.offset)
    return np.ndarray(box.extent, UINTS[item], memory, place, strides)  # type: ignore[call-overload,no-any-return]


class Mover:
    def __init__(self, own: int, memories: Memories, channel: Channel, message_bytes: int = MESSAGE_BYTES) -> None:
        self.own, self._memories, self._channel = own, memories, channel
        self._message_bytes = message_bytes
        self._sending: deque[tuple[Any, int]] = deque()
        self._sending_bytes = 0
        self.bytes_sent = self.bytes_received = 0
        self.spoil_next = False

    def run(self, moves: Moves, num_places: int) -> None:
        """Returns when all that this participant wants is there. Raises ArrivedWrong, and what a broken group does."""
        for copy in moves.copies:
            if copy.source == copy.target == self.own:
                self._wanted(copy)[...] = self._held(copy)
        for message in messages_of(moves, num_places, self._message_bytes):
            if message.source == self.own:
                self._send(message)
            elif message.target == self.own:
                self._receive(message)
        while self._sending:
            self._wait_for_oldest()

    def _held(self, copy: Copy) -> np.ndarray:
        assert self._memories.held is not None
        return view_of(self._memories.held, copy.held, copy.box)

    def _wanted(self, copy: Copy) -> np.ndarray:
        assert self._memories.wanted is not None
        return view_of(self._memories.wanted, copy.wanted, copy.box)

    def _send(self, message: Message) -> None:
        while self._sending and self._sending_bytes + message.nbytes > SENDING_BYTES_MAX:
            self._wait_for_oldest()
        data = np.empty(message.nbytes + DIGEST_BYTES, np.uint8)
        for copy, part in _parts(message, data):
            part[...] = self._held(copy)
        data[-DIGEST_BYTES:].view(np.uint64)[0] = _digest_of(data[:-DIGEST_BYTES])
        if self.spoil_next:
            self.spoil_next = False
            data[0] ^= 1
        tensor = torch.from_numpy(data)
        self._sending.append((self._channel.send(tensor, message.target), message.nbytes))
        self._sending_bytes += message.nbytes
        self.bytes_sent += message.nbytes

    def _wait_for_oldest(self) -> None:
        work, nbytes = self._sending.popleft()
        work.wait()
        self._sending_bytes -= nbytes

    def _receive(self, message: Message) -> None:
        data = np.empty(message.nbytes + DIGEST_BYTES, np.uint8)
        self._channel.receive(torch.from_numpy(data), message.source).wait()
        if int(data[-DIGEST_BYTES:].view(np.uint64)[0]) != _digest_of(data[:-DIGEST_BYTES]):
            names = sorted({copy.held.name for copy in message.copies})
            raise ArrivedWrong(f"{names[0]} and {len(names) - 1} more from participant {message.source}")
        for copy, part in _parts(message, data):
            self._wanted(copy)[...] = part
        self.bytes_received += message.nbytes


def _digest_of(data: np.ndarray) -> int:
    return int(_core.digest(data, 0)) & WORD


def _parts(message: Message, data: np.ndarray) -> Iterator[tuple[Copy, np.ndarray]]:
    """Each box's part of a message's bytes. Larger items first lie aligned; others need not be."""
    place = 0
    for copy in message.copies:
        part = np.ndarray(copy.box.extent, UINTS[copy.held.item_bytes], data, place)  # type: ignore[call-overload]
        yield copy, part
        place += copy.nbytes


# ------------------------------------------------------------ digests


def own_digests(
    own: int, pieces_of: Sequence[Sequence[Piece]], shapes: dict[str, Ints], memory: np.ndarray | None
) -> dict[str, int]:
    """This participant's share of every tensor's digest: every element is counted by exactly one of them."""
    digests: dict[str, int] = {}
    for number, piece, box in cover(pieces_of, shapes):
        if number == own:
            assert memory is not None
            part = digest_of(memory, piece, box, shapes[piece.name])
            digests[piece.name] = (digests.get(piece.name, 0) + part) & WORD
    return digests


def box_digests(pieces: Sequence[Piece], shapes: dict[str, Ints], memory: np.ndarray | None) -> list[int]:
    """Of each piece, in order: equal boxes of two participants must have equal ones."""
    found: list[int] = []
    if memory is None:
        return found
    for piece in pieces:
        box = piece.box.clipped(shapes[piece.name])
        found.append(digest_of(memory, piece, box, shapes[piece.name]) if box else 0)
    return found


def total(shares: Sequence[dict[str, int]]) -> dict[str, int]:
    """Digest of every tensor from everybody's shares."""
    digests: dict[str, int] = {}
    for share in shares:
        for name, part in share.items():
            digests[name] = (digests.get(name, 0) + part) & WORD
    return digests


def differing_copies(pieces_of: Sequence[Sequence[Piece]], digests: Sequence[Sequence[int]]) -> list[str]:
    """Tensors of which two participants have the same box with different content. digests: box_digests() of each."""
    known: dict[tuple[str, Box], int] = {}
    wrong = set()
    for pieces, own in zip(pieces_of, digests, strict=True):
        for piece, digest in zip(pieces, own, strict=True):
            if known.setdefault((piece.name, piece.box), digest) != digest:
                wrong.add(piece.name)
    return sorted(wrong)


__all__ = [
    "ArrivedWrong",
    "Memories",
    "Mover",
    "box_digests",
    "common_shapes",
    "differing_copies",
    "own_digests",
    "total",
]
