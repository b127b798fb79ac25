"""Diagnosis of arbitrary text: it never raises, the order of ranks does not matter, and an echo changes no root.

The cheap test before every pattern (literals.py) is compared with asking all patterns of everything.
"""

from __future__ import annotations

import contextlib
import random

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from unicron.diagnosis import diagnose_ranks, diagnose_text
from unicron.diagnosis.dump import DumpProblem, read_dump
from unicron.diagnosis.flight import diagnose_dumps, parse_dump
from unicron.diagnosis.lines import LINE_CHARS_MAX, OVERLAP_CHARS, pieces, when_s
from unicron.diagnosis.reader import Reader, best_rule
from unicron.diagnosis.rules import RULES
from unicron.diagnosis.words import Diagnosis, Strength

pytestmark = pytest.mark.timeout(120)

EXAMPLES = [rule.example for rule in RULES] + [
    "NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 22003, Fatal, Link 12 Minion Halt",
    "flight recorder: default_pg enqueued=8 completed=7; last entry nccl:x state=scheduled",
    "2026-01-01 10:00:01 RuntimeError: CUDA error: an illegal memory access was encountered",
    "iteration 700/1000 | lm loss: 2.1",
]
CAUSES = [rule.example for rule in RULES if rule.strength >= Strength.DEATH and not rule.is_mutual]
ECHOES = [rule.example for rule in RULES if rule.strength is Strength.ECHO]

words = st.sampled_from([word for text in EXAMPLES for word in text.split(" ")])
mixed = st.lists(words, max_size=12).map(" ".join)
line = st.one_of(st.sampled_from(EXAMPLES), mixed, st.text(max_size=60))
texts = st.lists(line, max_size=5).map("\n".join)
keys = st.one_of(st.integers(0, 9).map(str), st.sampled_from(["n1", "launcher", ""]))
ranks = st.dictionaries(keys, texts, max_size=5)


def said(found: Diagnosis) -> tuple[str, str, str, str | None, str]:
    return found.severity, found.scope, found.category, found.root_rank, found.reason


@settings(deadline=None, max_examples=150)
@given(st.one_of(texts, st.text(), mixed))
@example("\x00" * 10_000)
@example("rank : 9999999999999999999 (local_rank: 1)\nexitcode : -9")
@example("last enqueued NCCL work: " + "9" * 5000 + ", last completed NCCL work: 1")
@example("2026-99-99 10:00:00 KeyError: 1")
@example("Xid (PCI:0): 149, NETIR_LINK_EVT (0xffffffff 0xffffffff")
def test_no_text_raises(text: str) -> None:
    found = diagnose_text(text)
    assert found.root_rank is None or found.evidence
    for piece in pieces(text):
        when_s(piece)


@settings(deadline=None, max_examples=150)
@given(ranks, st.integers(0, 1000))
def test_the_order_of_ranks_does_not_matter(content: dict[str, str], seed: int) -> None:
    shuffled = list(content.items())
    random.Random(seed).shuffle(shuffled)
    assert said(diagnose_ranks(content)) == said(diagnose_ranks(dict(shuffled)))


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(CAUSES), st.sampled_from(CAUSES), st.lists(st.sampled_from(ECHOES), min_size=1, max_size=4))
def test_an_echo_changes_no_root(one: str, other: str, echoes: list[str]) -> None:
    content = {"0": one, "1": other}
    before = diagnose_ranks(content)
    after = diagnose_ranks({**content, **{str(rank): echo for rank, echo in enumerate(echoes, 2)}})
    assert (after.root_rank, after.severity) == (before.root_rank, before.severity)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(ECHOES), min_size=1, max_size=5))
def test_echoes_alone_in_one_text_name_nobody(echoes: list[str]) -> None:
    assert diagnose_text("\n".join(echoes)).root_rank is None


@settings(deadline=None, max_examples=300)
@given(line)
def test_no_rule_is_missed_by_the_cheap_test(text: str) -> None:
    reader = Reader()
    for piece in text.splitlines():
        assert best_rule(piece, reader.rules_of(piece) or ())[0] == best_rule(piece, RULES)[0]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 4 * LINE_CHARS_MAX), st.integers(0, 4 * LINE_CHARS_MAX))
def test_pieces_cover_a_long_line(before: int, after: int) -> None:
    whole = "a" * before + "KeyError: 'x'" + "b" * after
    parts = list(pieces(whole))
    assert all(len(part) <= LINE_CHARS_MAX for part in parts)
    assert parts[0] + "".join(part[OVERLAP_CHARS:] for part in parts[1:]) == whole
    assert any("KeyError: 'x'" in part for part in parts)


@settings(deadline=None, max_examples=20)
@given(texts)
def test_memory_is_bounded_by_rules_and_ranks(text: str) -> None:
    reader = Reader()
    for _ in range(50):
        reader.read_unranked(text.splitlines())
    assert all(len(entry.findings) <= len(RULES) + 10 for entry in reader.ranks.values())


FIELDS = [
    "entries", "pg_config", "pg_status", "0", "ranks", "process_group", "pg_id", "state", "is_p2p", "name",
    "collective_seq_id", "p2p_seq_id", "profiling_name", "last_enqueued_collective", "record_id",
]  # fmt: skip
plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 99), st.text(max_size=5), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=6,
        ),
    ),
    max_leaves=25,
)


@settings(deadline=None, max_examples=150)
@given(st.dictionaries(st.integers(0, 3), plain, min_size=1, max_size=3))
def test_no_dump_raises(values: dict[int, object]) -> None:
    dumps = {}
    for rank, value in values.items():
        try:
            dumps[rank] = parse_dump(rank, value)
        except ValueError:
            dumps[rank] = parse_dump(rank, {"entries": [value], "pg_config": value, "pg_status": value})
    diagnose_dumps(dumps)


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(lambda rest: b"\x80\x02" + rest)))
def test_no_bytes_do_more_than_be_refused(content: bytes) -> None:
    with contextlib.suppress(DumpProblem):
        read_dump(content)
