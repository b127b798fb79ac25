"""The rules as data: every example meets its own rule, and no rule is out of its family's reach."""

from __future__ import annotations

import pytest

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
