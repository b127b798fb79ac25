"""Lines in, findings out: every rule is asked of every line that could meet it, in bounded memory.

What makes it fast enough for a log of a gigabyte: nearly all lines of a log have one of few *shapes* (the line in lower
case without its digits). Which families of rules a shape can meet is asked once and remembered; a line whose shape
meets none costs a dictionary look-up. What bounds it: one finding per rule and rank is kept, with its first and last
line's facts and a count; ranks, shapes and groups have a maximum.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

import msgspec

from unicron.diagnosis import lines, sxid, xid
from unicron.diagnosis.rules import FAMILIES
from unicron.diagnosis.words import Family, Finding, Progress, Rule, Strength

RANKS_MAX = 65_536  # further ones count as nobody
SHAPES_MAX = 8192
SHAPE_CHARS_MAX = 512  # a longer one is not remembered
GROUPS_MAX = 4096  # of one rank
SUMMARY_LINES = 5  # of torchrun's summary of a rank
TEXT_CHARS_MAX = 400  # kept of a line

_NO_DIGITS = str.maketrans("", "", "0123456789")
_ALSO = re.compile("xid|nvswitch|enqueued|workn|local_rank")  # read here, not by rules
_PROGRESS = re.compile(r"last enqueued|enqueued=|WorkNCCL\(SeqNum=")
_SUMMARY = re.compile(r"\s*rank\s*: (?P<rank>\d+) \(local_rank: ")
_ENQUEUED = re.compile(
    r"(?:(?P<group>[\w\-.]+)[ :]+)?enqueued[= ](?P<enqueued>\d+)[ ,;]+completed[= ](?P<completed>\d+)|"
    r"last enqueued (?:NCCL )?work: (?P<enqueued2>\d+), last completed (?:NCCL )?work: (?P<completed2>\d+)"
)
_GROUP = re.compile(r"\bPG (?:ID )?(?P<id>\d+)(?:[ (]|\b)|PG GUID (?P<guid>\d+)")
_SEQUENCE = re.compile(r"WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<op>\w+)")


class RankText(msgspec.Struct):
    """What was understood of one rank's text."""

    findings: dict[str, Finding] = {}  # by rule; the first line's facts
    progress: dict[str, Progress] = {}  # by process group
    num_lines: int = 0
    last: str = ""  # its last line that is not empty, cut
    about: str = ""  # whom a launcher's summary speaks of
    about_lines: int = 0  # for so many lines more


class Reader:
    """Feed it lines of ranks, in any order between ranks; then look at `ranks`.

    Args:
        known: the ranks there are, when that is known; a line that speaks of another one belongs to its speaker.
    """

    def __init__(self, known: Collection[str] | None = None, families: tuple[Family, ...] = FAMILIES) -> None:
        self.ranks: dict[str, RankText] = {}
        self.num_lines = 0
        self._known = known
        self._families = families
        self._shapes: dict[str, tuple[Family, ...] | None] = {}

    def read(self, rank: str, text: str) -> None:
        """A whole text of one rank."""
        self._entry(rank)
        for line in text.splitlines():
            for piece in lines.pieces(line):
                self.feed(rank, piece)

    def read_unranked(self, rows: Iterable[str], *, labelled: bool = False) -> None:
        """Lines of many ranks with the prefixes of lines.py, or of one without any."""
        for rank, line in lines.ranked(rows, labelled=labelled):
            self.feed(rank, line)

    def feed(self, rank: str, line: str) -> None:
        """One line without its end, not longer than lines.LINE_CHARS_MAX."""
        entry = self._entry(rank)
        entry.num_lines += 1
        self.num_lines += 1
        if not line or line.isspace():
            return
        entry.last = line
        if entry.about_lines:
            entry.about_lines -= 1
        families = self._families_of(line)
        if families is not None:
            self._ask(entry, rank, line, families)

    def _entry(self, rank: str) -> RankText:
        entry = self.ranks.get(rank)
        if entry is None:
            rank = rank if len(self.ranks) < RANKS_MAX else ""
            entry = self.ranks.setdefault(rank, RankText())
        return entry

    def _families_of(self, line: str) -> tuple[Family, ...] | None:
        """Whose rules this line could meet; None: it has nothing for anybody."""
        shape = line.translate(_NO_DIGITS)
        if shape in self._shapes:
            return self._shapes[shape]
        low = shape.lower()
        found = tuple(family for family in self._families if family.trigger_regex.search(low))
        result = found if found or _ALSO.search(low) else None
        if len(shape) <= SHAPE_CHARS_MAX:
            if len(self._shapes) >= SHAPES_MAX:
                self._shapes.clear()
            self._shapes[shape] = result
        return result

    # ---------------------------------------------------------------- one line

    def _ask(self, entry: RankText, rank: str, line: str, families: tuple[Family, ...]) -> None:
        number = entry.num_lines
        summary = _SUMMARY.match(line)
        if summary is not None:
            entry.about, entry.about_lines = summary["rank"], SUMMARY_LINES
        about = entry.about if entry.about_lines else ""
        finding = _hardware(line)
        if finding is None:
            rule, found = best_rule(line, families)
            if rule is not None and found is not None:
                groups = found.groupdict()
                about = groups.get("rank") or about
                finding = Finding(
                    rule.name, rule.severity, rule.scope, rule.category, rule.strength, rule.reason,
                    peer=groups.get("peer") or "",
                )  # fmt: skip
        named = about or (lines.speaker(line) if rank == "" else "")
        if named and (self._known is None or named in self._known):
            rank, entry = named, self._entry(named)
        _note_progress(entry, line)
        if finding is not None:
            self._keep(entry, rank, line, number, finding)

    def _keep(self, entry: RankText, rank: str, line: str, number: int, finding: Finding) -> None:
        known = entry.findings.get(finding.rule)
        if known is not None:
            entry.findings[finding.rule] = msgspec.structs.replace(known, count=known.count + 1)
            return
        entry.findings[finding.rule] = msgspec.structs.replace(
            finding, rank=rank, text=line.strip()[:TEXT_CHARS_MAX], line=number, at_s=lines.when_s(line)
        )


def best_rule(line: str, families: Iterable[Family]) -> tuple[Rule | None, re.Match[str] | None]:
    """The strongest rule that a line meets, the first of equal ones; generic exceptions only without any other."""
    best: Rule | None = None
    match: re.Match[str] | None = None
    for family in families:
        for rule in family.rules:
            if best is not None and not rule.is_final:
                if rule.strength <= best.strength or rule.strength is Strength.EXCEPTION:
                    continue
            found = rule.regex.search(line)
            if found is not None:
                best, match = rule, found
                if rule.is_final:
                    return best, match
    return best, match


def _hardware(line: str) -> Finding | None:
    """Xid and SXid lines have decoders instead of patterns."""
    if "Xid" not in line and "XID" not in line and "NVSwitch" not in line:
        return None
    return sxid.decode(line) or xid.decode(line)


def _note_progress(entry: RankText, line: str) -> None:
    """Numbers of collectives that a line states, by process group. Numbers of different groups are never compared."""
    if not _PROGRESS.search(line):
        return
    if len(entry.progress) >= GROUPS_MAX:
        return
    found = _ENQUEUED.search(line)
    if found is not None:
        group = found["group"] or _group_of(line)
        enqueued, completed = found["enqueued"] or found["enqueued2"], found["completed"] or found["completed2"]
        entry.progress[group] = Progress(int(enqueued), int(completed))
        return
    sequence = _SEQUENCE.search(line)
    if sequence is not None:
        entry.progress.setdefault(f"{_group_of(line)} timed out", Progress(int(sequence["number"])))


def _group_of(line: str) -> str:
    found = _GROUP.search(line)
    return (found["id"] or found["guid"]) if found else "default"
