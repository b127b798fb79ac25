"""What the agent's machine asks for, each with its reason. The host carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass

from unicron.messages import (
    AgentChecked,
    AgentHeartbeat,
    AgentHello,
    ArmFault,
    ChangeLayout,
    FinishUnderstudies,
    Fork,
    FromWorker,
    HardwareSeen,
    MoveRoles,
    PublishEpoch,
    SaveAndHold,
    StopTask,
    WorkerContinued,
    WorkerExited,
    WorkerLost,
    WorkerStalled,
    WorkerStopped,
    WorkersWait,
    WorkerUnkillable,
    WorkerUp,
    WorkerWelcome,
)
from unicron.types import Rank

ToCoordinator = (
    AgentHello
    | AgentChecked
    | HardwareSeen
    | AgentHeartbeat
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
SIGTERM, SIGKILL = 15, 9
ToWorker = PublishEpoch | FinishUnderstudies | StopTask | SaveAndHold | ChangeLayout | MoveRoles


@dataclass(frozen=True, slots=True)
class SendCoordinator:
    message: ToCoordinator
    reason: str


@dataclass(frozen=True, slots=True)
class SendWorker:
    """One frame to the worker's control connection: epoch and touched go into its binary prefix."""

    worker: str
    message: ToWorker
    epoch: int
    touched: tuple[Rank, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class WelcomeWorker:
    """Answer to WorkerHello with the pulse memfd. The host fills in the store keys (it has the randomness)."""

    worker: str
    message: WorkerWelcome
    reason: str


@dataclass(frozen=True, slots=True)
class ForkWorker:
    """Through the template; the pulse page of this slot is reset before."""

    message: Fork
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExecWorker:
    """A plain process of its own (unmanaged scripts); argv[0] is found on PATH."""

    message: Fork
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class WatchWorker:
    """Supervisor.watch: its mutex is held now."""

    worker: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """Supervisor.unwatch; close the worker's connection. The slot may be used again."""

    worker: str
    slot: int
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """A signal to its process (by pidfd, so never to a stranger): SIGKILL, or SIGTERM where it may leave by itself."""

    worker: str
    pid: int
    reason: str
    signal: int = SIGKILL


@dataclass(frozen=True, slots=True)
class InspectWorker:
    """It was killed and is still there: in what state is it? Answered by WorkerInspected."""

    worker: str
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class LookAtOwner:
    """Ask whether every thread of the dead worker is gone (owner_gone); answered by OwnerLooked."""

    worker: str
    pid: int
    reason: str


@dataclass(frozen=True, slots=True)
class GrantArena:
    """Answer an ArenaRequest with the descriptors of `arena`. create: make it first, of nbytes and of the GPU memory
    that came with the request."""

    request_id: str
    arena: str  # id, unique for the agent's life
    task: str
    rank: Rank
    worker: str
    nbytes: int
    create: bool
    refused: str  # why it is not the role's last arena, where that one was asked for
    reason: str


@dataclass(frozen=True, slots=True)
class GrantGpu:
    """Answer a GpuRequest."""

    request_id: str
    index: int  # -1: refused
    reason: str


@dataclass(frozen=True, slots=True)
class DropArena:
    """Close the descriptor: nobody will adopt it."""

    arena: str
    reason: str


@dataclass(frozen=True, slots=True)
class ArmPulse:
    """Arm the fault in the worker's pulse page (fault `now`, kill and stop from outside: the host's own doing)."""

    worker: str
    slot: int
    fault: ArmFault
    reason: str


@dataclass(frozen=True, slots=True)
class RunChecks:
    """Of this node's hardware, beside everything; answered by NodeChecked. is_idle: no worker is here."""

    is_idle: bool
    reason: str


@dataclass(frozen=True, slots=True)
class LeaveCoordinator:
    """End this connection and look for the coordinator again."""

    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    name: str
    at_ms: float
    reason: str


@dataclass(frozen=True, slots=True)
class CancelTimer:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    name: str
    reason: str


Action = (
    SendCoordinator
    | SendWorker
    | WelcomeWorker
    | ForkWorker
    | ExecWorker
    | WatchWorker
    | ReleaseSlot
    | KillWorker
    | InspectWorker
    | LookAtOwner
    | GrantArena
    | GrantGpu
    | DropArena
    | ArmPulse
    | LeaveCoordinator
    | SetTimer
    | CancelTimer
    | RunChecks
    | Refused
)
