"""An incident: one failure with its root, severity, timeline and cost. Symptoms fold into it.

Times are the coordinator's. `detect_ms` ends when the coordinator knows, or on a node with another clock when its agent
does. All three of detect, decide and resume count from the fault itself where its time is known, else from its sight.
"""

from __future__ import annotations

import msgspec

from unicron.types import Method, Outcome, PlanKind, Rank, Severity, Stage, StateSource


class StateTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that came from another process, as measured, and as judged by coordinator/bandwidth.py."""

    rank: Rank  # of the role that got it
    source: str  # node
    target: str
    interface: str
    nbytes: int
    ms: float
    is_local: bool = False  # it stayed on one machine: no network is to blame
    rated_mb_s: float = 0.0  # of the slower end's interface; 0: not known
    slow: str = ""  # why it counts as slow

    @property
    def mb_s(self) -> float:
        return self.nbytes / 1000 / self.ms


class Incident(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    task: str
    # worker lost | exception | stopped | stalled | connection | node lost | state lost | slow | held | hardware
    fault: str
    severity: Severity
    node: str
    rank: Rank  # -1: no role was involved
    method: Method
    opened_ms: float
    cause: str = ""
    text: str = ""
    where: str = ""
    log: str = ""
    worker: str = ""
    incarnation: int = -1
    # what must not come back at the same place; '' = says nothing about the code
    signature: str = ""
    iteration: int = -1
    micro_batch: int = -1
    stage: Stage = Stage.IDLE
    detect_ms: float | None = None
    decide_ms: float | None = None
    resume_ms: float | None = None
    lost_ms: float | None = None  # None: not known
    state_source: StateSource = StateSource.NONE_NEEDED
    transfers: tuple[StateTransfer, ...] = ()  # of state between processes
    iterations_lost: int | None = 0  # None: a script without unicron goes back by itself, who knows how far
    micro_batches_recomputed: int = 0
    groups_kept: int = 0
    groups_rebuilt: int = 0
    recompute_ms: float = 0.0  # of the micro-batches computed again, on the slowest rank
    phases_ms: dict[str, float] = {}  # of the recovery, each on the rank that took longest
    epoch: int = 0  # the plan that answers it; 0: not decided yet
    kind: PlanKind | None = None
    outcome: Outcome | None = None  # None: open
    slots: int = 0  # that the task held when it failed
    missing_slots: int = 0  # of them, those it went on without
    healthy_ms: float | None = None  # when their node was back and the task as wide as was decided
    # what python/unicron/diagnosis says of cause and text
    category: str = ""
    rule: str = ""  # family.what
    scope: str = ""  # gpu | node | link | process | job | storage
    meaning: str = ""
    is_only_told: bool = False  # nobody is lost and nothing was done: slow, held, observed only, a thread
    part_of: str = ""  # a worker's death that turned out to be its node's
    timeline: tuple[tuple[float, str], ...] = ()

    @property
    def is_open(self) -> bool:
        return self.outcome is None
