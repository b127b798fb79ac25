"""Change of layout, the pure part: random layouts of random tensors. Slices cover each tensor exactly once, every
wanted element is copied from where it lies, nothing crosses a node that lies on it, and digests do not change.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron._core import UnicronError
from unicron.training.reshard.boxes import Box, Piece, boxes_of_range, row_strides
from unicron.training.reshard.copies import copy_digests, differing, first_only
from unicron.training.reshard.digest import WORD, digest_of
from unicron.training.reshard.move import Memories, Mover, own_digests, total
from unicron.training.reshard.plan import Moves, NotCovered, Place, common_shapes, cover, messages_of, plan_moves

TENSORS = {"param/qkv": (4, 6, 8), "param/proj": (4, 8, 6), "param/embedding": (12, 5), "param/norm": (4, 7)}
PADDED = "param/embedding"


def box_of(name: str, tp: tuple[int, int], pp: tuple[int, int], shape: tuple[int, ...]) -> Box | None:
    """A rank's slice, cut as Megatron cuts: layers by stage, one axis by tp; the embedding on the first and last."""
    (t, tps), (p, pps) = tp, pp
    if name == PADDED:
        if p not in (0, pps - 1):
            return None
        return Box((t * shape[0] // tps, 0), (shape[0] // tps, shape[1]))
    offset, extent = [p * 4 // pps, *(0 for _ in shape[1:])], [4 // pps, *shape[1:]]
    axis = {"param/qkv": 1, "param/proj": 2}.get(name)
    if axis is not None:
        offset[axis], extent[axis] = t * shape[axis] // tps, shape[axis] // tps
    return Box(tuple(offset), tuple(extent))


def pieces_of(layout: tuple[int, int, int], rank: int, sharded: bool) -> tuple[list[Piece], int]:
    """(pieces of a rank, bytes of its arena): parameters whole, moments in its range of the flat tensor."""
    tp, pp, dp = layout
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    pieces, place = [], 16
    for name, shape in TENSORS.items():
        if name == PADDED:
            shape = (12 + 2 * (tp - 1), shape[1])  # padded by tp
        box = box_of(name, (t, tp), (p, pp), shape)
        if box is None:
            continue
        whole = [(name, box, row_strides(box.extent))]
        size = box.volume
        start, end = (d * size // dp, (d + 1) * size // dp) if sharded else (0, size)
        for part in boxes_of_range(box.extent, start, end):
            offset = tuple(map(sum, zip(box.offset, part.offset, strict=True)))
            whole.append((name.replace("param", "exp_avg"), Box(offset, part.extent), row_strides(part.extent)))
        for key, which, strides in whole:
            pieces.append(Piece(key, "float32", shape, which, place, strides, name == PADDED))
            place += 4 * which.volume
    return pieces, place


def value_at(name: str, shape: Sequence[int], box: Box) -> np.ndarray:
    """What every element must be, whoever holds it: a function of the tensor and the place in it."""
    grids = np.meshgrid(*(np.arange(o, o + n) for o, n in zip(box.offset, box.extent, strict=True)), indexing="ij")
    index = sum(g * 1000**i for i, g in enumerate(reversed(grids)))
    return (index + 7 * len(name) + ord(name[-1])).astype(np.uint32)


def fill(memory: np.ndarray, pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        view = np.ndarray(piece.box.extent, np.uint32, memory, piece.place, tuple(4 * s for s in piece.strides))
        view[...] = value_at(piece.name, piece.shape, piece.box)


LAYOUTS = st.sampled_from([(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 4, 1)])


def places_for(
    old: tuple[int, int, int], new: tuple[int, int, int], sharded: tuple[bool, bool], nodes: int
) -> tuple[list[Place], list[int], list[int]]:
    """Participants: the old ranks, which take new ranks in turn, and newcomers."""
    num_old, num_new = math.prod(old), math.prod(new)
    places, held_bytes, wanted_bytes = [], [], []
    for number in range(max(num_old, num_new)):
        held, hb = pieces_of(old, number, sharded[0]) if number < num_old else ([], 0)
        wanted, wb = pieces_of(new, number, sharded[1]) if number < num_new else ([], 0)
        places.append(Place(f"n{number % nodes}", tuple(held), tuple(wanted)))
        held_bytes.append(hb)
        wanted_bytes.append(wb)
    return places, held_bytes, wanted_bytes


@settings(max_examples=12, deadline=None)
@given(old=LAYOUTS, new=LAYOUTS, before=st.booleans(), after=st.booleans(), nodes=st.integers(1, 4))
def test_any_layout_to_any_other(
    old: tuple[int, int, int], new: tuple[int, int, int], before: bool, after: bool, nodes: int
) -> None:
    places, held_bytes, wanted_bytes = places_for(old, new, (before, after), nodes)
    shapes = common_shapes(places)
    held = [np.zeros(n, np.uint8) for n in held_bytes]
    wanted = [np.zeros(n, np.uint8) for n in wanted_bytes]
    for place, memory in zip(places, held, strict=True):
        fill(memory, place.held)
    moves = plan_moves(places)
    carry_out(moves, places, held, wanted)
    for place, memory in zip(places, wanted, strict=True):
        for piece in place.wanted:
            box = piece.box.clipped(shapes[piece.name])
            if box is not None:
                view = np.ndarray(
                    box.extent, np.uint32, memory, piece.place_of(box.offset), tuple(4 * s for s in piece.strides)
                )  # fmt: skip
                assert (view == value_at(piece.name, piece.shape, box)).all(), piece
    digests = [
        total([own_digests(n, [getattr(p, side) for p in places], shapes, m[n]) for n in range(len(places))])
        for side, m in (("held", held), ("wanted", wanted))
    ]
    assert digests[0] == digests[1]
    assert digests[0].keys() == shapes.keys()


def carry_out(moves: Moves, places: list[Place], held: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """All movers in one thread: who has to receive first waits for who sends, so senders come first."""
    boxes: dict[tuple[int, int], list[np.ndarray]] = {}

    class Line:
        def __init__(self, own: int) -> None:
            self.own = own

        def send(self, data: object, target: int) -> Line:
            boxes.setdefault((self.own, target), []).append(data.numpy().copy())  # type: ignore[attr-defined]
            return self

        def receive(self, data: object, source: int) -> Line:
            data.numpy()[...] = boxes[source, self.own].pop(0)  # type: ignore[attr-defined]
            return self

        def wait(self) -> None:
            pass

    movers = [Mover(n, Memories(h, w), Line(n), 256) for n, (h, w) in enumerate(zip(held, wanted, strict=True))]
    for mover in movers:
        for copy in moves.copies:
            if copy.source == copy.target == mover.own:
                mover._wanted(copy)[...] = mover._held(copy)
    for message in messages_of(moves, len(places), 256):
        assert message.nbytes <= 256 or len(message.copies) == 1
        movers[message.source]._send(message)
        movers[message.target]._receive(message)
    assert not any(boxes.values())


@settings(max_examples=12, deadline=None)
@given(old=LAYOUTS, new=LAYOUTS, before=st.booleans(), after=st.booleans(), nodes=st.integers(1, 4))
def test_nothing_crosses_that_need_not(
    old: tuple[int, int, int], new: tuple[int, int, int], before: bool, after: bool, nodes: int
) -> None:
    places, *_ = places_for(old, new, (before, after), nodes)
    moves = plan_moves(places)
    for copy in moves.copies:
        if copy.source == copy.target:
            continue
        here = [p for p in places[copy.target].held if p.name == copy.wanted.name and p.box.overlap(copy.box)]
        assert not here, f"{copy} although it lies there"
        if places[copy.source].node != places[copy.target].node:
            near = [
                p for place in places if place.node == places[copy.target].node for p in place.held
                if p.name == copy.wanted.name and p.box.overlap(copy.box)
            ]  # fmt: skip
            assert not near, f"{copy} crosses nodes although it lies on this one"


@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, sharded=st.booleans())
def test_slices_cover_each_tensor_exactly_once(layout: tuple[int, int, int], sharded: bool) -> None:
    pieces = [pieces_of(layout, rank, sharded)[0] for rank in range(math.prod(layout))]
    shapes = {piece.name: piece.shape for mine in pieces for piece in mine}
    count = {name: np.zeros(shape, int) for name, shape in shapes.items()}
    for _, piece, box in cover(pieces, shapes):
        count[piece.name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))] += 1
    assert all((seen == 1).all() for seen in count.values())


def test_what_nobody_holds_is_refused_by_name() -> None:
    places, *_ = places_for((2, 1, 1), (1, 1, 1), (False, False), 1)
    places[1] = Place("n0", places[1].held[1:], ())
    with pytest.raises(NotCovered, match="param/qkv"):
        plan_moves(places)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_a_range_becomes_boxes_in_order(seed: int) -> None:
    stream = random.Random(seed)
    extent = tuple(stream.randint(1, 5) for _ in range(stream.randint(1, 4)))
    size = math.prod(extent)
    start = stream.randint(0, size)
    end = stream.randint(start, size)
    order, seen = np.arange(size).reshape(extent), []
    boxes = list(boxes_of_range(extent, start, end))
    for box in boxes:
        seen += order[tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))].ravel().tolist()
    assert seen == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(extent) - 1)


def digest(values: np.ndarray, box: Box, shape: tuple[int, ...]) -> int:
    """Of elements that lie one after the other."""
    name = f"uint{8 * values.itemsize}"
    dtype = {"uint8": "uint8", "uint16": "bfloat16", "uint32": "float32", "uint64": "int64"}[name]
    piece = Piece("t", dtype, shape, box, 0, row_strides(box.extent))
    return digest_of(np.ascontiguousarray(values).view(np.uint8).ravel(), piece, box, shape)


def slow_digest(values: np.ndarray, box: Box, shape: tuple[int, ...]) -> int:
    """The same, element by element, in Python's own integers."""

    def finalized(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
        return x ^ (x >> 31)

    total = 0
    for local in np.ndindex(*box.extent):
        place = sum((o + i) * s for o, i, s in zip(box.offset, local, row_strides(shape), strict=True))
        total += finalized(finalized((place + 0x9E3779B97F4A7C15) & WORD) ^ int(values[local]))
    return total & WORD


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_the_native_digest_is_the_slow_one(kind: type) -> None:
    values = np.random.default_rng(3).integers(0, np.iinfo(kind).max, (3, 4, 5), dtype=kind)
    box = Box((1, 0, 2), (3, 4, 5))
    assert digest(values, box, (9, 4, 8)) == slow_digest(values, box, (9, 4, 8))


def test_a_digest_sees_what_changes() -> None:
    values = np.arange(24, dtype=np.uint32).reshape(4, 6)
    whole = Box((0, 0), (4, 6))
    flipped, swapped = values.copy(), values.copy()
    flipped[2, 3] ^= 1
    swapped[0, 0], swapped[0, 1] = values[0, 1], values[0, 0]
    assert len({digest(v, whole, (4, 6)) for v in (values, flipped, swapped)}) == 3


def test_a_box_that_reaches_out_of_its_memory_is_refused() -> None:
    box = Box((0, 0), (4, 6))
    for shape, place in (((4, 6), 4), ((3, 6), 0)):
        piece = Piece("t", "float32", shape, box, place, (6, 1))
        with pytest.raises(UnicronError, match="reaches out of"):
            digest_of(np.zeros(96, np.uint8), piece, box, shape)


@settings(max_examples=20, deadline=None)
@given(
    old=st.sampled_from([(1, 2, 1), (1, 2, 3), (2, 2, 2)]), new=LAYOUTS, sharded=st.booleans(),
    drifted=st.sets(st.sampled_from(["param/embedding", "exp_avg/embedding"])),
)  # fmt: skip
def test_of_copies_that_differ_the_first_one_moves(
    old: tuple[int, int, int], new: tuple[int, int, int], sharded: bool, drifted: set[str]
) -> None:
    """The last stage's embedding is the second copy of the first one's, and may differ from it in bits."""
    places, held_bytes, wanted_bytes = places_for(old, new, (sharded, sharded), 2)
    last = range(old[0] * old[2] * (old[1] - 1), math.prod(old))
    places = [second_copy(place) if number in last else place for number, place in enumerate(places)]
    shapes = common_shapes(places)
    held, wanted = ([np.zeros(n, np.uint8) for n in sizes] for sizes in (held_bytes, wanted_bytes))
    for number, (place, memory) in enumerate(zip(places, held, strict=True)):
        fill(memory, place.held)
        for piece in place.held if number in last else ():
            if piece.name in drifted:
                memory[piece.place] ^= 1
    holds = [memory if place.held else None for place, memory in zip(places, held, strict=True)]
    shares = [copy_digests(n, [p.held for p in places], shapes, memory) for n, memory in enumerate(holds)]
    assert differing(shares) == drifted
    moved = first_only(places, differing(shares))
    carry_out(plan_moves(moved), moved, held, wanted)
    for place, memory in zip(places, wanted, strict=True):
        for piece in place.wanted:
            if (box := piece.box.clipped(shapes[piece.name])) is not None:
                strides = tuple(4 * s for s in piece.strides)
                view = np.ndarray(box.extent, np.uint32, memory, piece.place_of(box.offset), strides)
                assert (view == value_at(piece.name, piece.shape, box)).all(), piece


def second_copy(place: Place) -> Place:
    held = [msgspec.structs.replace(p, copy=int("embedding" in p.name)) for p in place.held]
    return msgspec.structs.replace(place, held=tuple(held))
