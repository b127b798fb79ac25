"""All rules, by family. The order decides only between findings of equal strength in one line: the first one "
"is meant.

To add a rule: a row in its family's file, with an example line of its own; tests/unit/test_diagnosis_rules.py wants
the example to meet that very rule.
"""

from __future__ import annotations

from unicron.diagnosis.rules import cuda, kernel, nccl, others, process, program, storage, store
from unicron.diagnosis.words import Family, Rule

FAMILIES: tuple[Family, ...] = (
    kernel.FAMILY,
    cuda.FAMILY,
    nccl.FAMILY,
    others.FAMILY,
    store.FAMILY,
    storage.FAMILY,
    process.FAMILY,
    program.FAMILY,
)
RULES: tuple[Rule, ...] = tuple(rule for family in FAMILIES for rule in family.rules)
