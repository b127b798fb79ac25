"""Boxes of global tensors, and pieces: boxes that lie in somebody's arena. Pure arithmetic on integers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

Ints = tuple[int, ...]

ITEM_BYTES = {
    "float32": 4, "float64": 8, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "int8": 1, "bool": 1,
}  # fmt: skip


class Box(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Elements offset .. offset + extent of a global tensor, axis by axis."""

    offset: Ints
    extent: Ints

    @property
    def volume(self) -> int:
        return math.prod(self.extent)

    def overlap(self, other: Box) -> Box | None:
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.extent, other.offset, other.extent, strict=True)
        )  # fmt: skip
        extent = tuple(h - lo for lo, h in zip(low, high, strict=True))
        return Box(low, extent) if all(n > 0 for n in extent) else None

    def clipped(self, shape: Ints) -> Box | None:
        """What of it lies inside a tensor of this shape."""
        return self.overlap(Box((0,) * len(shape), shape))

    def minus(self, hole: Box) -> Iterator[Box]:
        """What is left without the part that lies in `hole`, in boxes that do not overlap."""
        shared = self.overlap(hole)
        if shared is None:
            yield self
            return
        offset, extent = self.offset, self.extent
        for axis in range(len(extent)):
            end, hole_end = offset[axis] + extent[axis], shared.offset[axis] + shared.extent[axis]
            for low, high in ((offset[axis], shared.offset[axis]), (hole_end, end)):
                if low < high:
                    yield Box(
                        (*offset[:axis], low, *offset[axis + 1 :]), (*extent[:axis], high - low, *extent[axis + 1 :])
                    )
            offset = (*offset[:axis], shared.offset[axis], *offset[axis + 1 :])
            extent = (*extent[:axis], shared.extent[axis], *extent[axis + 1 :])

    def cut(self, volume_max: int) -> Iterator[Box]:
        """The same elements in boxes of at most volume_max, along the first axis that can be divided."""
        if self.volume <= volume_max:
            yield self
            return
        axis = next(axis for axis, size in enumerate(self.extent) if size > 1)
        half = self.extent[axis] // 2
        for start, size in ((0, half), (half, self.extent[axis] - half)):
            offset = (*self.offset[:axis], self.offset[axis] + start, *self.offset[axis + 1 :])
            yield from Box(offset, (*self.extent[:axis], size, *self.extent[axis + 1 :])).cut(volume_max)


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """One box of a global tensor, and where in its holder's arena it lies."""

    name: str  # of the global tensor, e.g. exp_avg/decoder.layers.mlp.linear_fc1.weight
    dtype: str
    shape: Ints  # of the global tensor
    box: Box
    place: int  # byte of the box's first element in the arena
    strides: Ints  # in elements, one an axis
    padded: bool = False  # the shape depends on the layout (a padded vocabulary): what is beyond the smaller is void
    copy: int = 0  # of those that one replica has of it: copies.py

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    def place_of(self, offset: Ints) -> int:
        """Byte in the arena of an element of the box, by its place in the global tensor."""
        steps = zip(offset, self.box.offset, self.strides, strict=True)
        return self.place + self.item_bytes * sum((o - b) * s for o, b, s in steps)


def row_strides(extent: Ints) -> Ints:
    """Of elements that lie one after the other, the last axis innermost."""
    strides: list[int] = []
    step = 1
    for size in reversed(extent):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def boxes_of_range(extent: Ints, start: int, end: int) -> Iterator[Box]:
    """The elements start .. end of a row-major tensor of this extent, as few boxes: a distributed optimizer's shard.

    In order, so each box's elements lie one after the other, and so do the boxes.
    """
    if start >= end:
        return
    if not extent:
        yield Box((), ())
        return
    rest = extent[1:]
    row = math.prod(rest)
    first, last = start // row, (end - 1) // row
    if first == last and (start, end) != (first * row, (first + 1) * row):
        yield from _in_row(rest, first, start - first * row, end - first * row)
        return
    whole_from, whole_to = -(-start // row), end // row
    if start < whole_from * row:
        yield from _in_row(rest, first, start - first * row, row)
    if whole_from < whole_to:
        yield Box((whole_from, *(0 for _ in rest)), (whole_to - whole_from, *rest))
    if end > whole_to * row:
        yield from _in_row(rest, last, 0, end - last * row)


def _in_row(rest: Ints, row: int, start: int, end: int) -> Iterator[Box]:
    for box in boxes_of_range(rest, start, end):
        yield Box((row, *box.offset), (1, *box.extent))
