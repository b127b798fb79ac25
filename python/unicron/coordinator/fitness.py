"""May a node be used? What its checks say, what its kernel says, and how often it was lost.

A node whose agent looks at its hardware is used once that look ended and found nothing bad; `unknown` is no evidence.
It looks again a moment after every incident on it. What is unfit is emptied like a drained node, and comes back by
passing its checks: after a repair its agent starts anew, or a person says `undrain`, which only asks for the checks.
Who was lost again and again comes back too, but rests first, twice as long each time, until it has been calm.
"""

from __future__ import annotations

from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import NodeChecked, NodeRests
from unicron.coordinator.state import NodeState
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase
from unicron.messages import AgentChecked, AgentHello, CheckNode, HardwareSeen
from unicron.types import Method, Outcome, Severity

PENDING = "its checks have not ended yet"
KINDS = ("check", "rest", "calm")


def on_joined(step: Step, node: NodeState, hello: AgentHello, *, is_new: bool) -> None:
    """After its hello counted. is_new: a new life of its agent, or the first one known here."""
    node.can_check = hello.checks
    if not hello.checks and node.unfit == PENDING:
        step.write(NodeChecked(node.name, ""), "this agent has no checks")
    if hello.checks and (is_new or node.unfit == PENDING):
        if is_new:
            step.write(NodeChecked(node.name, node.unfit or PENDING), "it is used once its checks passed")
        step.set_timer("check", node.name, step.config.check_ms_max, "its checks end")
    if node.flaps and is_new:
        _settle_flaps(step, node)


def _settle_flaps(step: Step, node: NodeState) -> None:
    config = step.config
    step.set_timer("calm", node.name, config.calm_ms, "then its losses are forgotten")
    over = node.flaps - config.flaps_max
    if over < 0:
        return
    rest_ms = min(config.rest_ms_min * 2.0 ** min(over, 30), config.rest_ms_max)
    step.write(NodeRests(node.name, rest_ms, node.flaps), f"lost {node.flaps} times: it rests before it is used")
    step.set_timer("rest", node.name, rest_ms, "it came back too often")


def on_timer(step: Step, kind: str, node: NodeState) -> None:
    if kind == "check":
        ask(step, node, "its checks are due")
    elif kind == "rest":
        step.write(NodeRests(node.name, 0.0, node.flaps), "it has rested")
        step.has_freed = True
    elif node.phase is NodePhase.UP:
        step.write(NodeRests(node.name, 0.0, 0), "it has been calm")


def timers_after_replay(step: Step, node: NodeState) -> None:
    if node.rest_ms:
        step.set_timer("rest", node.name, node.rest_ms, "a new coordinator waits afresh")
    if node.flaps:
        step.set_timer("calm", node.name, step.config.calm_ms, "a new coordinator waits afresh")


def ask(step: Step, node: NodeState, reason: str) -> None:
    step.send(node.name, CheckNode(reason), reason)
    if node.unfit == PENDING:
        step.set_timer("check", node.name, step.config.check_ms_max, "its checks end")


def on_checked(step: Step, node: NodeState, message: AgentChecked) -> None:
    if message.incarnation != node.incarnation:
        step.refuse("stale_incarnation", f"{node.name}: {message.incarnation}")
        return
    node.checks = message.checks
    if node.unfit == PENDING:
        step.cancel_timer("check", node.name, "its checks ended")
    if message.unfit:
        _condemn(step, node, message.unfit)
    elif node.unfit:
        step.write(NodeChecked(node.name, ""), f"its checks passed; before: {node.unfit}")
        step.has_freed = True


def condemn(step: Step, name: str, why: str) -> None:
    """By an incident that blames it. Only where its checks can clear it again."""
    node = step.state.nodes.get(name)
    if node is not None and node.can_check and node.unfit in ("", PENDING):
        step.write(NodeChecked(name, why), why)
        step.has_freed = True


def on_hardware(step: Step, node: NodeState, message: HardwareSeen) -> None:
    """Its kernel or driver says that hardware failed, while it works."""
    severity = Severity(message.severity)
    if severity is Severity.SEV1:
        _condemn(step, node, message.text)
        return
    _tell(step, node, severity, message.text)


def _condemn(step: Step, node: NodeState, why: str) -> None:
    if node.unfit == why:
        return  # said before
    was_pending = node.unfit in ("", PENDING)
    step.write(NodeChecked(node.name, why), why)
    step.has_freed = True
    if was_pending:
        _tell(step, node, Severity.SEV1, why)


def _tell(step: Step, node: NodeState, severity: Severity, why: str) -> None:
    incident = Incident(
        id="", task="", fault="hardware", severity=severity, node=node.name, rank=-1, method=Method.HARDWARE,
        opened_ms=0.0, cause=why, outcome=Outcome.UNAFFECTED, is_only_told=severity is not Severity.SEV1,
    )  # fmt: skip
    step.open_incident(incident, f"{node.name}: {why}")
