"""The agent's state: its workers, their arenas, the newest plan of each task, and what it reported."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from unicron._core import PhaseTimes
from unicron.agent.events import Activity, IterationSums, Pulse
from unicron.agent.transitions import DEAD, Phase, next_phase
from unicron.messages import (
    AgentChecked,
    ExceptionRaised,
    FromWorker,
    PaceSample,
    TaskSpec,
    WorkerContinued,
    WorkerExited,
    WorkerLost,
    WorkerStalled,
    WorkerStatus,
    WorkerStopped,
    WorkerUnkillable,
)
from unicron.types import EpochPlan, Rank, Stage

Report = (
    WorkerLost | WorkerStopped | WorkerContinued | WorkerStalled | WorkerUnkillable | WorkerExited | FromWorker
)  # fmt: skip


@dataclass(slots=True)
class Standstill:
    """Since the loop's last advance."""

    stood_ms: float = 0.0  # as far as this agent watched
    level: int = 0  # that was reported
    activity: Activity | None = None  # of its process, when it was first seen to stand


@dataclass(slots=True)
class Worker:
    name: str
    task: str
    incarnation: int
    rank: Rank  # role held, meant or guessed
    waiting: bool
    slot: int  # pulse page
    managed: bool
    log: str
    stall_factor: float
    phase: Phase = Phase.ORDERED
    built_for: Rank = -1  # the role whose GPU it asked for last
    pid: int = 0
    epoch: int = 0
    progress_planned: int = 0  # of its loop, when it was given that epoch
    warms_up: bool = False  # it has its slot for itself while it waits
    is_connected: bool = False  # its control connection
    has_finished: bool = False
    has_gpu: bool = False
    is_leaving: bool = False  # told to leave: exit code 0 is not early
    is_stopped: bool = False
    end_reason: str = ""
    kills: int = 0
    held: str = ""  # who holds it on purpose, as was reported
    exception: ExceptionRaised | None = None
    last_report: WorkerLost | WorkerExited | None = None
    pulse: Pulse | None = None
    still: Standstill = field(default_factory=Standstill)
    stall_rebase: bool = False  # nothing before the next sample counts as standing still
    sampled_ns: int = 0
    rebased_iteration: int = -1  # in which its clock began anew last: it waits there for who heals, and others for it
    first_iteration: int | None = None  # of this process: it compiles, allocates, connects
    sums: IterationSums | None = None
    pace: deque[PaceSample] = field(default_factory=deque)  # for the next heartbeat

    @property
    def is_dead(self) -> bool:
        return self.phase in DEAD

    @property
    def can_hear(self) -> bool:
        return self.is_connected and self.phase in (Phase.JOINED, Phase.READY, Phase.FINISHED)

    def move(self, trigger: str) -> None:
        self.phase = next_phase(self.phase, trigger)

    def status(self) -> WorkerStatus:
        stage = self.pulse.stage if self.pulse else Stage.DONE if self.has_finished else Stage.STARTING
        return WorkerStatus(
            task=self.task,
            worker=self.name,
            incarnation=self.incarnation,
            pid=self.pid,
            rank=self.rank,
            waiting=self.waiting,
            ready=self.phase in (Phase.READY, Phase.FINISHED),
            epoch=self.epoch,
            stage=stage,
            iteration=self.pulse.iteration if self.pulse else -1,
            progress=self.pulse.progress if self.pulse else 0,
            loss=self.pulse.loss if self.pulse and self.pulse.committed_iteration >= 0 else None,
            gpu=self.has_gpu,
            progress_planned=self.progress_planned,
        )


@dataclass(slots=True)
class Arena:
    id: str
    task: str
    rank: Rank
    owner: str  # worker that maps it
    nbytes: int
    digest: str


@dataclass(slots=True)
class Adoption:
    """A request for a role's arena whose owner is not known to be gone yet."""

    request_id: str
    worker: str
    arena: str
    nbytes: int
    digest: str
    asked_ms: float


@dataclass(slots=True)
class State:
    is_connected: bool = False  # to the coordinator
    term: int = 0  # newest that welcomed us
    term_ms: float = 0.0  # when it was heard last
    is_stale: bool = False  # this connection's coordinator is of an older term: its orders do not count
    sequence: int = 0
    is_heard: bool = False  # the coordinator answers its beats
    told: tuple[WorkerStatus, ...] = ()  # by the last heartbeat, without its numbers
    told_ms: float = 0.0
    checked: AgentChecked | None = None  # the newest answer of the checks
    arena_count: int = 0
    workers: dict[str, Worker] = field(default_factory=dict)
    specs: dict[str, TaskSpec] = field(default_factory=dict)
    plans: dict[str, EpochPlan] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)  # task -> why
    reports: deque[Report] = field(default_factory=deque)
    arenas: dict[str, Arena] = field(default_factory=dict)  # by id
    roles: dict[tuple[str, Rank], str] = field(default_factory=dict)  # (task, rank) -> arena id
    gpus: dict[tuple[str, Rank], int] = field(default_factory=dict)  # (task, rank) -> the role's GPU on this node
    changes: dict[str, EpochPlan] = field(default_factory=dict)  # announced changes of layout, by task
    staged: dict[tuple[str, Rank], str] = field(default_factory=dict)  # arenas of roles that such a change will bring
    adoptions: list[Adoption] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    times: dict[tuple[str, Rank], PhaseTimes] = field(default_factory=dict)  # what is usual for a role

    def free_slot(self) -> int:
        used = {w.slot for w in self.workers.values() if w.phase is not Phase.GONE}
        return next(i for i in range(len(used) + 1) if i not in used)

    def of_task(self, task: str) -> list[Worker]:
        return [w for w in self.workers.values() if w.task == task]
