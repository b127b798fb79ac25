"""What a failure's words mean: rules as data, the root among many ranks, tables of the driver's numbers. Pure."""

from unicron.diagnosis.reader import warm_up
from unicron.diagnosis.root import diagnose, diagnose_ranks, diagnose_text
from unicron.diagnosis.words import Category, Diagnosis, Finding, Rule, Scope, Strength

__all__ = [
    "Category",
    "Diagnosis",
    "Finding",
    "Rule",
    "Scope",
    "Strength",
    "diagnose",
    "diagnose_ranks",
    "diagnose_text",
    "warm_up",
]
