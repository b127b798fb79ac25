"""What the agent's machine can be told. Where a death or a stop is told, the pulse page read at that moment comes
along.
"""

from __future__ import annotations

from dataclasses import dataclass

from unicron.messages import (
    AgentWelcome,
    ArenaRequest,
    ArmFault,
    AskWaits,
    ChangeLayout,
    CheckNode,
    ChildStatus,
    CollectiveFailed,
    EndWorker,
    ExceptionRaised,
    Finished,
    FinishUnderstudies,
    GpuRequest,
    Healed,
    LayoutReady,
    MoveReady,
    MoveRoles,
    PublishEpoch,
    SaveAndHold,
    Saved,
    StartWorkers,
    StateLost,
    StopTask,
    WorkerHello,
    WorkerReady,
)
from unicron.types import Stage

CoordinatorSays = (
    AgentWelcome | StartWorkers | PublishEpoch | EndWorker | StopTask | FinishUnderstudies | ArmFault | SaveAndHold
    | CheckNode
    | ChangeLayout
    | MoveRoles
    | AskWaits
)  # fmt: skip
WorkerSays = (
    WorkerReady | CollectiveFailed | ExceptionRaised | StateLost | Healed | Saved | LayoutReady | MoveReady | Finished
)


@dataclass(frozen=True, slots=True)
class IterationSums:
    """A worker's sums since it began, at a commit: the difference of two is exact, whatever lies between them."""

    iteration: int
    compute_ns: int  # without waiting in collectives
    micro_batches: int
    waits_ns: tuple[int, ...]  # by types.WaitKind


@dataclass(frozen=True, slots=True)
class Activity:
    """What the kernel says of a process, in ms since it began."""

    ran_ms: float  # all threads together
    starved_ms: float  # its main thread was runnable, and another had the processor


@dataclass(frozen=True, slots=True)
class Pulse:
    """A pulse page as read at one moment (_core.PulsePage)."""

    stage: Stage
    iteration: int
    micro_batch: int
    since_ns: int
    progress: int
    waiting: bool
    fault_ns: int = 0
    committed_iteration: int = -1
    loss: float = 0.0  # of that iteration
    declared_ms: float = 0.0  # the script's own bound for what it does
    # since the last sample
    intervals: tuple[tuple[int, int, float], ...] = ()  # (stage, iteration, ms) that ended
    iterations: tuple[IterationSums, ...] = ()  # that were committed
    activity: Activity | None = None  # read only while the loop stands still
    last_words: str = ""  # of a C++ exception that nobody caught
    held: str = ""  # who holds this process on purpose, in words: a debugger, a frozen control group


@dataclass(frozen=True, slots=True)
class CoordinatorConnected:
    """The transport can carry messages to the coordinator (first time or again)."""


@dataclass(frozen=True, slots=True)
class CoordinatorDisconnected:
    pass


@dataclass(frozen=True, slots=True)
class BeatsAnswered:
    """The coordinator answers this node's beats (again), or does not any more: only this change is told."""

    answered: bool


@dataclass(frozen=True, slots=True)
class NodeChecked:
    """The checks of this node's hardware ended."""

    unfit: str
    checks: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class HardwareFailed:
    """The kernel log, or the driver's events, say so."""

    severity: str
    text: str


@dataclass(frozen=True, slots=True)
class CoordinatorMessage:
    message: CoordinatorSays


@dataclass(frozen=True, slots=True)
class WorkerForked:
    """Template or exec gave a process."""

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class ForkFailed:
    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A WorkerHello on a new connection; peer_pid is what the kernel says (SO_PEERCRED)."""

    hello: WorkerHello
    peer_pid: int


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    worker: str
    message: WorkerSays
    seen_ns: int


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """Its control connection ended: not yet a death."""

    worker: str


@dataclass(frozen=True, slots=True)
class MutexReleased:
    """The kernel released its robust mutex (_core.Supervisor): the process is dying, 0.1 ms ago."""

    worker: str
    seen_ns: int
    pulse: Pulse


@dataclass(frozen=True, slots=True)
class ChildStatusSeen:
    """The template (or waitpid) says exited, signaled, stopped or continued."""

    status: ChildStatus
    seen_ns: int
    pulse: Pulse | None
    held: str = ""  # stopped: who holds it on purpose, in words
    oom: bool | None = None  # signal 9: was it the kernel's out-of-memory killer? None: that cannot be read here
    oom_text: str = ""  # what says so
    words: str = ""  # that it left in its files
    words_where: str = ""


@dataclass(frozen=True, slots=True)
class PulsesSampled:
    """All pulse pages, read together (some times a second)."""

    now_ns: int
    pulses: tuple[tuple[str, Pulse], ...]


@dataclass(frozen=True, slots=True)
class ArenaRequested:
    request_id: str
    request: ArenaRequest


@dataclass(frozen=True, slots=True)
class GpuRequested:
    request_id: str
    request: GpuRequest


@dataclass(frozen=True, slots=True)
class OwnerLooked:
    """Answer to LookAtOwner: can nothing of that process write to shared memory any more?"""

    worker: str
    gone: bool


@dataclass(frozen=True, slots=True)
class WorkerInspected:
    """Answer to InspectWorker: the letter of its state in /proc ('' when it is gone), and who holds it."""

    worker: str
    state: str
    held: str


@dataclass(frozen=True, slots=True)
class TemplateLost:
    """The template process died: its children are killed with it (they were orphans otherwise)."""


@dataclass(frozen=True, slots=True)
class TimerFired:
    timer: str


Event = (
    CoordinatorConnected
    | CoordinatorDisconnected
    | BeatsAnswered
    | NodeChecked
    | HardwareFailed
    | CoordinatorMessage
    | WorkerForked
    | ForkFailed
    | WorkerJoined
    | WorkerMessage
    | WorkerDisconnected
    | MutexReleased
    | ChildStatusSeen
    | PulsesSampled
    | ArenaRequested
    | GpuRequested
    | OwnerLooked
    | WorkerInspected
    | TemplateLost
    | TimerFired
)
