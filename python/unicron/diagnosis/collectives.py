"""Collectives as ranks' texts tell of them, and the rank that called another one than the rest. Pure.

All members of a group must call the same operation with the same size as number n of the group. Numbers count per
group, so a line that does not say its group can only be compared with care: the same operation, and all but one rank
agree. A report of a mismatch names the ranks that it compared, and what each of them called: that is of one place,
whatever its numbers are, and of two ranks the one with the lower number is behind.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from unicron.diagnosis import naming

_GROUP = re.compile(r"PG GUID (?P<guid>\d+)|\bPG (?:ID )?(?P<id>\d+)\b")
_WORK = re.compile(r"Work[NHX]CCL\((?:SeqNum=(?P<number>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<size>\d+))?")
_OP = (
    r"(?i:_?(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|reduce|barrier|gather|scatter|send|recv))"
    r"\w*"
)
_SIZE = r"\b(?i:numel\w*|size|shape)[ =:]{1,2}\[?"
_PRINT = re.compile(
    r"FingerPrint\((?:SequenceNumber=(?P<number>\d+)(?:, )?)?OpType=(?P<op>\w+)"
    r"(?:, TensorShape=\[(?P<size>[\d, ]*)\])?|"
    rf"\b(?P<op2>{_OP}) (?:(?i:seq\w*)[ =:#]{{1,2}}|#)?(?P<number2>\d+),? (?i:shape)[ =:]{{1,2}}\[(?P<size2>[\d, ]*)\]|"
    rf"(?i:pending|in.?flight|outstanding|blocked in|stuck in|waiting in).{{1,30}}?\b(?P<op3>{_OP})\b.{{1,60}}?"
    rf"\b(?i:seq\w*)[ =:#]{{1,2}}(?P<number3>\d+)(?:.{{1,40}}?{_SIZE}(?P<size3>\d[\d, x]*))?|"
    rf"\b(?i:seq\w*)[ =:#]{{1,2}}(?P<number4>\d+)\W{{1,3}}(?:(?i:op\w*)[ =:]{{1,2}})?(?P<op4>{_OP})\b"
    rf"(?:.{{1,20}}?{_SIZE}(?P<size4>\d[\d, x]*))?"
)
# A line of a list, of what a rank called: "rank 3: ALLREDUCE [4096]", "rank 3 seq=45 op=ALLREDUCE".
_ROW = re.compile(
    r"\s*[Rr]ank (?P<rank>\d{1,7})[: ]\s?(?:(?i:seq\w*|#)[ =:#]{0,2}(?P<number>\d+)\W{1,3}(?:op\w*[ =:]{1,2})?)?"
    rf"(?P<op>{_OP})\b(?:\W{{1,3}}(?:(?i:seq\w*)[ =:#]{{1,2}}|#)(?P<number2>\d+))?"
    r"(?:.{1,12}?\[(?P<size>\d[\d, x]*)\])?"
)
_AT_NUMBER = re.compile(
    rf"\b[Rr]anks? \[?(?P<ranks>{naming.NUMBERS})\]?(?:: | (?:(?:is|are) )?at )"
    r"(?:(?i:seq\w*|collective|step)[ =:#]{1,2})?#?(?P<number>\d+)\b"
)
# What a report says that others called.
_CALLED = re.compile(
    rf"\b[Rr]anks? \[?(?P<ranks>{naming.NUMBERS})\]? (?:(?:is|are|has|have|was|were) )?"
    r"(?:(?:running|called|calls|calling|entered|issued|launched|executing|in|at) (?:inconsistent )?(?:collective:? ?)?"
    rf"(?:Collective(?=FingerPrint)|(?P<op>{_OP})\b(?:.{{0,3}}\b(?i:seq\w*|#)[ =:#]{{0,2}}(?P<number>\d+))?)|"
    r"(?:inconsistent )?(?P<size>\d+ \w+)(?=,|\.|$| while))"
)
# Operations whose members may bring different sizes.
_UNEVEN = re.compile(r"(?i)all_?to_?all|coalesced|\b(?:send|recv|gather|scatter|unknown|barrier)\b")
UNKNOWN_GROUP = "default"
LISTED = "listed"  # of a list with a rank a line: only of use where somebody speaks of a mismatch
TOLD = "told"  # the place of what one report says of several ranks
TIMED_OUT = " timed out"  # after a group's name: the number is of the collective that timed out


# Between two ranks: their numbers are not those of a group.
PAIRED = re.compile(r"(?i)send|recv")
_MEMBER = re.compile(r"\bRank (?P<member>\d{1,7})\]")


class Collective(msgspec.Struct, frozen=True):
    group: str
    number: int | None  # counted by the group
    op: str
    size: str  # as said, "" when it was not
    is_print: bool = False  # out of a comparison between the members: the group is one
    member: str = ""  # its rank's number in the group, as the line says it

    @property
    def place(self) -> str:
        """Where it has to be compared: what is said to be of one place is, whatever its number."""
        if self.group in (TOLD, LISTED):
            return self.group
        return f"{self.group} {self.number}"


TOLD_PROGRESS = f"{TOLD}{TIMED_OUT}"  # the group of numbers that one line says of several ranks


class Odd(msgspec.Struct, frozen=True):
    """A collective that members called differently. `root` is the one that differs, None when that cannot be said."""

    ranks: tuple[str, ...]
    root: str | None
    words: str


def group_of(line: str) -> str:
    """The process group a line names, UNKNOWN_GROUP if it names none."""
    found = _GROUP.search(line)
    return (found["guid"] or found["id"]) if found else UNKNOWN_GROUP


def member_of(line: str) -> str:
    """The rank's number in its group as a watchdog says it, "" if it does not."""
    found = _MEMBER.search(line)
    return found["member"] if found else ""


def are_mixed(members: Iterable[str]) -> bool:
    """Do two ranks say that they are the same member of what looks like one group? Then these are several groups."""
    known = [member for member in members if member]
    return len(known) != len(set(known))


def collective_of(line: str) -> Collective | None:
    """The collective that a line says its rank is in."""
    found = _WORK.search(line)
    if found is not None:
        return Collective(
            group_of(line), _count(found["number"]), found["op"], found["size"] or "", member=member_of(line)
        )
    return _printed(line, UNKNOWN_GROUP)


def _printed(line: str, group: str) -> Collective | None:
    found = _PRINT.search(line)
    if found is None:
        return None
    said = {"number": "", "op": "", "size": ""}
    for name, text in found.groupdict("").items():
        said[name.rstrip("234")] += text
    return Collective(group, _count(said["number"]), said["op"].upper(), said["size"].strip(), is_print=True)


def told(line: str) -> Iterator[tuple[str, Collective]]:
    """The ranks that a line compares, and what it says that each of them called; nothing if there are not several."""
    if "ank" not in line:
        return
    is_inconsistent = "inconsistent" in line
    found = [match for match in _CALLED.finditer(line) if is_inconsistent or not match["size"]]
    if len(found) < 2:
        return
    ends = [match.start() for match in found[1:]] + [len(line)]
    for match, end in zip(found, ends, strict=True):
        op, size = match["op"] or "", match["size"] or ""
        called = Collective(TOLD, _count(match["number"]), op.upper(), size, is_print=True)
        if not op and not size:
            called = _printed(line[match.end() : end], TOLD) or called
        for rank in naming.numbers(match["ranks"]):
            yield rank, called


def row_of(line: str) -> tuple[str, Collective] | None:
    """The rank and its collective in a line of a list."""
    found = _ROW.match(line)
    if found is None:
        return None
    number = _count(found["number"] or found["number2"])
    return found["rank"], Collective(LISTED, number, found["op"].upper(), found["size"] or "")


def at_numbers(line: str) -> dict[str, int]:
    """How far several ranks are, by one line."""
    found = list(_AT_NUMBER.finditer(line)) if "seq" in line or "collective" in line else []
    if len(found) < 2:
        return {}
    return {rank: int(match["number"][:18]) for match in found for rank in naming.numbers(match["ranks"])}


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
    if are_mixed(call.member for call in members.values()):
        return None
    first = next(iter(members.values()))
    is_told = first.group in (TOLD, LISTED)
    calls = {
        rank: (call.op, "" if _UNEVEN.search(call.op) else call.size, call.number if is_told else None)
        for rank, call in members.items()
    }
    counts = Counter(calls.values())
    if len(counts) < 2:
        return None
    (usual, num_usual), *others = counts.most_common()
    odd = sorted((rank for rank, call in calls.items() if call != usual), key=naming.as_number)
    is_alone = len(others) == 1 and 2 * len(odd) <= num_usual
    if first.group == UNKNOWN_GROUP and not first.is_print:
        if not is_alone or len(odd) > 1 or len({call[0] for call in counts}) > 1:
            return None
    said = " and ".join(sorted(_words(*call) for call in counts))
    root = ",".join(odd) if is_alone else _behind(members) if is_told else None
    return Odd(tuple(sorted(members)), root, f"members called {said}")


def _behind(members: Mapping[str, Collective]) -> str | None:
    """Of two that were compared, the one whose collective has the lower number."""
    numbers = {rank: call.number for rank, call in members.items() if call.number is not None}
    if len(members) != 2 or len(set(numbers.values())) != 2:
        return None
    return min(numbers, key=lambda rank: numbers[rank])


def _words(op: str, size: str, number: int | None) -> str:
    where = f" #{number}" if number is not None else ""
    return f"{op}{where} of {size or '?'}"


def _count(digits: str | None) -> int | None:
    """Of a number that somebody may have torn or made up: its first digits."""
    return int(digits[:18]) if digits else None
