"""Journal entries and their codec: every decision, written before anything it licenses is sent.

An entry is a decision or a fact that no agent could tell again. What agents do know (which workers
live, how far
they are) is not here: they say it in their next hello. Replaying the entries in order through
`replay.apply_entry` gives the state a coordinator needs to go on; the live machine changes that
part of its state
through the same function, so the two cannot drift apart.

MessagePack with one version byte, like messages.py; an entry that cannot be read stops the
coordinator by name
(skipping a decision would be worse than not starting).
"""

from __future__ import annotations

import msgspec

from unicron.coordinator.incident import Incident
from unicron.coordinator.job import Job
from unicron.types import EpochPlan, Rank

JOURNAL_VERSION = 1


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


class TaskAdmitted(_Entry, frozen=True):
    task: str
    job: Job
    placement: dict[Rank, str]


class WorkersStarted(_Entry, frozen=True):
    """(worker, incarnation, rank, purpose) each; purpose: member | understudy | refill | joiner."""

    task: str
    node: str
    workers: tuple[tuple[str, int, Rank, str], ...]
    restart_count: int


class RolesPlaced(_Entry, frozen=True):
    """Where the roles live when all start again (replaces the former placement)."""

    task: str
    placement: dict[Rank, str]


class EpochDecided(_Entry, frozen=True):
    plan: EpochPlan


class TaskRestarted(_Entry, frozen=True):
    """All workers end and start again; restore: from the newest checkpoint."""

    task: str
    restart_count: int
    reason: str


class TaskSuspended(_Entry, frozen=True):
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


class IncidentRecorded(_Entry, frozen=True):
    incident: Incident


class TaskEnded(_Entry, frozen=True):
    """Decided: no more recovery. outcome: done | stopped."""

    task: str
    outcome: str
    cause: str


Entry = (
    TermBegan
    | NodeJoined
    | NodeDeclaredLost
    | TaskAdmitted
    | WorkersStarted
    | RolesPlaced
    | EpochDecided
    | TaskRestarted
    | TaskSuspended
    | HealingClosed
    | CheckpointSaved
    | IncidentRecorded
    | TaskEnded
)


class JournalUnreadable(ValueError):
    """An entry of another version, truncated or unknown."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Entry] = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    return bytes((JOURNAL_VERSION,)) + _encoder.encode(entry)


def decode_entry(data: bytes) -> Entry:
    if not data:
        raise JournalUnreadable("empty journal entry")
    if data[0] != JOURNAL_VERSION:
        raise JournalUnreadable(
            f"journal entry version {data[0]}, this unicron reads {JOURNAL_VERSION}"
        )
    try:
        return _decoder.decode(memoryview(data)[1:])
    except msgspec.DecodeError as error:
        raise JournalUnreadable(str(error)) from None
