"""The coordinator's state: nodes, tasks, their workers. Plain values; phases move only through transitions.py.

Fields marked (journal) are rebuilt by replay; the others are told again by the agents' hellos or are decided anew.
"""

from __future__ import annotations

import enum
import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unicron.coordinator.allocation import Allocation
from unicron.coordinator.incident import Incident
from unicron.coordinator.job import Job
from unicron.coordinator.layout_change import MOVES_KEPT_MAX, LayoutChange
from unicron.coordinator.planned import Planned
from unicron.coordinator.timesheet import Accounts, new_history
from unicron.coordinator.transitions import (
    ENDED,
    NodePhase,
    TaskPhase,
    WorkerPhase,
    next_node_phase,
    next_task_phase,
    next_worker_phase,
)
from unicron.messages import CollectiveFailed, ExceptionRaised, Healed, Saved, WorkerStalled
from unicron.planner.planner import Planner
from unicron.types import EpochPlan, Network, Rank, Stage

if TYPE_CHECKING:
    from unicron.coordinator.moves import RoleMove
    from unicron.coordinator.slowness import Pace
    from unicron.coordinator.unready import UnreadyDeath


class Purpose(enum.StrEnum):
    MEMBER = "member"
    UNDERSTUDY = "understudy"
    REFILL = "refill"  # started for one lost role, because no understudy was there
    JOINER = "joiner"  # of a replica that comes back
    STANDBY = "standby"  # on a slot of its own, for a role that lives elsewhere


WAITING = (Purpose.UNDERSTUDY, Purpose.REFILL, Purpose.STANDBY)  # who may take a lost role
ON_SLOTS = (Purpose.MEMBER, Purpose.JOINER, Purpose.STANDBY)  # who has a slot


class Hearing(enum.StrEnum):
    NONE = "none"  # it does not beat, as far as is known
    HEARD = "heard"
    VOUCHED = "vouched"  # not here; by nodes that listen to it
    SILENT = "silent"  # by nobody


@dataclass(slots=True)
class NodeState:
    name: str
    incarnation: int  # (journal)
    slots: int  # (journal)
    understudies: int  # (journal)
    store: str  # (journal)
    store_key: str  # (journal)
    phase: NodePhase
    since_ms: float = 0.0  # of the phase
    is_connected: bool = False
    clock: str = ""  # whose monotonic clock its agent reads
    probe_answer: str = ""
    has_missed: bool = False  # something was not sent to it while it was silent: its next hello tells what
    hearing: Hearing = Hearing.NONE  # its beats
    control_network: Network | None = None  # the interfaces that its agent chose
    state_network: Network | None = None
    can_check: bool = False  # its agent looks at the hardware
    checks: tuple[tuple[str, str, str], ...] = ()  # (check, answer, reason) of the newest look
    drained_by_person: bool = False  # (journal)
    unfit: str = ""  # (journal) what its checks, or its kernel, said; until its checks pass
    flaps: int = 0  # (journal) losses since it was calm
    rest_ms: float = 0.0  # (journal) it came back too often: not used for so long

    @property
    def is_drained(self) -> bool:
        """It shall be empty, whoever wants that."""
        return self.drained_by_person or bool(self.unfit) or self.rest_ms > 0

    @property
    def why_drained(self) -> str:
        if self.unfit:
            return f"unfit: {self.unfit}"
        if self.rest_ms:
            return f"was lost {self.flaps} times: rests {self.rest_ms / 1000:.0f} s"
        return "drained by a person" if self.drained_by_person else ""

    @property
    def is_usable(self) -> bool:
        """May tasks be given its slots? Suspicion alone takes nothing away."""
        return self.phase is not NodePhase.LOST and not self.is_drained

    @property
    def beats(self) -> bool:
        """Somebody hears it."""
        return self.hearing in (Hearing.HEARD, Hearing.VOUCHED)

    def move(self, trigger: str, now_ms: float) -> None:
        phase = next_node_phase(self.phase, trigger)
        if phase is not self.phase:
            self.phase, self.since_ms = phase, now_ms


@dataclass(slots=True)
class WorkerState:
    name: str  # (journal)
    node: str  # (journal)
    incarnation: int  # (journal)
    rank: Rank  # (journal) role held, meant or guessed
    purpose: Purpose  # (journal)
    phase: WorkerPhase = WorkerPhase.STARTED
    iteration: int = -1  # the highest that was heard of
    iteration_now: int = -1  # lower after going back
    stage: Stage = Stage.STARTING
    progress: int = 0  # of its loop, as the last heartbeat said
    progress_planned: int = 0  # when the present plan went out
    epoch_heard: int = 0  # the newest plan that its agent had passed on to it when it spoke of it
    stopped_ms: float | None = None  # seen stopped, not continued
    stop_detect_ms: float | None = None
    exception: ExceptionRaised | None = None  # it said so itself: about to die
    thread_exception: ExceptionRaised | None = None  # ended a thread of it; it lives on
    stalled: WorkerStalled | None = None
    stalled_ms: float = 0.0
    has_tail: bool = False  # it has finished its training, and how its process ends is still to come
    waits_ms: float | None = None  # when its agent, asked, said that it waits for others
    held: str = ""  # incident that says who holds it on purpose, until it is released
    observed: bool = False  # would have been ended, and was not (observe_only); until it goes on
    end_reason: str = ""
    end_tries: int = 0

    @property
    def is_candidate(self) -> bool:
        """Ready for a role, now."""
        return (
            self.phase is WorkerPhase.READY
            and self.purpose in WAITING
            and self.stopped_ms is None
            and self.exception is None
        )

    @property
    def is_coming(self) -> bool:
        """May become a candidate."""
        return (
            self.phase in (WorkerPhase.STARTED, WorkerPhase.UP) and self.purpose in WAITING and self.exception is None
        )

    def move(self, trigger: str) -> None:
        self.phase = next_worker_phase(self.phase, trigger)


@dataclass(slots=True)
class TaskState:
    name: str  # (journal)
    job: Job  # (journal)
    placement: dict[Rank, str] = field(default_factory=dict)  # (journal) role -> node; none for a missing replica's
    guests: dict[Rank, str] = field(default_factory=dict)  # (journal) those beside a node's slots (narrowing.py)
    wide: Job | None = None  # (journal) its job as it was before lost nodes made it narrower; None: it is as it was
    on_gpu: bool = False  # (journal) its cluster's slots are GPUs, or its workers said that they have some
    phase: TaskPhase = TaskPhase.WAITING
    is_held: bool = False  # (journal) suspended by a person
    held_why: str = ""  # (journal)
    leaving: str = ""  # (journal) why it was told to save and leave its slots
    is_pinned: bool = False  # (journal) it could not save when it was told to: it is not asked to make room
    measured_s: dict[int, float] = field(default_factory=dict)  # (journal) replicas -> seconds of an iteration
    meter: tuple[int, int, float] | None = None  # (epoch, iteration, ms) from which iterations are timed
    epoch: int = 0  # (journal) invariant: plan is None or plan.epoch == epoch, and it only grows
    epoch_floor: int = 0  # an agent knew a higher one (a journal was lost): never reuse it
    plan: EpochPlan | None = None  # (journal)
    roles: dict[str, Rank] = field(default_factory=dict)  # worker -> its role in roles_of, a plan; role_of() keeps it
    roles_of: EpochPlan | None = None
    plans: deque[tuple[int, frozenset[int]]] = field(default_factory=deque)  # (epoch, wounded)
    workers: dict[str, WorkerState] = field(default_factory=dict)  # live or ordered
    lost: dict[Rank, str] = field(default_factory=dict)  # roles of `plan` whose holder is dead
    finished: set[Rank] = field(default_factory=set)
    missed: set[Rank] = field(default_factory=set)  # of these: lost behind their loops, and given up
    last_heirs: int = 0  # plans made since the first of them, for who was lost behind its loop
    reports: dict[Rank, CollectiveFailed] = field(default_factory=dict)  # not yet explained
    reports_ripe: bool = False  # the diagnosis moment is over
    report_ms: float = 0.0  # when the first of them came
    awaiting: set[Rank] = field(default_factory=set)  # accounts of the present epoch to come
    # since `plan`, or one before it, not everybody committed an iteration
    is_unhealed: bool = False
    healed: dict[Rank, Healed] = field(default_factory=dict)
    heal_tries: int = 0
    heal_iteration: int = -1  # highest iteration that anybody may have reached before the plan came to it
    heal_low: int = -1  # where the last of its members was when the healing last took longer than it may
    reconnects: dict[int, int] = field(default_factory=dict)  # iteration -> RECONNECTs in it
    refills: dict[Rank, int] = field(default_factory=dict)
    joins: dict[int, int] = field(default_factory=dict)  # replica -> tries
    standby_tries: dict[str, int] = field(default_factory=dict)  # node -> times that standbys were started there
    absent: set[str] = field(default_factory=set)  # STARTING: members that were not up yet at the last look
    is_adopted: bool = False  # the recovery under way is a standby node's: what it takes is learned apart
    standby_why: str = ""  # what was weighed when a node of it was lost, for people
    waits_why: str = ""  # why lost roles wait for a node, for people; '' when they do not
    checkpoint: tuple[int, str] | None = None  # (journal)
    state_lost: str = ""  # why the next plan must be a RESTORE
    is_restarting: bool = False  # (journal) all end, then all start again
    restarts: int = 0  # (journal) workers replaced, or whole restarts
    restart_count: int = 0  # (journal) of StartWorkers
    iteration: int = -1  # highest anybody reported
    iteration_ended: int = -1  # (journal) the same, when it was over
    unbegun_epoch: int = 0  # first of its life, in which a member is known to have died before its first commit
    was_ready: bool = False  # some worker of it was: its script can be built
    unready: dict[Rank, UnreadyDeath] = field(default_factory=dict)  # until then: what each rank died of first
    understudies_lost: int = 0  # in a row: an understudy that cannot start is not tried forever
    guesses: int = 0  # spreads the understudies' guesses
    outcome: str = ""  # (journal) done | stopped
    cause: str = ""  # (journal)
    accounts: Accounts = field(default_factory=Accounts)  # (journal)
    decided_ms: float | None = None  # when the transition under way was decided
    pace: Pace | None = None  # who is slow; learned afresh by a new coordinator
    change: LayoutChange | None = None  # of layout, under way
    change_asked: int = 0  # number of the decision that last asked for one
    change_tries: int = 0  # times that this decision asked: once each, of widths some times
    change_refused: str = ""  # why the last one was called off, for people
    moves: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOVES_KEPT_MAX))  # what they cost
    moving: RoleMove | None = None  # of roles to other nodes, under way
    last_word: Saved | None = None  # of members that saved for good and hold (leaving.py)
    cause_to_stay: str = ""  # why it could not leave, for people

    def move(self, trigger: str) -> None:
        self.phase = next_task_phase(self.phase, trigger)

    @property
    def is_over(self) -> bool:
        return self.phase in ENDED

    @property
    def asked(self) -> Job:
        """Its job in the width that it was asked for."""
        return self.wide or self.job

    @property
    def slotted(self) -> dict[Rank, str]:
        """Roles that have a slot: all but guests."""
        if not self.guests:
            return self.placement
        return {rank: node for rank, node in self.placement.items() if self.guests.get(rank) != node}

    def holder(self, rank: Rank) -> WorkerState | None:
        """The live worker that holds this role in the present plan."""
        member = self.plan.member(rank) if self.plan else None
        return self.workers.get(member.worker) if member else None

    def role_of(self, worker: str) -> Rank | None:
        """The role this worker holds in the present plan."""
        if self.plan is None:
            return None
        if self.roles_of is not self.plan:
            self.roles, self.roles_of = {m.worker: m.rank for m in self.plan.members}, self.plan
        return self.roles.get(worker)

    def nodes(self) -> list[str]:
        return sorted({w.node for w in self.workers.values()}, key=node_order)


@dataclass(slots=True)
class State:
    term: int = 0  # (journal)
    gpu: str = ""  # type of this cluster's slots, from the configuration
    is_started: bool = False
    version: int = 0  # grows with every entry and every change of a node's or a task's phase
    version_decided: int = -1  # of which is known that the allocation is that of its facts
    nodes: dict[str, NodeState] = field(default_factory=dict)
    tasks: dict[str, TaskState] = field(default_factory=dict)
    incidents: dict[str, Incident] = field(default_factory=dict)  # (journal)
    incident_count: int = 0  # (journal)
    allocation: Allocation = field(default_factory=Allocation)  # (journal) what every task shall hold
    planner: Planner | None = None  # tables for the allocation as it stands; made anew, never replayed
    planned: Planned | None = None  # what the newest decision was solved from, for checkers
    num_failures: int = 0  # (journal) of slots and processes, for D_running
    slot_ms: float = 0.0  # (journal) exposure in which they were seen
    waf_history: deque[tuple[float, float]] = field(default_factory=new_history)  # (journal) (ms, FLOP/s)
    sub_healthy: set[str] = field(default_factory=set)  # (journal) incidents whose slots are still missed
    node_faults: dict[str, int] = field(default_factory=dict)  # (journal) failures remembered against a node
    transitions_s: dict[str, tuple[int, float]] = field(default_factory=dict)  # (journal) kind -> (count, seconds)
    worker_counts: dict[str, int] = field(default_factory=dict)  # (journal) per node, never reused
    timers: dict[str, float] = field(default_factory=dict)

    def target(self, task: str) -> dict[Rank, str]:
        """Roles that this task shall hold, and where."""
        return self.allocation.targets.get(task, {})

    def task_of_worker(self, worker: str) -> TaskState | None:
        return next((t for t in self.tasks.values() if worker in t.workers), None)

    def open_incidents(self, task: str) -> list[Incident]:
        return [i for i in self.incidents.values() if i.task == task and i.is_open]


@functools.lru_cache(maxsize=1 << 16)
def node_order(name: str) -> tuple[int, str]:
    """n2 before n10; any other naming gets some fixed order."""
    return len(name), name
