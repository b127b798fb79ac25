"""Who is a source of state, and who has one that nobody else has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from unicron.training.transfer import chosen_sources, source_lists


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


def test_a_target_asks_its_own_node_first_and_no_source_serves_all() -> None:
    nodes = {0: "n0", 1: "n0", 2: "n1", 3: "n1", 4: "n2", 5: "n2", 6: "n3", 7: "n3"}
    lists = source_lists([0, 2, 4], [1, 3, 5], nodes)
    assert {target: sources[0] for target, sources in lists.items()} == {1: 0, 3: 2, 5: 4}
    lists = source_lists([0, 2], [4, 5, 6, 7], nodes)  # nobody is near
    assert [lists[target][0] for target in (4, 5, 6, 7)] == [0, 2, 0, 2]


@given(st.sets(st.integers(0, 15), min_size=1, max_size=12), st.integers(1, 11), st.integers(1, 5))
def test_every_target_may_ask_every_source_and_no_source_serves_two_while_one_is_idle(
    ranks: set[int], count: int, per_node: int
) -> None:
    sources, targets = sorted(ranks)[:count], sorted(ranks)[count:]
    nodes = {rank: f"n{rank // per_node}" for rank in ranks}
    lists = source_lists(sources, targets, nodes)
    assert all(sorted(found) == sources for found in lists.values())
    far = [t for t in targets if all(nodes[s] != nodes[t] for s in sources)]
    if far == targets:
        serves = [sum(found[0] == source for found in lists.values()) for source in sources]
        assert max(serves, default=0) - min(serves, default=0) <= 1
