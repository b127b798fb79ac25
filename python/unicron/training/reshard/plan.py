"""Who sends which box to whom: the intersection of the pieces that are held with those that are wanted. Pure.

Every participant computes the same plan from the same atlases. The source of a box is the nearest: the participant
itself, then one on its node, then another; of several equally near ones the one that has the least to send. So nothing
crosses a node that lies on it already, and copies of the same state share the work of serving it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec

from unicron.training.reshard.boxes import Box, Ints, Piece


class NotCovered(ValueError):
    """What is wanted is not held by anybody, or not in this form; the text names the tensor."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """One participant: what it holds in the old layout, what it shall hold in the new one."""

    node: str
    held: tuple[Piece, ...] = ()
    wanted: tuple[Piece, ...] = ()


class Copy(msgspec.Struct, frozen=True):
    """One box from one participant's piece to another's (or its own)."""

    source: int
    target: int
    held: Piece
    wanted: Piece
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.volume * self.held.item_bytes


class Moves(msgspec.Struct, frozen=True):
    copies: tuple[Copy, ...]
    bytes_own: int  # stay in their process
    bytes_node: int  # go to another process of the same node
    bytes_cross: int  # go to another node


def common_shapes(places: Sequence[Place]) -> dict[str, Ints]:
    """For every tensor the part that both layouts have. Only a padded one may differ. Raises NotCovered."""
    shapes: dict[str, Ints] = {}
    for place in places:
        for piece in (*place.held, *place.wanted):
            known = shapes.setdefault(piece.name, piece.shape)
            if known != piece.shape:
                if not piece.padded or len(known) != len(piece.shape):
                    raise NotCovered(f"{piece.name}: {known} in one layout, {piece.shape} in the other")
                shapes[piece.name] = tuple(map(min, known, piece.shape))
    return shapes


class _Holders:
    """The boxes of each tensor and who has them. They may overlap: copies of a tied embedding are sharded apart."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self._load = [0] * len(places)
        self._boxes: dict[str, dict[Box, dict[int, Piece]]] = defaultdict(dict)
        for number, place in enumerate(places):
            for piece in place.held:
                self._boxes[piece.name].setdefault(piece.box, {}).setdefault(number, piece)

    def copies_for(self, target: int, wanted: Piece, box: Box) -> Iterator[Copy]:
        """Until the box is covered or nobody has more of it; the nearest holders first."""
        near = [(self._nearest(target, holders), held_box) for held_box, holders in self._boxes[wanted.name].items()]
        missing = [box]
        for (*_, source), held_box in sorted(near):
            held = self._boxes[wanted.name][held_box][source]
            for shared in [s for m in missing if (s := m.overlap(held_box)) is not None]:
                if held.dtype != wanted.dtype:
                    raise NotCovered(f"{wanted.name}: {held.dtype} in one layout, {wanted.dtype} in the other")
                if source != target:
                    self._load[source] += shared.volume * held.item_bytes
                yield Copy(source, target, held, wanted, shared)
            missing = [left for m in missing for left in m.minus(held_box)]
            if not missing:
                return

    def _nearest(self, target: int, holders: dict[int, Piece]) -> tuple[bool, bool, int, int]:
        home = self._places[target].node
        return min((n != target, self._places[n].node != home, self._load[n], n) for n in holders)


def plan_moves(places: Sequence[Place]) -> Moves:
    """Raises NotCovered when a wanted piece cannot be put together."""
    shapes, holders = common_shapes(places), _Holders(places)
    copies: list[Copy] = []
    for target, place in enumerate(places):
        for wanted in place.wanted:
            box = wanted.box.clipped(shapes[wanted.name])
            if box is None:
                continue  # nothing but padding
            found = list(holders.copies_for(target, wanted, box))
            have = sum(copy.box.volume for copy in found)
            if have != box.volume:
                raise NotCovered(f"{wanted.name}: of {box.volume} elements at {box.offset} {have} are held")
            copies += found
    sums = [0, 0, 0]
    for copy in copies:
        far = places[copy.source].node != places[copy.target].node
        sums[0 if copy.source == copy.target else 1 + far] += copy.nbytes
    return Moves(tuple(copies), *sums)


class Message(msgspec.Struct, frozen=True):
    """Boxes that go from one participant to another together."""

    source: int
    target: int
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for copy in self.copies)


def messages_of(moves: Moves, num_places: int, bytes_max: int) -> list[Message]:
    """What goes between participants, in messages of at most bytes_max and in one order for all of them.

    Who does its own in this order, and waits for each, cannot wait for ever: both ends of the first one that is not
    done are at it. Pairs take turns (each sends to its next neighbour first), so that all links work at once.
    """
    rows: list[tuple[tuple[int, int, int], Message]] = []
    pairs: dict[tuple[int, int], list[Copy]] = defaultdict(list)
    for copy in moves.copies:
        if copy.source != copy.target:
            for box in copy.box.cut(max(1, bytes_max // copy.held.item_bytes)):
                pairs[copy.source, copy.target].append(msgspec.structs.replace(copy, box=box))
    for (source, target), copies in pairs.items():
        for number, batch in enumerate(_batches(copies, bytes_max)):
            key = (number, (target - source) % num_places, source)
            rows.append((key, Message(source, target, tuple(batch))))
    rows.sort(key=lambda row: row[0])
    return [message for _, message in rows]


def _batches(copies: list[Copy], bytes_max: int) -> Iterator[list[Copy]]:
    batch: list[Copy] = []
    room = bytes_max
    for copy in copies:
        if batch and copy.nbytes > room:
            yield batch
            batch, room = [], bytes_max
        batch.append(copy)
        room -= copy.nbytes
    if batch:
        yield batch


def cover(pieces_of: Sequence[Sequence[Piece]], shapes: dict[str, Ints]) -> list[tuple[int, Piece, Box]]:
    """Every element of every tensor once: (participant, its piece, box inside it). The same everywhere. NotCovered."""
    missing = {name: [Box((0,) * len(shape), shape)] for name, shape in shapes.items()}
    found: list[tuple[int, Piece, Box]] = []
    for number, pieces in enumerate(pieces_of):
        for piece in pieces:
            left = missing[piece.name]
            found += [(number, piece, shared) for m in left if (shared := m.overlap(piece.box)) is not None]
            missing[piece.name] = [rest for m in left for rest in m.minus(piece.box)]
    lacking = sorted(name for name, left in missing.items() if left)
    if lacking:
        raise NotCovered(f"no participant holds all of {', '.join(lacking[:3])}")
    return found


def state_bytes(places: Sequence[Place]) -> int:
    """Of the global tensors in the new layout, each counted once."""
    sizes = {piece.name: math.prod(piece.shape) * piece.item_bytes for place in places for piece in place.wanted}
    return sum(sizes.values())
