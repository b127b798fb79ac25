"""A real megatron-core GPT's state, described and moved between layouts: every byte of it is described, by pieces of
global tensors that do not depend on the layout, for both optimizers, in fp32 and with fp32 main state, with tied
embeddings and with a vocabulary that is padded by tp.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from unicron.demo import model as demo
from unicron.demo.variant import Variant
from unicron.training import megatron_cpu
from unicron.training.chunks import Chunks
from unicron.training.memory import StateMemory
from unicron.training.reshard.atlas import atlas_of
from unicron.training.reshard.boxes import Box, Piece
from unicron.training.reshard.move import own_digests, total, view_of
from unicron.training.reshard.plan import Place, common_shapes, plan_moves
from unicron.training.stand_ins import drop_stand_ins, make_stand_ins
from unicron.types import Layout

# The search for views of the state looks at every living object, among them a deprecated one of torch's.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op. is deprecated:FutureWarning")

PAIRS = (
    ((1, 1, 2, False), (2, 1, 1, False), False),
    ((2, 1, 1, False), (1, 2, 2, True), True),
    ((1, 2, 2, True), (2, 1, 2, True), True),
    ((2, 1, 2, True), (1, 1, 4, False), False),
    ((2, 2, 1, True), (1, 4, 1, True), False),
)


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    megatron_cpu.install()
    yield
    gc.collect()


def described(layout: Layout, rank: int, variant: Variant) -> tuple[tuple[Piece, ...], np.ndarray]:
    """A rank's atlas, and its arena's bytes. Every byte of parameters and optimizer state must be in a piece."""
    make_stand_ins(rank, layout)
    try:
        model, optimizer, _ = demo.build(layout, variant)
        chunks = Chunks(model)
        memory = StateMemory(chunks, optimizer, 64)
        pieces = atlas_of(chunks, optimizer, memory.place_of)
        arena = memory.bytes_view().copy()
        seen = np.zeros(memory.nbytes, bool)
        for piece in pieces:
            strides = tuple(piece.item_bytes * step for step in piece.strides)
            for byte in range(piece.item_bytes):
                view: np.ndarray = np.ndarray(piece.box.extent, bool, seen.data, piece.place + byte, strides)
                view[...] = True
        for name, tensor in memory.tensors():
            if not name.endswith("_data") and not name.startswith("unicron."):
                place = memory.place_of(tensor)
                assert seen[place : place + tensor.numel() * tensor.element_size()].all(), f"{name} is not described"
        return pieces, arena
    finally:
        drop_stand_ins()


def fill(memory: np.ndarray, piece: Piece, box: Box) -> np.ndarray:
    grids = np.meshgrid(*(np.arange(o, o + n) for o, n in zip(box.offset, box.extent, strict=True)), indexing="ij")
    salt = sum(map(ord, piece.name))
    return sum((g * 613**i for i, g in enumerate(reversed(grids))), start=np.full(box.extent, salt)).astype(
        view_of(memory, piece, box).dtype
    )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("old", "new", "bf16"), PAIRS)
def test_state_moves_between_layouts(
    old: tuple[int, int, int, bool], new: tuple[int, int, int, bool], bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = []
    for tp, pp, dp, sharded in (old, new):
        monkeypatch.setattr(demo, "VOCABULARY", 256 + 8 * tp)  # as a script pads it
        layout = Layout(tp=tp, pp=pp, dp=dp, num_micro_batches=4, sharded=sharded)
        sides.append([described(layout, rank, Variant(bf16=bf16)) for rank in range(layout.world_size)])
    count = max(map(len, sides))
    nothing: tuple[tuple[Piece, ...], np.ndarray] = ((), np.zeros(0, np.uint8))
    held, wanted = ([*side, *[nothing] * (count - len(side))] for side in sides)
    places = [Place(f"n{i % 2}", h[0], w[0]) for i, (h, w) in enumerate(zip(held, wanted, strict=True))]
    shapes = common_shapes(places)
    assert ("main/embedding.word_embeddings.weight" in shapes) == bf16
    assert shapes["param/embedding.word_embeddings.weight"][0] == 256 + 8 * min(old[0], new[0])
    for place, (_, arena) in zip(places, held, strict=True):
        for piece in place.held:
            view_of(arena, piece, piece.box)[...] = fill(arena, piece, piece.box)
    for copy in plan_moves(places).copies:
        source, target = held[copy.source][1], wanted[copy.target][1]
        view_of(target, copy.wanted, copy.box)[...] = view_of(source, copy.held, copy.box)
    for place, (_, arena) in zip(places, wanted, strict=True):
        for piece in place.wanted:
            if box := piece.box.clipped(shapes[piece.name]):
                assert (view_of(arena, piece, box) == fill(arena, piece, box)).all(), piece.name
    before, after = (
        total([own_digests(n, [side[0] for side in sides_], shapes, sides_[n][1]) for n in range(count)])
        for sides_ in (held, wanted)
    )
    assert before == after
