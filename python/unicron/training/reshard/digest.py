"""A digest of a global tensor that does not depend on how it is cut: the sum over its elements of a hash of (place in
the tensor, bits). Boxes that do not overlap add up, in any order, modulo 2^64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from unicron.training.reshard.boxes import Box, Ints, row_strides

WORD = (1 << 64) - 1
ELEMENTS_MAX = 1 << 18  # at a time: the hash needs some tens of bytes for each
UINTS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def digest_of(values: np.ndarray, box: Box, shape: Ints) -> int:
    """values: the box's elements, as unsigned integers; shape: of the global tensor (the part that is compared)."""
    if box.volume > ELEMENTS_MAX:
        total = 0
        for part in box.cut(ELEMENTS_MAX):
            low = tuple(p - b for p, b in zip(part.offset, box.offset, strict=True))
            window = tuple(slice(o, o + n) for o, n in zip(low, part.extent, strict=True))
            total += digest_of(values[window], part, shape)
        return total & WORD
    index = np.zeros((1,) * len(box.extent), dtype=np.uint64)
    for axis, step in enumerate(row_strides(shape)):
        along = (np.arange(box.extent[axis], dtype=np.uint64) + np.uint64(box.offset[axis])) * np.uint64(step)
        index = index + along.reshape([-1 if a == axis else 1 for a in range(len(box.extent))])
    return int(_mixed(index, values.astype(np.uint64)).sum(dtype=np.uint64)) & WORD


def _mixed(index: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, once over the place and once over place and bits."""
    return _finalized(_finalized(index + np.uint64(0x9E3779B97F4A7C15)) ^ bits)


def _finalized(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest_of_all(digests: Mapping[str, int]) -> str:
    """One word for all tensors of a task."""
    text = "".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
