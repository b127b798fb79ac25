"""What the coordinator's machine can be told: past-tense facts. The runtime makes them, the simulator too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from unicron.coordinator.job import Job
from unicron.coordinator.journal import Entry
from unicron.messages import (
    AgentChecked,
    AgentHeartbeat,
    AgentHello,
    FromWorker,
    HardwareSeen,
    WorkerContinued,
    WorkerExited,
    WorkerLost,
    WorkerStalled,
    WorkerStopped,
    WorkersWait,
    WorkerUnkillable,
    WorkerUp,
)
from unicron.types import Rank

AgentSays = (
    AgentHello
    | AgentHeartbeat
    | AgentChecked
    | HardwareSeen
    | WorkerUp
    | WorkerLost
    | WorkerStopped
    | WorkerContinued
    | WorkerStalled
    | WorkersWait
    | WorkerUnkillable
    | WorkerExited
    | FromWorker
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """One entry of the journal, in order; all of them before Started."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Started:
    """The journal is read (or empty): the coordinator may decide from now on. Exactly once."""


@dataclass(frozen=True, slots=True)
class AgentMessage:
    """A message that arrived on the connection of this node (its identity is the transport's, not the message's)."""

    node: str
    message: AgentSays


@dataclass(frozen=True, slots=True)
class AgentDisconnected:
    """The transport saw the connection of this node end."""

    node: str


@dataclass(frozen=True, slots=True)
class AgentProbed:
    """Answer to ProbeAgent: `gone` = the connection was refused, `unknown` = no answer in time."""

    node: str
    answer: Literal["alive", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class NodeHeard:
    """Its beats come (again): only this change is told, not every beat."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeVouched:
    """Its beats do not come here; nodes that listen to it hear them."""

    node: str
    silent_ms: float  # here


@dataclass(frozen=True, slots=True)
class NodeSilent:
    """Its beats come neither here nor to the nodes that listen to it."""

    node: str
    silent_ms: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: str


@dataclass(frozen=True, slots=True)
class TaskSubmitted:
    request_id: str
    job: Job


@dataclass(frozen=True, slots=True)
class CancelRequested:
    request_id: str
    task: str


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    request_id: str
    task: str


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    request_id: str
    task: str


@dataclass(frozen=True, slots=True)
class ReshapeRequested:
    """Another layout for a running task."""

    request_id: str
    task: str
    layout: dict[str, int]  # tp, pp, dp, and sharded (0 or 1) where it changes


@dataclass(frozen=True, slots=True)
class DrainRequested:
    request_id: str
    node: str
    drained: bool  # False: undrain


@dataclass(frozen=True, slots=True)
class FaultRequested:
    request_id: str
    task: str
    rank: Rank
    fault: str
    point: str
    iteration: int = -1
    micro_batch: int = -1


Event = (
    Replayed
    | Started
    | AgentMessage
    | AgentDisconnected
    | AgentProbed
    | NodeHeard
    | NodeVouched
    | NodeSilent
    | TimerFired
    | TaskSubmitted
    | CancelRequested
    | SuspendRequested
    | ResumeRequested
    | ReshapeRequested
    | DrainRequested
    | FaultRequested
)
