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
from typing import Any

import msgspec

from unicron.diagnosis import lines, literals, naming, sxid, xid
from unicron.diagnosis.collectives import (
    PAIRED,
    TIMED_OUT,
    TOLD_PROGRESS,
    Collective,
    at_numbers,
    collective_of,
    group_of,
    member_of,
    row_of,
    told,
)
from unicron.diagnosis.rules import RULES
from unicron.diagnosis.words import Finding, Progress, Rule, Strength

RANKS_MAX = 65_536  # further ones count as nobody
SHAPES_MAX = 8192
SHAPE_CHARS_MAX = 512  # a longer one is not remembered
GROUPS_MAX = 4096  # of one rank
SUMMARY_LINES = 5  # of torchrun's summary of a rank
TEXT_CHARS_MAX = 400  # kept of a line
ADDRESSES_MAX = 16  # of one rank
PIDS_MAX = 65_536
OWN_PIDS_MAX = 16  # of one rank
PID_LINES = 100  # of a rank, where it may say its process number

# Read here, not by rules.
_ALSO = re.compile(
    "xid|nvswitch|enqueued|work[nhx]ccl|shape|local_rank|time\\s*: 5555-|root cause|failures:|: using|; oob|"
    "rank 5+ pid|spawned with|addr=\\[|rank[^.]{1,60}\\b5{1,3}\\.5{1,3}\\.5{1,3}\\.5|"
    "launched up to operation|missing communicator data|"
    "ranks? [^ ]{1,40} (?:called|are in|is in|entered|are at|is at) _?(?:all|reduce|broadcast|barrier|gather|scatter)|"
    "rank 5{1,7}[: ] ?(?:seq[^ ]{1,12} (?:op[=:] ?)?)?_?(?:all|reduce|broadcast|gather|scatter)|"
    "(?:seq|collective).{0,40}\\branks? 5.{0,40}\\branks? 5|ranks? 5.{0,40}\\b(?:seq|collective).{0,40}\\branks? 5"
)
# A line with one may say how far a rank is, or what several called.
_COUNTED = (
    "nqueued", "CCL(", "FingerPrint(", " shape", "pending", " called ", "inconsistent", "flight", "stuck in",
    "seq", "ranks ", "ank 5",
)  # fmt: skip
_SUMMARY = re.compile(
    r"(?:[\w.-]{1,60}: )?\s*(?:"
    r"rank\s*: (?P<rank>\d{1,7}) \(local_rank: |(?P<time>time\s*: 20\d\d-)|"
    r"(?P<first>Root Cause\b.{0,40}:\s*$)|(?P<others>(?:Other )?Failures:\s*$)|"
    r"=\s+RANK (?P<mpi>\d{1,7}) PID )"
)
# NCCL's count of its ranks (RAS): what the ranks that it lists are.
_COUNTS = re.compile(
    r"\s*(?:(?P<missing>Missing communicator data from)|\d+ ranks? ha(?:s|ve) launched up to operation (?P<number>\d+))"
)
_LISTED = "watchdog.not-in-ras"
_SPAWNED = re.compile(r"\bprocess (?P<pid>\d{2,8}) spawned with .{1,2000}--local[_-]rank[=', ]{1,5}(?P<rank>\d{1,7})\b")
_LAST = r"[Ll]ast[_ ]{0}\w*[\"']?(?: (?:NCCL )?(?:work|seq\w*|collective))?[\"']?[ :=]{{1,3}}(?P<{0}{1}>-?\d+)"
_ENQUEUED = re.compile(
    r"(?:(?P<group>[\w\-.]+)[ :]+)?enqueued[= ](?P<enqueued>\d+)[ ,;]+completed[= ](?P<completed>-?\d+)|"
    + _LAST.format("enqueued", 2) + r"\W{1,8}" + _LAST.format("completed", 2) + "|"
    + _LAST.format("completed", 3) + r"\W{1,8}" + _LAST.format("enqueued", 3)
)  # fmt: skip


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


class Shape(msgspec.Struct, frozen=True):
    """What lines that look alike could say."""

    rules: tuple[Rule, ...]
    is_counted: bool  # how far a rank is, or what several called


class Summary(msgspec.Struct):
    """Where a text is in torchrun's or mpirun's summary: whom it speaks of, for so many lines more, and what it says.

    And in NCCL's count of its ranks: whom it lists.
    """

    rank: str = ""
    num_lines: int = 0
    time: str = ""  # the line that says when
    is_first: bool = False  # under "Root Cause (first observed failure)"
    number: int = 0  # the operation that most ranks have come to
    is_ahead: bool = False  # those that are listed next have come further


class RankText(msgspec.Struct):
    """What was understood of one rank's text."""

    findings: dict[str, Finding] = {}  # by rule; the first line's facts
    progress: dict[str, Progress] = {}  # by process group
    collectives: dict[str, Collective] = {}  # that it waits in, by group and number
    pids: set[str] = set()  # of its processes
    addresses: set[str] = set()  # hosts and addresses that it says are its own
    accuses: bool = False  # it says of others that it waits for them, or misses them
    spoke: dict[str, int] = {}  # by rule: after how many of its own lines it last said so
    num_lines: int = 0
    summary: Summary = msgspec.field(default_factory=Summary)


class Reader:
    """Feed it lines of ranks, in any order between ranks; then look at `ranks`.

    Args:
        known: the ranks there are, when that is known; a line that speaks of another one belongs to its speaker.
    """

    def __init__(self, known: Collection[str] | None = None, rules: tuple[Rule, ...] = RULES) -> None:
        self.ranks: dict[str, RankText] = {}
        self.num_lines = 0
        self._keys = naming.Keys(known) if known is not None else None
        self._rules = rules
        self._index = _index_of_all() if rules is RULES else _index(rules)
        self._shapes: dict[str, Shape | None] = {}
        self._pids: dict[str, str] = {}  # of ranks' processes, as a launcher said when it started them

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
        if entry.summary.num_lines:
            entry.summary.num_lines -= 1
        if entry.num_lines <= PID_LINES and rank and "pid" in line and len(entry.pids) < OWN_PIDS_MAX:
            entry.pids.update(naming.own_pids(line))
        shape = self._shape_of(line)
        if shape is not None:
            self._ask(entry, rank, line, number, shape)

    def _entry(self, rank: str) -> RankText:
        entry = self.ranks.get(rank)
        if entry is None:
            rank = rank if len(self.ranks) < RANKS_MAX else ""
            entry = self.ranks.setdefault(rank, RankText())
        return entry

    def rules_of(self, line: str) -> tuple[Rule, ...] | None:
        """The rules that this line could meet; None: it has nothing for anybody."""
        shape = self._shape_of(line)
        return None if shape is None else shape.rules

    def _shape_of(self, line: str) -> Shape | None:
        shape = literals.shape(line)
        if shape in self._shapes:
            return self._shapes[shape]
        low = shape.lower()
        likely = (self._rules[position] for position in self._index.find(low))
        found = tuple(rule for rule in likely if rule.shape_regex is None or rule.shape_regex.search(shape))
        result = None
        if found or _ALSO.search(low):
            result = Shape(found, any(word in shape for word in _COUNTED))
        if len(shape) <= SHAPE_CHARS_MAX:
            if len(self._shapes) >= SHAPES_MAX:
                self._shapes.clear()
            self._shapes[shape] = result
        return result

    # ---------------------------------------------------------------- one line

    def _ask(self, entry: RankText, rank: str, line: str, number: int, shape: Shape) -> None:
        _follow(entry.summary, line)
        if "spawned with" in line:
            self._note_pid(line)
        self._note_address(entry, line)
        finding, accused, named = self._finding(line, shape.rules)
        if finding is not None and finding.rule == _LISTED and entry.summary.is_ahead:
            finding = None
        if finding is None and not shape.is_counted:
            return
        about = accused or named or self._ended(finding, line)
        if not about and entry.summary.num_lines:
            about = (entry.summary.rank,)
        if not about:
            about = tuple(filter(None, (lines.world_speaker(line) if rank.isdigit() else lines.speaker(line),)))
        if not about and finding is not None and _is_of_mentioned(finding, is_spoken=rank.isdigit()):
            about = naming.mentioned(line)
        keys = list(dict.fromkeys(filter(None, map(self._key, about))))
        if finding is not None and accused:
            # Whom it accuses is not there: that makes the one who says so no more than a witness.
            strength = finding.strength if keys else Strength.ECHO
            finding = msgspec.structs.replace(finding, strength=strength, is_told=bool(keys))
            entry.accuses |= bool(keys) and rank not in keys
        if shape.is_counted and not self._note_told(line):
            _note_progress(self._entry(keys[0]) if keys else entry, line)
        if finding is not None:
            said_by = "" if number else rank
            for key in keys or (rank,):
                _keep(self._entry(key), key, finding, line, number or entry.num_lines, said_by, entry.summary)
            entry.spoke[finding.rule] = entry.num_lines

    def _ended(self, finding: Finding | None, line: str) -> tuple[str, ...]:
        """The ranks whose end a line tells of, by their numbers or those of their processes."""
        if finding is None:
            return ()
        found = naming.ended(line)
        if found or not self._pids or not finding.rule.startswith(("process.", "kernel.")):
            return found
        return tuple(self._pids[pid] for pid in naming.ended_pids(line) if pid in self._pids)

    def _note_address(self, entry: RankText, line: str) -> None:
        if ("NCCL" in line or "addr=[" in line) and len(entry.addresses) < ADDRESSES_MAX:
            entry.addresses.update(naming.own_addresses(line))
        rank, address = naming.placed(line) if lines.has_rank(line) else ("", "")
        key = self._key(rank) if rank else ""
        if key and len(self._entry(key).addresses) < ADDRESSES_MAX:
            self._entry(key).addresses.add(address)

    def _note_pid(self, line: str) -> None:
        found = _SPAWNED.search(line)
        if found is not None and len(self._pids) < PIDS_MAX:
            self._pids[found["pid"]] = found["rank"]

    def _note_told(self, line: str) -> bool:
        """What a report says that several ranks called, or how far they are; is it one?"""
        row = row_of(line)
        found = list(told(line)) if row is None else [row]
        for name, number in at_numbers(line).items() if not found else ():
            key = self._key(name)
            if key:
                self._entry(key).progress[TOLD_PROGRESS] = Progress(number)
        for name, collective in found:
            key = self._key(name)
            if key:
                self._entry(key).collectives[collective.place] = collective
        return bool(found)

    def _key(self, name: str) -> str:
        return name if self._keys is None else self._keys.find(name)

    def _finding(self, line: str, rules: tuple[Rule, ...]) -> tuple[Finding | None, tuple[str, ...], tuple[str, ...]]:
        """What a line says, the ranks that it accuses, and those that it is about, whoever says it."""
        finding = _hardware(line)
        rule, found = best_rule(line, rules) if finding is None else (None, None)
        if rule is None or found is None:
            return finding, (), ()
        groups = found.groupdict()
        peer = groups.get("peer") or (naming.peer(line) if rule.strength <= Strength.WITNESS else "")
        finding = Finding(
            rule.name, rule.severity, rule.scope, rule.category, rule.strength, rule.reason,
            is_mutual=rule.is_mutual, peer=self._key(peer) or peer,
        )  # fmt: skip
        if not rule.is_accusing:
            return finding, (), naming.mentioned(line) if rule.is_of_named else ()
        name, said = next(((name, said) for name, said in groups.items() if name != "peer" and said), ("", ""))
        if not name.startswith("present"):
            return finding, naming.numbers(said), ()
        accused = naming.absent(said, line)
        return (finding if accused else None), accused, ()


def _is_of_mentioned(finding: Finding, *, is_spoken: bool) -> bool:
    """Is this about the rank that the line mentions? An exception of a program mentions whom it likes."""
    if finding.rule.startswith(("process.", "kernel.", "xid.")):
        return True
    return (
        finding.strength > Strength.ABORT
        and not (is_spoken or finding.is_mutual)
        and not finding.rule.startswith("program.")
    )


def _keep(entry: RankText, key: str, finding: Finding, line: str, number: int, said_by: str, summary: Summary) -> None:
    """Keep a finding about `key`: with the facts of its first line, once a rule.

    Lines about one rank can come from several speakers: the earliest counts, in whatever order they are read.
    """
    known = entry.findings.get(finding.rule)
    text = line.strip()[:TEXT_CHARS_MAX]
    count, last = 1, number
    if known is not None:
        count = known.count + 1
        is_same_text = known.said_by == said_by
        last = max(number, known.last_line) if is_same_text else number
        if (known.line, known.text, known.said_by) <= (number, text, said_by):
            last = last if is_same_text else known.last_line
            entry.findings[finding.rule] = msgspec.structs.replace(known, count=count, last_line=last)
            return
    entry.findings[finding.rule] = msgspec.structs.replace(
        finding, rank=key, text=text, line=number, last_line=last, said_by=said_by, count=count, **_when(line, summary)
    )


def _follow(summary: Summary, line: str) -> None:
    """Note where in torchrun's or mpirun's summary, or in NCCL's count, a line is."""
    found = _COUNTS.match(line)
    if found is not None:
        number = int((found["number"] or "0")[:18])
        summary.is_ahead = 0 < summary.number < number
        summary.number = 0 if found["missing"] or summary.number else number
        return
    found = _SUMMARY.match(line)
    if found is None:
        return
    if found["rank"] or found["mpi"]:
        summary.rank, summary.num_lines = found["rank"] or found["mpi"], SUMMARY_LINES
    elif found["time"]:
        summary.time, summary.num_lines = line, 0
    else:
        summary.is_first, summary.time = bool(found["first"]), ""


def _when(line: str, summary: Summary) -> dict[str, Any]:
    """When a line was printed, or when its summary says that it happened."""
    at_s, is_first = lines.when_s(line), False
    if summary.num_lines:
        line = line if at_s is not None else summary.time
        at_s, is_first = lines.when_s(line), summary.is_first
    return {"at_s": at_s, "form": lines.time_form(line), "is_first": is_first}


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
        enqueued = found["enqueued"] or found["enqueued2"] or found["enqueued3"]
        completed = found["completed"] or found["completed2"] or found["completed3"]
        entry.progress[group] = Progress(int(enqueued[:18]), int(completed[:18]), member_of(line))
        return
    collective = collective_of(line)
    if collective is not None:
        entry.collectives[collective.place] = collective
        if collective.number is not None and not PAIRED.search(collective.op):
            group = f"{collective.group}{TIMED_OUT}"
            known = entry.progress.get(group)
            # Of those that timed out the oldest counts, of those that were only called the newest.
            if known is None or (collective.is_print and known.enqueued < collective.number):
                entry.progress[group] = Progress(collective.number, member=collective.member)
