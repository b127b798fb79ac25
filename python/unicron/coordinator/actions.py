"""What the coordinator's machine asks for: imperatives, each with its reason.

Contract of the host, in order: carry out the actions of one step in the order given; a WriteJournal must be on disk
before anything behind it is sent. A host that cannot write the journal stops (and comes back by replay).
"""

from __future__ import annotations

from dataclasses import dataclass

from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import Entry
from unicron.messages import (
    AgentWelcome,
    ArmFault,
    AskWaits,
    ChangeLayout,
    CheckNode,
    EndWorker,
    FinishUnderstudies,
    MoveRoles,
    PublishEpoch,
    Reply,
    SaveAndHold,
    StartWorkers,
    StopTask,
)

ToAgent = (
    AgentWelcome | StartWorkers | PublishEpoch | EndWorker | StopTask | FinishUnderstudies | ArmFault | SaveAndHold
    | CheckNode
    | ChangeLayout
    | MoveRoles
    | AskWaits
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WriteJournal:
    entry: Entry
    reason: str


@dataclass(frozen=True, slots=True)
class SendAgent:
    node: str
    message: ToAgent
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Sets or moves the timer of this name. It fires once, not before at_ms."""

    name: str
    at_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class CancelTimer:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProbeAgent:
    """Try to connect to the node's store endpoint: refused is positive evidence that the agent is gone."""

    node: str
    endpoint: str
    reason: str


@dataclass(frozen=True, slots=True)
class RecordIncident:
    """An incident opened, moved on or closed: for people and metrics (the journal has it already)."""

    incident: Incident
    reason: str


@dataclass(frozen=True, slots=True)
class Answer:
    request_id: str
    reply: Reply
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """An event that cannot count (stale epoch, unknown worker ...): `name` says which way."""

    name: str
    reason: str


Action = WriteJournal | SendAgent | SetTimer | CancelTimer | ProbeAgent | RecordIncident | Answer | Refused
