"""Lines in, findings out: every rule is asked of every line that could meet it, in bounded memory.

What makes it fast enough for a log of a gigabyte: nearly all lines of a log have one of few *shapes* (the line with all
digits the same). Which rules a shape could meet is found out once and remembered (literals.py); a line whose shape
meets none costs a dictionary look-up. What bounds it: one finding per rule and rank is kept, with its first line's
facts and a count; ranks, shapes, groups and collectives have a maximum.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable

import msgspec

from unicron.diagnosis import lines, literals, sxid, xid
from unicron.diagnosis.collectives import Collective, collective_of, group_of
from unicron.diagnosis.rules import RULES
from unicron.diagnosis.words import Finding, Progress, Rule, Strength

RANKS_MAX = 65_536  # further ones count as nobody
SHAPES_MAX = 8192
SHAPE_CHARS_MAX = 512  # a longer one is not remembered
GROUPS_MAX = 4096  # of one rank
SUMMARY_LINES = 5  # of torchrun's summary of a rank
TEXT_CHARS_MAX = 400  # kept of a line

_ALSO = re.compile("xid|nvswitch|enqueued|workn|shape|local_rank")  # read here, not by rules
_COUNTED = ("nqueued", "WorkNCCL(", "FingerPrint(", " shape")  # a line with one may say how far a rank is
_SUMMARY = re.compile(r"\s*rank\s*: (?P<rank>\d{1,7}) \(local_rank: ")
_PEER = re.compile(r"\bpeer (?P<host>[\w.-]{1,80})<\d+>")
_TASK = re.compile(r"\bsrun: error: [\w.-]{1,80}: task (?P<rank>\d{1,7}): ")
_ENQUEUED = re.compile(
    r"(?:(?P<group>[\w\-.]+)[ :]+)?enqueued[= ](?P<enqueued>\d+)[ ,;]+completed[= ](?P<completed>\d+)|"
    r"last enqueued (?:NCCL )?work: (?P<enqueued2>\d+), last completed (?:NCCL )?work: (?P<completed2>\d+)"
)


def _index(rules: tuple[Rule, ...]) -> literals.WordIndex:
    return literals.WordIndex(rule.words for rule in rules)


@functools.cache
def _index_of_all() -> literals.WordIndex:
    return _index(RULES)


def warm_up() -> None:
    """Compile every pattern now: done at the first text that needs it, it costs half a second."""
    _index_of_all()
    for rule in RULES:
        _ = rule.regex, rule.shape_regex


class RankText(msgspec.Struct):
    """What was understood of one rank's text."""

    findings: dict[str, Finding] = {}  # by rule; the first line's facts
    progress: dict[str, Progress] = {}  # by process group
    collectives: dict[str, Collective] = {}  # that it waits in, by group and number
    num_lines: int = 0
    about: str = ""  # whom a launcher's summary speaks of
    about_lines: int = 0  # for so many lines more


class Reader:
    """Feed it lines of ranks, in any order between ranks; then look at `ranks`.

    Args:
        known: the ranks there are, when that is known; a line that speaks of another one belongs to its speaker.
    """

    def __init__(self, known: Collection[str] | None = None, rules: tuple[Rule, ...] = RULES) -> None:
        self.ranks: dict[str, RankText] = {}
        self.num_lines = 0
        self._known = known
        self._rules = rules
        self._index = _index_of_all() if rules is RULES else _index(rules)
        self._shapes: dict[str, tuple[Rule, ...] | None] = {}

    def read(self, rank: str, text: str) -> None:
        """A whole text of one rank."""
        self._entry(rank)
        for line in text.splitlines():
            for piece in lines.pieces(line):
                self.feed(rank, piece)

    def read_unranked(self, rows: Iterable[str], *, labelled: bool = False) -> None:
        """Lines of many ranks with the prefixes of lines.py, or of one without any."""
        for rank, line in lines.ranked(rows, labelled=labelled):
            self.feed(rank, line, self.num_lines + 1)

    def feed(self, rank: str, line: str, number: int = 0) -> None:
        """One line without its end, not longer than lines.LINE_CHARS_MAX. `number`: 0 counts the rank's own lines."""
        entry = self._entry(rank)
        entry.num_lines += 1
        self.num_lines += 1
        if not line or line.isspace():
            return
        if entry.about_lines:
            entry.about_lines -= 1
        rules = self.rules_of(line)
        if rules is not None:
            self._ask(entry, rank, line, number or entry.num_lines, rules)

    def _entry(self, rank: str) -> RankText:
        entry = self.ranks.get(rank)
        if entry is None:
            rank = rank if len(self.ranks) < RANKS_MAX else ""
            entry = self.ranks.setdefault(rank, RankText())
        return entry

    def rules_of(self, line: str) -> tuple[Rule, ...] | None:
        """The rules that this line could meet; None: it has nothing for anybody."""
        shape = literals.shape(line)
        if shape in self._shapes:
            return self._shapes[shape]
        low = shape.lower()
        likely = (self._rules[position] for position in self._index.find(low))
        found = tuple(rule for rule in likely if rule.shape_regex is None or rule.shape_regex.search(shape))
        result = found if found or _ALSO.search(low) else None
        if len(shape) <= SHAPE_CHARS_MAX:
            if len(self._shapes) >= SHAPES_MAX:
                self._shapes.clear()
            self._shapes[shape] = result
        return result

    # ---------------------------------------------------------------- one line

    def _ask(self, entry: RankText, rank: str, line: str, number: int, rules: tuple[Rule, ...]) -> None:
        summary = _SUMMARY.match(line)
        if summary is not None:
            entry.about, entry.about_lines = summary["rank"], SUMMARY_LINES
        about = entry.about if entry.about_lines else ""
        finding = _hardware(line)
        if finding is None and rules:
            rule, found = best_rule(line, rules)
            if rule is not None and found is not None:
                groups = found.groupdict()
                about = groups.get("rank") or groups.get("rank2") or _task_of(line) or about
                finding = Finding(
                    rule.name, rule.severity, rule.scope, rule.category, rule.strength, rule.reason,
                    is_mutual=rule.is_mutual, peer=groups.get("peer") or _peer_of(line),
                )  # fmt: skip
        is_counted = any(word in line for word in _COUNTED)
        if finding is None and not is_counted:
            return
        named = about or (lines.speaker(line) if rank == "" else "")
        if named and (self._known is None or named in self._known):
            rank, entry = named, self._entry(named)
        if is_counted:
            _note_progress(entry, line)
        if finding is not None:
            self._keep(entry, rank, line, number, finding)

    def _keep(self, entry: RankText, rank: str, line: str, number: int, finding: Finding) -> None:
        known = entry.findings.get(finding.rule)
        text = line.strip()[:TEXT_CHARS_MAX]
        if known is not None and (known.line, known.text) <= (number, text):
            entry.findings[finding.rule] = msgspec.structs.replace(known, count=known.count + 1)
            return
        # Lines about one rank can come from several speakers: the earliest counts, in whatever order they are read.
        count = known.count + 1 if known is not None else 1
        entry.findings[finding.rule] = msgspec.structs.replace(
            finding, rank=rank, text=text, line=number, at_s=lines.when_s(line), count=count
        )


def best_rule(line: str, rules: Iterable[Rule]) -> tuple[Rule | None, re.Match[str] | None]:
    """The strongest rule that a line meets, the first of equal ones; generic exceptions only without any other."""
    best: Rule | None = None
    match: re.Match[str] | None = None
    for rule in rules:
        if best is not None and not rule.is_final:
            if rule.strength <= best.strength or rule.strength is Strength.EXCEPTION:
                continue
        found = rule.regex.search(line)
        if found is not None:
            best, match = rule, found
            if rule.is_final:
                break
    return best, match


def _peer_of(line: str) -> str:
    """The host that NCCL names as the other end: ``peer node-7<41210>``."""
    found = _PEER.search(line) if "peer" in line else None
    return found["host"] if found else ""


def _task_of(line: str) -> str:
    """The rank that srun's line is about: ``srun: error: node-1: task 4: Killed``."""
    found = _TASK.search(line) if "task " in line else None
    return found["rank"] if found else ""


def _hardware(line: str) -> Finding | None:
    """Xid and SXid lines have decoders instead of patterns."""
    if "Xid" not in line and "XID" not in line and "NVSwitch" not in line:
        return None
    return sxid.decode(line) or xid.decode(line)


def _note_progress(entry: RankText, line: str) -> None:
    """Numbers of collectives that a line states, by process group. Numbers of different groups are never compared."""
    if len(entry.progress) >= GROUPS_MAX or len(entry.collectives) >= GROUPS_MAX:
        return
    found = _ENQUEUED.search(line) if "nqueued" in line else None
    if found is not None:
        group = found["group"] or group_of(line)
        enqueued, completed = found["enqueued"] or found["enqueued2"], found["completed"] or found["completed2"]
        entry.progress[group] = Progress(int(enqueued[:18]), int(completed[:18]))
        return
    collective = collective_of(line)
    if collective is not None:
        entry.collectives[collective.place] = collective
        if collective.number is not None:
            entry.progress.setdefault(f"{collective.group} timed out", Progress(collective.number))
