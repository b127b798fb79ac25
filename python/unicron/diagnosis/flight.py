"""Who is guilty of a hang, out of the NCCL flight recorder dumps of many ranks. Pure.

Every rank's oldest collective that has not ended says whom it waits for: the members of that group which have not
started it, or the other end of a send. Following those edges ends at the ranks that all wait for and that wait for
nobody: they are the guilty. Two more signs need no edge: a rank whose device no longer ends what its peers have ended
(a GPU that stopped), and a rank that wrote no dump. Before all that, members that called different operations, sizes or
types as the same number of a group have a bug, and whoever waits then is no evidence.

Numbers count per process group and are compared inside one only. Point-to-point operations number differently on every
rank, so they give edges and no comparison. The status of a group is filed under the rank's own number of it; where no
entry says which group that is, both lists in order of creation do, if they are of one length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from unicron.diagnosis.collectives import Collective, odd_one
from unicron.diagnosis.words import Category, Diagnosis, Finding, Scope, Strength
from unicron.types import Rank, Severity

RANKS_MAX = 1 << 20
LEAD_MIN = 1  # collectives that peers must have ended beyond one that a rank has not: less may be the time of the dump
_RANKS = re.compile(r"\d{1,7}")
_P2P = re.compile(r"(?P<what>send|recv) (?P<own>\d+)(?:->|<-)(?P<other>\d+)")


class Entry(msgspec.Struct, frozen=True):
    """A collective as one rank recorded it."""

    group: str
    number: int
    op: str
    sizes: str
    types: str
    is_ended: bool
    is_p2p: bool
    other: int | None = None  # the other end of a send or receive, as an index into the group


class RankDump(msgspec.Struct, frozen=True):
    """One rank's dump. Groups are named as torch names them; enqueued and completed are the newest numbers of each."""

    rank: Rank
    groups: dict[str, tuple[Rank, ...]]
    enqueued: dict[str, int]
    completed: dict[str, int]
    entries: tuple[Entry, ...]  # oldest first

    def oldest_pending(self) -> Entry | None:
        return next((entry for entry in self.entries if not entry.is_ended), None)


# ---------------------------------------------------------------- reading a plain value


def parse_dump(rank: Rank, value: Any) -> RankDump:
    """A rank's dump out of the plain value of its file (dump.py). What is missing or odd in it is left out.

    Raises:
        ValueError: it is no dump at all.
    """
    content = {"entries": value} if isinstance(value, list) else value
    if not isinstance(content, dict) or not isinstance(content.get("entries"), list):
        raise ValueError("has no list of entries: it is not a flight recorder dump")
    rows = [row for row in content["entries"] if isinstance(row, dict)]
    rows.sort(key=lambda row: _number(row.get("record_id"), 0))
    groups = _groups(content.get("pg_config"))
    enqueued, completed = _status(content.get("pg_status"), _local_names(rows), groups)
    return RankDump(rank, groups, enqueued, completed, tuple(_entry(row) for row in rows))


def _number(value: Any, otherwise: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str | float):
        return otherwise
    try:
        return int(value)
    except (ValueError, OverflowError):
        return otherwise


def _groups(config: Any) -> dict[str, tuple[Rank, ...]]:
    groups: dict[str, tuple[Rank, ...]] = {}
    for key, row in config.items() if isinstance(config, dict) else ():
        if isinstance(row, dict):
            ranks = row.get("ranks")
            text = ranks if isinstance(ranks, str) else str(ranks if isinstance(ranks, list | tuple) else "")
            groups[str(row.get("name", key))] = tuple(int(number) for number in _RANKS.findall(text))
    return groups


def _group_name(row: Mapping[str, Any]) -> str:
    group = row.get("process_group")
    return str(group[0]) if isinstance(group, list | tuple) and group else str(row.get("pg_id", ""))


def _local_names(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The rank's own number of a group -> its name, as far as entries tell."""
    return {str(row["pg_id"]): _group_name(row) for row in rows if "pg_id" in row}


def _status(status: Any, known: Mapping[str, str], groups: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    enqueued: dict[str, int] = {}
    completed: dict[str, int] = {}
    rows = {str(key): row for key, row in status.items() if isinstance(row, dict)} if isinstance(status, dict) else {}
    in_order = sorted(rows, key=lambda key: _number(key, 0))
    created = sorted(groups, key=lambda name: _number(name, 0))
    by_order = dict(zip(in_order, created, strict=True)) if len(rows) == len(groups) else {}
    for key in in_order:
        name = known.get(key) or by_order.get(key)
        if name is not None:
            enqueued[name] = _number(rows[key].get("last_enqueued_collective"), -1)
            completed[name] = _number(rows[key].get("last_completed_collective"), -1)
    return enqueued, completed


def _entry(row: Mapping[str, Any]) -> Entry:
    op = str(row.get("profiling_name", "")).split(":", 1)[-1]
    is_p2p = bool(row.get("is_p2p"))
    found = _P2P.search(op)
    number = row.get("p2p_seq_id") if is_p2p else row.get("collective_seq_id", row.get("seq_id"))
    return Entry(
        group=_group_name(row),
        number=_number(number, -1),
        op=found["what"] if found else op,
        sizes=str(row.get("input_sizes", "")),
        types=str(row.get("input_dtypes", "")),
        is_ended=row.get("state") == "completed" or bool(row.get("retired")),
        is_p2p=is_p2p,
        other=int(found["other"]) if found else None,
    )


# ---------------------------------------------------------------- who waits for whom


class Hang(msgspec.Struct, frozen=True):
    """What the dumps of a task say.

    `waits` is who waits for whom by the oldest pending collective, `stopped` whose device ends nothing any more,
    `missing` who wrote no dump, `reasons` one sentence for each guilty rank.
    """

    guilty: tuple[Rank, ...]
    stopped: tuple[Rank, ...]
    missing: tuple[Rank, ...]
    waits: dict[Rank, tuple[Rank, ...]]
    reasons: dict[Rank, str]
    mismatch: str = ""  # the collective that members called differently
    in_circle: bool = False  # everybody waits for somebody: no rank is to blame


def analyse(dumps: Mapping[Rank, RankDump]) -> Hang:
    """The guilty ranks of a hang. `dumps`: by rank, at least one."""
    missing = _missing(dumps)
    odd = odd_one({str(rank): _collectives(dump) for rank, dump in dumps.items()})
    if odd is not None:
        odd_ranks = (int(odd.root),) if odd.root is not None else ()
        reasons = dict.fromkeys(odd_ranks, odd.words)
        return Hang(odd_ranks, (), missing, {}, reasons, mismatch=odd.words)
    stopped = tuple(rank for rank in sorted(dumps) if _is_stopped(dumps[rank], dumps))
    waits = {rank: _waits_for(dump, dumps) for rank, dump in sorted(dumps.items()) if rank not in stopped}
    waited_for = {other for others in waits.values() for other in others}
    idle = {rank for rank in waited_for if not waits.get(rank)} - set(stopped)
    guilty = tuple(sorted({*stopped, *idle})) or missing
    reasons = {rank: _reason(rank, stopped, missing, waits) for rank in guilty}
    return Hang(guilty, stopped, missing, waits, reasons, in_circle=bool(waited_for) and not guilty)


def _missing(dumps: Mapping[Rank, RankDump]) -> tuple[Rank, ...]:
    """Ranks that others have in a group and that wrote nothing."""
    known = {rank for dump in dumps.values() for ranks in dump.groups.values() for rank in ranks}
    return tuple(sorted(known - dumps.keys()))[:RANKS_MAX]


def _collectives(dump: RankDump) -> dict[str, Collective]:
    calls: dict[str, Collective] = {}
    for entry in dump.entries:
        if not entry.is_p2p and entry.number >= 0:
            call = Collective(entry.group, entry.number, f"{entry.op} {entry.types}", entry.sizes, is_print=True)
            calls[call.place] = call
    return calls


def _is_stopped(dump: RankDump, dumps: Mapping[Rank, RankDump]) -> bool:
    """Peers have ended more of a group than this rank has, though it started them: its device stands still."""
    for entry in dump.entries:
        if entry.is_ended or entry.is_p2p:
            continue
        for rank in dump.groups.get(entry.group, ()):
            peer = dumps.get(rank)
            if peer is not None and peer.completed.get(entry.group, -1) >= entry.number + LEAD_MIN:
                return True
    return False


def _waits_for(dump: RankDump, dumps: Mapping[Rank, RankDump]) -> tuple[Rank, ...]:
    """The ranks that its oldest pending collective needs and that have not started it."""
    entry = dump.oldest_pending()
    if entry is None:
        return ()
    members = dump.groups.get(entry.group, ())
    if entry.is_p2p:
        return _other_end(dump, entry, members, dumps)
    late = []
    for rank in members:
        peer = dumps.get(rank)
        if rank != dump.rank and (peer is None or peer.enqueued.get(entry.group, entry.number) < entry.number):
            late.append(rank)
    return tuple(late)


def _other_end(
    dump: RankDump, entry: Entry, members: tuple[Rank, ...], dumps: Mapping[Rank, RankDump]
) -> tuple[Rank, ...]:
    """The other end of a send or receive, unless that one waits in the same transfer."""
    if entry.other is None or entry.other >= len(members):
        return ()
    other = members[entry.other]
    peer = dumps.get(other)
    theirs = peer.oldest_pending() if peer is not None else None
    if theirs is not None and theirs.is_p2p and theirs.group == entry.group and theirs.op != entry.op:
        if theirs.other is not None and theirs.other < len(members) and members[theirs.other] == dump.rank:
            return ()
    return (other,)


def _reason(
    rank: Rank, stopped: tuple[Rank, ...], missing: tuple[Rank, ...], waits: Mapping[Rank, tuple[Rank, ...]]
) -> str:
    if rank in stopped:
        return "its device no longer ends collectives that its peers have ended"
    waiting = [other for other, targets in waits.items() if rank in targets]
    told = f"ranks {', '.join(map(str, waiting[:8]))}{' ...' if len(waiting) > 8 else ''} wait for it"
    if rank in missing:
        return f"wrote no dump; {told}" if waiting else "wrote no dump"
    return f"did not start the collective that {told.replace(' wait for it', ' wait in')}, and waits for nobody"


# ---------------------------------------------------------------- as a diagnosis


def diagnose_dumps(dumps: Mapping[Rank, RankDump]) -> Diagnosis:
    """The diagnosis of flight recorder dumps, in the words of log diagnosis."""
    hang = analyse(dumps)
    severity, scope, category = Severity.SEV2, Scope.PROCESS, Category.TASK_HANG
    if hang.mismatch:
        severity, scope, category = Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE
        reason = f"{hang.mismatch} at the same place: code or data that differ between ranks"
    elif hang.guilty:
        if set(hang.guilty) <= set(hang.stopped):
            category = Category.OTHER_CUDA
        reason = "; ".join(f"rank {rank} {hang.reasons[rank]}" for rank in hang.guilty[:4])
        reason += f"; and {len(hang.guilty) - 4} more" if len(hang.guilty) > 4 else ""
    elif hang.in_circle:
        severity, scope = Severity.FATAL, Scope.JOB
        reason = "every rank waits for another one, in a circle: the order of collectives differs between ranks"
    elif any(dump.oldest_pending() for dump in dumps.values()):
        severity, scope, category = Severity.SEV3, Scope.LINK, Category.NCCL_TIMEOUT
        reason = "all members started the collective and none ended it: a link, or what carries it"
    else:
        severity, category, reason = Severity.INFO, Category.NONE, "no rank has a collective that has not ended"
    root = ",".join(map(str, hang.guilty)) or None
    evidence = tuple(_finding(rank, dumps.get(rank), hang) for rank in sorted({*dumps, *hang.missing}))
    evidence = tuple(sorted(evidence, key=lambda finding: -finding.strength))
    return Diagnosis(severity, scope, category, reason, root, "flight", evidence)


def _finding(rank: Rank, dump: RankDump | None, hang: Hang) -> Finding:
    """One line of evidence of a rank."""
    is_guilty = rank in hang.guilty
    strength = Strength.CAUSE if is_guilty else Strength.ECHO
    category = Category.TASK_HANG if is_guilty else Category.NCCL_TIMEOUT
    pending = dump.oldest_pending() if dump is not None else None
    if dump is None:
        text = "no dump"
    elif pending is None:
        text = "nothing pending"
    else:
        text = f"{pending.op} number {pending.number} of group {pending.group} pending"
    targets = hang.waits.get(rank, ())
    if targets:
        text += f", waits for {', '.join(map(str, targets[:8]))}"
    reason = hang.reasons.get(rank, "waits")
    return Finding("flight", Severity.SEV2, Scope.PROCESS, category, strength, reason, str(rank), text)
