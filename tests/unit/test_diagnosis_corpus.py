"""The labelled corpus, where it is there: what `unicron bench classify` prints, as goals.

Rules were written with the even half and frozen before the odd one was opened. The odd half then gave severity 41 and
scope 42 of 51 confident rows and root 6 of 13; afterwards generalization errors were mended, so by now the odd half
tests what was learned and does not measure what a new text would give. That was measured with 63 further failures of
several ranks out of public reports (2026-11-30, not kept here), labelled by somebody who had not seen the rules: 30
gave root 19, and rules were mended with them; the other 33, never looked at, gave root 27 before that and 29 after it.
"""

from __future__ import annotations

import json

import pytest

from bench_classify import CONFIDENT, GOALS, Score, answer, evaluate, half, shared_data, verdicts

pytestmark = pytest.mark.timeout(60)

CORPUS = shared_data() / "failures" / "corpus.jsonl"
needs_data = pytest.mark.skipif(not CORPUS.is_file(), reason=f"{CORPUS} is not there (UNICRON_SHARED_DATA)")


@pytest.fixture(scope="module")
def scores() -> dict[str, dict[str, Score]]:
    return evaluate(json.loads(line) for line in CORPUS.read_text().splitlines())


def test_halves_are_by_the_digest_of_the_id() -> None:
    assert [half(name) for name in ("cuda-002", "cuda-003")] == ["even", "odd"]


@needs_data
def test_goals_of_the_even_half(scores: dict[str, dict[str, Score]]) -> None:
    everything = scores["even"]["all"]
    assert all(verdicts(scores["even"], GOALS["even"]).values()), everything.misses
    for what, goal in GOALS["even"].items():  # of all rows too, not only of the confident ones
        percent = everything.percent(what)
        assert percent is not None
        assert percent >= goal


@needs_data
def test_goals_of_the_odd_half(scores: dict[str, dict[str, Score]]) -> None:
    """But for the root rank: two of its rows cannot be told from their text, one is a tie."""
    met = verdicts(scores["odd"], GOALS["odd"])
    assert met.pop("root") is not None
    assert all(met.values()), scores["odd"]["all"].misses


@needs_data
def test_an_echo_is_never_named() -> None:
    rows = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    named = [row["id"] for row in rows if row["role"] == "secondary" and answer(row).root_rank is not None]
    assert not named
    assert any(row["confidence"] >= CONFIDENT for row in rows)
