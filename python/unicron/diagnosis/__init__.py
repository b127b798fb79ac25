"""What a failure's words mean: rules as data, the root among many ranks, tables of the driver's numbers. Pure."""

from unicron.diagnosis.counts import CountLimits, Seen, count
from unicron.diagnosis.reader import warm_up
from unicron.diagnosis.root import diagnose, diagnose_ranks, diagnose_text
from unicron.diagnosis.words import Category, Diagnosis, Finding, Rule, Scope, Strength

__all__ = [
    "Category",
    "CountLimits",
    "Diagnosis",
    "Finding",
    "Rule",
    "Scope",
    "Seen",
    "Strength",
    "count",
    "diagnose",
    "diagnose_ranks",
    "diagnose_text",
    "warm_up",
]
