"""Journal entries and their codec: every decision, written before anything it licenses is sent.

An entry is a decision or a fact that no agent could tell again. What agents do know (which workers live, how far
they are) is not here: they say it in their next hello. Replaying the entries in order through `replay.apply_entry`
gives the state a coordinator needs to go on; the live machine changes that part of its state through the same
function, so the two cannot drift apart.

MessagePack with one version byte, like messages.py; an entry that cannot be read stops the coordinator by name
(skipping a decision would be worse than not starting). Later versions read what earlier ones wrote, so a new version
of the format leaves JOURNAL_VERSION_MIN where it is.
"""

from __future__ import annotations

import msgspec

from unicron.coordinator.allocation import Allocation
from unicron.coordinator.incident import Incident
from unicron.coordinator.job import Job
from unicron.messages import UNREADABLE
from unicron.types import EpochPlan, Rank

JOURNAL_VERSION = 2
JOURNAL_VERSION_MIN = 2  # the oldest that is read


class _Entry(msgspec.Struct, frozen=True, tag_field="entry", tag=True, forbid_unknown_fields=True):
    pass


class TermBegan(_Entry, frozen=True):
    term: int


class NodeJoined(_Entry, frozen=True):
    node: str
    incarnation: int
    slots: int
    understudies: int
    store: str
    store_key: str


class NodeDeclaredLost(_Entry, frozen=True):
    node: str
    incarnation: int
    evidence: str


class NodeDrained(_Entry, frozen=True):
    """A person wants the node empty (or, `drained` false, in use again)."""

    node: str
    drained: bool
    reason: str


class NodeChecked(_Entry, frozen=True):
    """What its checks, or its kernel, say of its hardware. `unfit` empties the node until an entry without it."""

    node: str
    unfit: str


class NodeRests(_Entry, frozen=True):
    """It was lost `flaps` times in a short time: it is back, and not used for `rest_ms` (0: it is again)."""

    node: str
    rest_ms: float
    flaps: int


class TaskAdmitted(_Entry, frozen=True):
    """Its job was taken in; what it gets is decided apart, by AllocationDecided."""

    task: str
    job: Job


class AllocationDecided(_Entry, frozen=True):
    """What every task shall hold from now on, with the facts that it was decided from."""

    allocation: Allocation


class TaskHeld(_Entry, frozen=True):
    """A person wants it suspended (or, `held` false, to go on)."""

    task: str
    held: bool
    reason: str


class TaskLeaves(_Entry, frozen=True):
    """It was told to save and to leave its slots."""

    task: str
    reason: str


class TaskStays(_Entry, frozen=True):
    """It was told to leave and could not save: it keeps its slots, and is not asked again to make room."""

    task: str
    reason: str


class TaskOnGpu(_Entry, frozen=True):
    """Its workers have GPUs."""

    task: str


class ThroughputMeasured(_Entry, frozen=True):
    """Seconds of one iteration at this number of replicas."""

    task: str
    replicas: int
    iteration_s: float


class WorkersStarted(_Entry, frozen=True):
    """(worker, incarnation, rank, purpose) each; purpose: member | understudy | refill | joiner."""

    task: str
    node: str
    workers: tuple[tuple[str, int, Rank, str], ...]
    restart_count: int


class RolesPlaced(_Entry, frozen=True):
    """Where the roles live from now on (replaces the former placement). guests: those among them that have no slot
    there, for the moment."""

    task: str
    placement: dict[Rank, str]
    guests: tuple[Rank, ...] = ()


class WidthChanged(_Entry, frozen=True):
    """Lost nodes make the task narrower than `wide`, its job until then. None: it has that width again, or a person
    wants another layout."""

    task: str
    wide: Job | None


class EpochDecided(_Entry, frozen=True):
    plan: EpochPlan


class TaskRestarted(_Entry, frozen=True):
    """All workers end and start again; restore: from the newest checkpoint."""

    task: str
    restart_count: int
    reason: str


class TaskSuspended(_Entry, frozen=True):
    """All its workers end and it holds nothing, until it gets slots again."""

    task: str
    reason: str


class HealingClosed(_Entry, frozen=True):
    """Every member committed an iteration in this epoch: the recovery is over."""

    task: str
    epoch: int


class CheckpointSaved(_Entry, frozen=True):
    task: str
    iteration: int
    path: str


class TransitionMeasured(_Entry, frozen=True):
    """From the decision until the task trained again. kind: start | stop | shrink | grow | restart | standby | move |
    reshape."""

    kind: str
    seconds: float


class Accounted(_Entry, frozen=True):
    """From now on the task spends its time in this way (accounting.py)."""

    task: str
    at_ms: float
    kind: str  # queued | waiting | starting | running | recovering | suspended | over
    slots: int
    waf: float  # FLOP/s, weighted


class IncidentRecorded(_Entry, frozen=True):
    incident: Incident


class TaskEnded(_Entry, frozen=True):
    """Decided: no more recovery. outcome: done | stopped. Written again when it turns out to have got further."""

    task: str
    outcome: str
    cause: str
    iteration: int = -1  # the highest that was heard: nobody is left who could tell it to a new coordinator


Entry = (
    TermBegan
    | NodeJoined
    | NodeDeclaredLost
    | NodeDrained
    | NodeChecked
    | NodeRests
    | TaskAdmitted
    | AllocationDecided
    | TaskHeld
    | TaskLeaves
    | TaskStays
    | TaskOnGpu
    | ThroughputMeasured
    | TransitionMeasured
    | Accounted
    | WorkersStarted
    | RolesPlaced
    | WidthChanged
    | EpochDecided
    | TaskRestarted
    | TaskSuspended
    | HealingClosed
    | CheckpointSaved
    | IncidentRecorded
    | TaskEnded
)


class JournalUnreadable(ValueError):
    """An entry of another version, truncated or unknown. Of `decode_entry` the text goes on after the entry's name."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    return bytes((JOURNAL_VERSION,)) + _encoder.encode(entry)


def decode_entry(data: bytes) -> Entry:
    if not data:
        raise JournalUnreadable(damaged("it is empty"))
    if data[0] > JOURNAL_VERSION:
        raise JournalUnreadable(_newer(f"version {data[0]}, this one reads {JOURNAL_VERSION}"))
    if data[0] < JOURNAL_VERSION_MIN:
        raise JournalUnreadable(
            f"was written by an older unicron (version {data[0]}, this one reads {JOURNAL_VERSION_MIN} and later):"
            " use one between the two first"
        )
    try:
        return _decoder.decode(memoryview(data)[1:])
    except msgspec.ValidationError as error:  # whole, and with a kind or a field that is not known here
        raise JournalUnreadable(_newer(str(error))) from None
    except UNREADABLE as error:
        raise JournalUnreadable(damaged(str(error))) from None


def _newer(how: str) -> str:
    return f"was written by a newer unicron ({how}): use that one, or the copy of the journal made before the upgrade"


def damaged(how: str) -> str:
    return f"is damaged ({how}): restore the copy of the journal"
