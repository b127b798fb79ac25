"""Who is a source of state, and who has one that nobody else has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron.training.transfer import chosen_sources


def test_most_are_right() -> None:
    assert chosen_sources([(0, 7), (1, 7), (3, 7)]) == ([0, 1, 3], [])
    assert chosen_sources([(0, 5), (1, 7), (3, 7)]) == ([1, 3], [0])
    assert chosen_sources([(4, 9)]) == ([4], [])


def test_where_nobody_can_tell_nobody_is_wrong() -> None:
    assert chosen_sources([(0, 5), (1, 7)]) == ([0, 1], [])
    assert chosen_sources([(0, 5), (1, 7), (2, 7), (3, 5)]) == ([0, 1, 2, 3], [])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_there_is_always_a_source_and_everybody_is_something(digests: list[int]) -> None:
    every = list(enumerate(digests))
    sources, differing = chosen_sources(every)
    assert sources and sorted(sources + differing) == [rank for rank, _ in every]
    assert 2 * len(differing) < len(every)
