"""An incident's cause and text in the words of the rules (unicron.diagnosis): category, rule, meaning.

A moment after the decision, which never waits for it: what a process's death needs does not depend on why, with one
exception. Words that blame the hardware raise the incident to SEV1, and the node is remembered for it. FATAL is not
taken from words: a first failure may be chance, and the same one at the same place again is what proves it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unicron import diagnosis
from unicron.coordinator import fitness
from unicron.coordinator.incident import Incident
from unicron.coordinator.step import Step
from unicron.diagnosis import Category, Scope, diagnose_text
from unicron.types import KILLED_NOTHING, Severity

LIMITS = diagnosis.CountLimits(node_max=3, node_window_ms=3_600_000.0)
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
    # The rule of a SIGKILL names the two who send it; one of them is cleared by the kernel's counters.
    is_by_hand = found.rule == "process.killed" and KILLED_NOTHING in incident.text
    meaning = "killed by hand (SIGKILL)" if is_by_hand else found.reason
    changes: dict[str, Any] = {
        "category": found.category.value, "rule": found.rule, "scope": found.scope.value, "meaning": meaning,
    }  # fmt: skip
    reason = f"{found.category.value}: {meaning}"
    is_blamed = found.severity is Severity.SEV1
    if incident.severity in (Severity.SEV2, Severity.SEV3) and incident.node:
        counted = "" if is_blamed else _again_and_again(step, msgspec.structs.replace(incident, **changes))
        if is_blamed or counted:
            changes["severity"] = Severity.SEV1
            reason = counted or reason
            fitness.condemn(step, incident.node, reason)
    step.change_incident(incident, reason, **changes)


def _again_and_again(step: Step, incident: Incident) -> str:
    """Several failures of one node at different work are the node's, where its checks can clear it again. What a person
    or the kernel may do to any process (a plain SIGKILL) says nothing about a node."""
    node = step.state.nodes.get(incident.node)
    if node is None or not node.can_check or incident.cause == "signal 9":
        return ""
    others = [
        _seen(i) for i in step.state.incidents.values()
        if i.id != incident.id and i.task and i.scope and i.cause != "signal 9" and not i.is_only_told
    ]  # fmt: skip
    found = diagnosis.count(_seen(incident), others, max(len(step.state.nodes), 1), LIMITS)
    return found.reason if found.severity is Severity.SEV1 else ""


def _seen(incident: Incident) -> diagnosis.Seen:
    node = "" if incident.severity is Severity.FATAL else incident.node  # where it was seen is not to blame
    return diagnosis.Seen(
        at_ms=incident.opened_ms, node=node, severity=incident.severity, scope=Scope(incident.scope),
        signature=incident.signature, rank=incident.rank, incarnation=incident.incarnation,
        iteration=incident.iteration, micro_batch=incident.micro_batch,
    )  # fmt: skip
