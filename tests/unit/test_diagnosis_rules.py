"""The rules as data: every example meets its own rule, and no rule is out of its family's reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.diagnosis import literals
from unicron.diagnosis.reader import Reader
from unicron.diagnosis.rules import RULES
from unicron.diagnosis.words import Rule

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_an_example_meets_its_own_rule(rule: Rule) -> None:
    reader = Reader()
    reader.read_unranked([rule.example])
    assert [name for entry in reader.ranks.values() for name in entry.findings] == [rule.name]


def test_names_are_unique_and_everything_has_a_reason() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    assert all(rule.reason and rule.source and rule.example for rule in RULES)


def test_the_wheel_has_the_rules() -> None:
    """They are modules, so they go where the package goes; and the package's folders are found by setuptools."""
    setuptools = pytest.importorskip("setuptools")
    root = Path(__file__).resolve().parents[2]
    assert {"unicron.diagnosis", "unicron.diagnosis.rules"} <= set(setuptools.find_packages(str(root / "python")))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_found_by_its_words_and_shape(rule: Rule) -> None:
    assert rule.words
    reader = Reader(rules=(rule,))
    assert reader.rules_of(rule.example) == (rule,)
    assert reader.rules_of("iteration 5 of 5") is None


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("abc", ("abc",)),
        ("(?i)No Space|Disk Full", ("disk full", "no space")),
        (r"a(?:bcd|efg)+h", ("bcd", "efg")),
        (r"error[= ]12\b", ("error",)),
        (r"status 12", ("status 55",)),
        (r"(?:abc)?d", None),
        (r"abc|.", None),
        (r"ab.", None),
    ],
)
def test_words_of_a_pattern(pattern: str, words: tuple[str, ...] | None) -> None:
    assert literals.words(pattern) == words


@pytest.mark.parametrize(
    ("pattern", "same"),
    [
        ("code 12", "code 55"),
        (r"code [1-9]\d{2,}", r"code [0-9]\d{2,}"),
        (r"[0-9a-f]{8} x", r"[0-9a-f]{8} x"),
        (r"[^1]2", "[^1]5"),
        (r"(?!1)x", None),
        (r"(?!a)x", r"(?!a)x"),
    ],
)
def test_a_pattern_for_shapes(pattern: str, same: str | None) -> None:
    assert literals.same_digits(pattern) == same
