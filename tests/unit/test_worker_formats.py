"""What workers of neighbouring versions tell each other as arrays: a field more must have a default, at the end.

During a rolling upgrade a worker of one version takes the state of one of another. msgspec reads an array that is too
short only when what is missing has a default, and one that is too long always; so what 0.1 said is pinned here.
"""

from __future__ import annotations

import msgspec
import pytest

from unicron.training.moving import Taken
from unicron.training.reshard.boxes import Box, Piece
from unicron.training.reshard.change import _Digests, _Said
from unicron.training.reshard.plan import Place

SAID_BY_0_1: dict[type[msgspec.Struct], tuple[str, ...]] = {
    Taken: ("iteration", "digest", "gathered", "commit"),
    Place: ("node", "held", "wanted"),
    _Said: ("place", "iteration", "extra", "error"),
    _Digests: ("before", "after", "held", "wanted"),
    Box: ("offset", "extent"),
    Piece: ("name", "dtype", "shape", "box", "place", "strides", "padded"),
}


def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


@pytest.mark.parametrize("kind", SAID_BY_0_1, ids=lambda kind: kind.__name__)
def test_what_is_added_to_an_array_has_a_default_and_comes_last(kind: type[msgspec.Struct]) -> None:
    said = SAID_BY_0_1[kind]
    now = fields_of(kind)
    assert tuple(field.name for field in now[: len(said)]) == said
    assert [field.name for field in now[len(said) :] if field.required] == []


def test_a_leaver_of_0_1_is_understood_by_a_joiner() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([7, 1, True, None]), type=Taken) == Taken(7, 1, True, None, 0)
    newer = msgspec.msgpack.encode([7, 1, True, None, 2, "what comes later"])
    assert msgspec.msgpack.decode(newer, type=Taken).branch == 2
