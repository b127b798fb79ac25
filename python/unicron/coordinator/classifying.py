"""An incident's cause and text in the words of the rules (unicron.diagnosis): category, rule, meaning.

A moment after the decision, which never waits for it: what a process's death needs does not depend on why, with one
exception. Words that blame the hardware raise the incident to SEV1, and the node is remembered for it. FATAL is not
taken from words: a first failure may be chance, and the same one at the same place again is what proves it.
"""

from __future__ import annotations

from typing import Any

from unicron.coordinator.incident import Incident
from unicron.coordinator.step import Step
from unicron.diagnosis import Category, diagnose_text
from unicron.types import Severity

CLASSIFY_MS = 100.0
TEXT_CHARS_MAX = 8_192  # of the end of the text


def classify_soon(step: Step, incident: Incident) -> None:
    if not incident.rule and not step.has_timer("classify", incident.id):
        step.set_timer("classify", incident.id, CLASSIFY_MS, "its words are read when there is time")


def on_classify(step: Step, incident_id: str) -> None:
    incident = step.state.incidents.get(incident_id)
    if incident is None:
        return
    found = diagnose_text(f"{incident.text[-TEXT_CHARS_MAX:]}\n{incident.cause}")
    if found.category is Category.NONE:
        return
    changes: dict[str, Any] = {"category": found.category.value, "rule": found.rule, "meaning": found.reason}
    if found.severity is Severity.SEV1 and incident.severity in (Severity.SEV2, Severity.SEV3) and incident.node:
        changes["severity"] = Severity.SEV1
    step.change_incident(incident, f"{found.category.value}: {found.reason}", **changes)
