"""What several ranks of one replica hold of the same tensor: a tied embedding, the norms of tensor-parallel ranks.

Their gradients are made equal before replicas are added up, and replicas are added up apart: where that is not done in
one order everywhere (with three replicas, say), copies come to differ in their last bits. Then the first one is the
tensor, as in megatron-core's checkpoints, and the others take theirs from it. Where they are equal, whoever is nearest
serves, as for any other tensor.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from unicron.training.reshard.boxes import Ints, Piece
from unicron.training.reshard.digest import WORD
from unicron.training.reshard.move import own_digests
from unicron.training.reshard.plan import NotCovered, Place

ByCopy = dict[str, dict[int, int]]  # tensor -> number of the copy -> (a share of) its digest


def copy_digests(
    own: int, pieces_of: Sequence[Sequence[Piece]], shapes: dict[str, Ints], memory: np.ndarray | None
) -> ByCopy:
    """This participant's share of the digest of each copy of every tensor that has several. A copy that is not whole
    has none."""
    held: dict[str, dict[int, dict[int, list[Piece]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for number, pieces in enumerate(pieces_of):
        for piece in pieces:
            held[piece.name][piece.copy][number].append(piece)
    found: ByCopy = {}
    for name, copies in held.items():
        for copy, by_holder in copies.items() if len(copies) > 1 else ():
            those = [by_holder.get(number, []) for number in range(len(pieces_of))]
            try:
                share = own_digests(own, those, {name: shapes[name]}, memory)
            except NotCovered:
                continue
            found.setdefault(name, {})[copy] = share.get(name, 0)
    return found


def differing(shares: Iterable[ByCopy]) -> set[str]:
    """Tensors of which whole copies are not equal. shares: copy_digests() of each participant."""
    totals: ByCopy = {}
    for share in shares:
        for name, digests in share.items():
            mine = totals.setdefault(name, {})
            for copy, part in digests.items():
                mine[copy] = (mine.get(copy, 0) + part) & WORD
    return {name for name, digests in totals.items() if len(set(digests.values())) > 1}


def first_only(places: Sequence[Place], names: set[str]) -> list[Place]:
    """Of these tensors nobody holds anything but the first copy."""
    return [
        msgspec.structs.replace(
            place, held=tuple(piece for piece in place.held if not piece.copy or piece.name not in names)
        )
        for place in places
    ]
