"""A digest of a global tensor that does not depend on how it is cut: the sum over its elements of a hash of (place in
the tensor, bits). Boxes that do not overlap add up, in any order, modulo 2^64. (csrc/state/box_digest.cc)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from unicron import _core
from unicron.training.reshard.boxes import Box, Ints, Piece

WORD = (1 << 64) - 1


def digest_of(memory: np.ndarray, piece: Piece, box: Box, shape: Ints) -> int:
    """Of a box of a piece that lies in flat memory; shape: of the global tensor, or of the part that is compared."""
    return _core.box_digest(
        memory, piece.place_of(box.offset), piece.item_bytes, [*box.extent], [*piece.strides], [*box.offset], [*shape]
    )


def digest_of_all(digests: Mapping[str, int]) -> str:
    """One word for all tensors of a task."""
    text = "".join(f"{name} {digests[name]:016x}\n" for name in sorted(digests))
    return hashlib.sha256(text.encode()).hexdigest()
