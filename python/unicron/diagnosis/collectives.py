"""Collectives as ranks' texts tell of them, and the rank that called another one than the rest. Pure.

All members of a group must call the same operation with the same size as number n of the group. Numbers count per
group, so a line that does not say its group can only be compared with care: the same operation, and all but one rank
agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import msgspec

_GROUP = re.compile(r"PG GUID (?P<guid>\d+)|\bPG (?:ID )?(?P<id>\d+)\b")
_WORK = re.compile(r"WorkNCCL\((?:SeqNum=(?P<number>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<size>\d+))?")
_PRINT = re.compile(
    r"FingerPrint\((?:SequenceNumber=(?P<number>\d+), )?OpType=(?P<op>\w+)(?:, TensorShape=\[(?P<size>[\d, ]*)\])?|"
    r"\b(?P<op2>_?(?:ALL_?REDUCE|ALL_?GATHER|REDUCE_?SCATTER|BROADCAST|REDUCE)\w*) (?P<number2>\d+) "
    r"shape[ =]\[(?P<size2>[\d, ]*)\]"
)
# Operations whose members may bring different sizes.
_UNEVEN = re.compile(r"(?i)all_?to_?all|coalesced|\b(?:send|recv|gather|scatter|unknown|barrier)\b")
UNKNOWN_GROUP = "default"
TIMED_OUT = " timed out"  # after a group's name: the number is of the collective that timed out


class Collective(msgspec.Struct, frozen=True):
    group: str
    number: int | None  # counted by the group
    op: str
    size: str  # as said, "" when it was not
    is_print: bool = False  # out of a comparison between the members: the group is one

    @property
    def place(self) -> str:
        return f"{self.group} {self.number}"


class Odd(msgspec.Struct, frozen=True):
    """A collective that members called differently. `root` is the one that differs, None when that cannot be said."""

    ranks: tuple[str, ...]
    root: str | None
    words: str


def group_of(line: str) -> str:
    """The process group a line names, UNKNOWN_GROUP if it names none."""
    found = _GROUP.search(line)
    return (found["guid"] or found["id"]) if found else UNKNOWN_GROUP


def collective_of(line: str) -> Collective | None:
    """The collective that a line says its rank is in."""
    found = _WORK.search(line)
    if found is not None:
        number = found["number"]
        return Collective(group_of(line), int(number[:18]) if number else None, found["op"], found["size"] or "")
    found = _PRINT.search(line)
    if found is None:
        return None
    number = found["number"] or found["number2"]
    size = found["size"] if found["op"] else found["size2"]
    op = found["op"] or found["op2"]
    return Collective(UNKNOWN_GROUP, int(number[:18]) if number else None, op, size or "", is_print=True)


def odd_one(collectives: Mapping[str, Mapping[str, Collective]]) -> Odd | None:
    """The first collective, by group and number, that its members called differently.

    Args:
        collectives: rank -> place -> collective.
    """
    places: dict[str, dict[str, Collective]] = {}
    for rank in sorted(collectives):
        for place, collective in collectives[rank].items():
            places.setdefault(place, {})[rank] = collective
    for place in sorted(places):
        found = _odd_at(places[place])
        if found is not None:
            return found
    return None


def _odd_at(members: Mapping[str, Collective]) -> Odd | None:
    calls = {rank: (call.op, "" if _UNEVEN.search(call.op) else call.size) for rank, call in members.items()}
    counts = Counter(calls.values())
    if len(counts) < 2:
        return None
    (usual, num_usual), *others = counts.most_common()
    root = next(iter(sorted(rank for rank, call in calls.items() if call != usual)))
    is_alone = len(others) == 1 and others[0][1] == 1 and num_usual >= 2
    first = next(iter(members.values()))
    if first.group == UNKNOWN_GROUP and not first.is_print:
        if not is_alone or len({op for op, _ in counts}) > 1:
            return None
    said = " and ".join(sorted(f"{op} of {size or '?'}" for op, size in counts))
    return Odd(tuple(sorted(members)), root if is_alone else None, f"members called {said}")
