"""From text to lines of ranks: whose line it is, and when it was printed. Pure; memory is bounded by the longest line.

Who speaks is said by a prefix, if by anything: torch's ``[rank3]:``, torchrun's ``[default3]:`` and ``[3]:``,
mpirun's ``[1,3]<stderr>:``, kubectl's ``[pod/worker-3/pytorch]``, compose's ``worker-3  |``, the ``(Worker rank=3
pid=7)`` of servers, titles like ``==> rank_3.log <==``, and srun's ``3: `` (label option). torch's own is believed
before all others and wherever it stands in a line's head, because it alone is the rank in the world: torchrun's is
the rank on its node, pasted logs have the numbers of their lines before it, and a progress bar has no end. What a
launcher's prefix stands for is learned from lines that have both. srun's is believed only when most lines of the
text's head have it, because a traceback's numbered frames look the same. A bare ``[3]:`` numbers the failures of
torchrun's summary. A line without prefix continues the rank before it; lines of the launcher and the scheduler belong
to nobody.
"""

from __future__ import annotations

import datetime
import re
import string
from collections.abc import Iterable, Iterator

LINE_CHARS_MAX = 8192  # a longer line is looked at in pieces that overlap
OVERLAP_CHARS = 256
HEAD_LINES = 200  # looked at to find out whether srun labelled the lines
LABELLED_SHARE_MIN = 0.5

HEAD_CHARS = 400  # of a line: torch's prefix is looked for there
HEADER_CHARS = 100  # the most of a line that only says whose lines follow
WORLDS_MAX = 65_536  # prefixes of launchers remembered

# Before "rank": then it is the one on a node or in a group.
NOT_IN_WORLD = r"(?<![\w.])(?<!local )(?<!node )(?<!group )(?<!parallel )(?<![tdpecTDPEC][pP] )"
_TORCH = re.compile(r"\[rank(?P<rank>\d{1,7})\]:\s?")
_PREFIX = re.compile(
    r"\[default(?P<local>\d{1,7})\](?::|(?=\s))\s?(?=\S)|"
    r"\[(?P<bare>\d{1,7})\](?::|(?=\s))\s?(?=\S)|"
    r"\[(?:[RrPp]|(?i:worker|trainer|process|task)[ _:-])(?P<worker_number>\d{1,7})\]:?\s(?=\S)|"
    r"[\[<(](?i:rank)[ =:_#-]{0,2}(?P<torch>\d{1,7})(?:/\d{1,7})?[\]>)](?::|(?=\s))\s?(?=\S)(?!Child process)|"
    r"\[(?:\d{1,7},)?(?P<mpi>\d{1,7})\]<std(?:err|out)>:\s?|"
    r"\[?20\d\d-[\d-]{5}[T ][\d:.,+Z]{8,32}\]? \[(?i:rank|default)[ =:]?(?P<stamped>\d{1,7})\]:?\s?(?=\S)|"
    r"\[20\d\d-[\d-]{5}[T ][\d:.,]{8,16} TP(?P<tensor>\d{1,5})\] |"
    r"20\d\d-[\d-]{5} [\d:.,]{8,16}: rank(?P<composer>\d{1,7})\[\d{1,8}\]\[\w{1,40}\]: |"
    r"-{3,20}Begin global rank (?P<section>\d{1,7}) STD(?:OUT|ERR)-|-{3,20}End global rank \d{1,7} (?P<ended>)STD|"
    r"\[pod/(?P<pod>[\w.-]{1,80})/[\w.-]{1,80}\] |"
    r"(?P<compose>[a-z][\w.-]{0,60}[-_]\d{1,4})\s{1,8}\| |"
    r"\(\w{0,40}Worker(?:_TP| rank=)(?P<worker>\d{1,7})\b[^()]{0,100}\)\s|"
    r"(?P<process>\([\w.:<>-]{1,80},? pid=\d{1,8}(?:, ip=[\w.:]{1,45})?)[^()]{0,40}\)\s|"
    r"(?i:rank)[ _=-]?(?P<plain>\d{1,7})(?:: |\s?\| )|"
    r"r(?P<short>\d{1,7})\s?\| "
)
# A line that only says whose lines follow.
_HEADER = re.compile(
    r"(?:[=\-#*>\[ ]{1,30}|(?i:traceback|exception|error|output|log|stderr|stdout|stack) (?:on|of|from|for) )"
    r"(?i:(?:global )?rank[ _-]?)(?P<rank>\d{1,7})(?:\.(?:log|out|err|txt))?"
    r"(?i: (?:stderr|stdout|log|output|traceback))?"
    r"[\]=\-#*<>: ]{0,30}$"
)
_BEGINS = frozenset("[(<R2-" + string.ascii_lowercase)  # with anything else no prefix begins
_ONE_LINE = (
    "pod",
    "compose",
    "plain",
    "short",
    "worker",
    "worker_number",
    "process",
)  # these say nothing of a line after theirs without prefix
_TIMED = ("stamped", "composer")  # their time is of use
_LEARNED = ("local", "bare", "process")  # what these stand for, lines with torch's prefix after them say
_SRUN_LABEL = re.compile(r"\s{0,6}(?P<rank>\d{1,7}): ")
_NOBODY = re.compile(
    r"(?:srun|slurmstepd|salloc|sbatch|mpirun|prterun|torchrun)\b|[WEI]\d{4} .{0,60}torch/distributed/elastic|"
    r"(?:\[20\d\d[^\]]{6,30}\] |[A-Z]{4,8}:)(?:torch\.distributed\.(?:elastic|run)|composer\.cli)\b|"
    r"\[20\d\d[^\]]{6,30}\] \[\w{4,8}\] \[(?:launch|runner)\.py:|\(raylet|"
    r"(?:agent|launcher|controller|scheduler|monitor|supervisor|kernel|dmesg)\b[^:]{0,30}:"
)
_SPEAKER = re.compile(
    r"\[rank(?P<a>\d{1,7})\]|\[?(?:PG (?:ID )?\w+ .{0,60})?\bRank (?P<b>\d{1,7})(?:\]|, node)|"
    r"\[(?i:rank)[ =:_]{1,2}(?P<c>\d{1,7})\]|"
    rf"{NOT_IN_WORLD}[\"']?(?i:rank)[\"']?(?:=|:\s?)[\"']?(?P<d>\d{{1,7}})(?=[\"'\s,;|)}}\]]|$)|"
    r"^\s{0,8}(?:\S{1,60}\s){0,8}?(?:[\w.-]{1,60}:)?[\[<(]?"
    r"(?<!for )(?<!from )(?<!on )(?<!to )(?<!by )(?<!of )(?<!and )(?<!with )"
    rf"{NOT_IN_WORLD}(?i:rank)[ _:#-]?(?P<e>\d{{1,7}})(?:[\]>):]|\s?\|)|"
    r"^\W{0,3}(?:\w+ ){0,4}?(?i:error|exception|traceback|failure|crash)\w* (?:\w+ ){0,2}(?:from|on|in|at|for) "
    rf"{NOT_IN_WORLD}(?i:rank)[ _:#-]?(?P<f>\d{{1,7}})\b"
)
_WORLD_SPEAKER = re.compile(r"(?i)\bglobal[ _-]?rank[\"']?[ =:#]{1,3}(?P<rank>\d{1,7})\b")

_DATE = re.compile(
    r"(?P<y>20\d\d)[-/](?P<m>\d\d)[-/](?P<d>\d\d)[T _](?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?P<f>[.,]\d{1,9})?"
)
_GLOG = re.compile(r"\b[IWEF](?P<m>\d?\d)(?P<d>\d\d) (?P<H>\d\d):(?P<M>\d\d):(?P<S>\d\d)(?P<f>\.\d{1,9})?")
_CLOCK = re.compile(r"(?:^|[\s\[])(?P<H>[01]\d|2[0-3]):(?P<M>[0-5]\d):(?P<S>[0-5]\d)(?P<f>[.,]\d{1,9})?\b")


def is_labelled(head: Iterable[str]) -> bool:
    """Did srun label the lines of this text? Judged by its first lines."""
    lines = [line for line in head if line.strip()][:HEAD_LINES]
    return bool(lines) and sum(bool(_SRUN_LABEL.match(line)) for line in lines) >= LABELLED_SHARE_MIN * len(lines)


def ranked(lines: Iterable[str], *, labelled: bool = False) -> Iterator[tuple[str, str]]:
    """(rank, line) of each line; "" is nobody. Longer lines than LINE_CHARS_MAX come in pieces of the same rank."""
    prefixes = _Prefixes(labelled)
    for whole in lines:
        rank = ""
        for number, piece in enumerate(pieces(whole)):
            if number == 0:
                rank, piece = prefixes.read(piece)
            yield rank, piece


class _Prefixes:
    """Reads off the prefixes of a text's lines, in order."""

    def __init__(self, labelled: bool) -> None:
        self._is_labelled = labelled
        self._rank = ""  # whom a line without prefix continues
        self._worlds: dict[str, str] = {}  # launcher's prefix -> rank; "" where it was before several
        self._is_numbered = False  # bare numbers are those of lines

    def read(self, line: str) -> tuple[str, str]:
        """The rank that speaks, and what it says."""
        if len(line) <= HEADER_CHARS and has_rank(line):
            found = _HEADER.match(line)
            if found is not None:
                self._rank = _plain(found["rank"])
                return self._rank, ""
        found = _PREFIX.match(line) if line[:1] in _BEGINS else None
        torch = _TORCH.search(line, 0, HEAD_CHARS) if "[rank" in line else None
        while torch is not None:
            end = torch.end()
            self._rank = _plain(torch["rank"])
            begin, torch = torch.start(), _TORCH.match(line, end)
            if torch is None:
                self._learn(found)
                return self._rank, (line[:begin] if time_form(line[:begin]) else "") + line[end:]
        if found is not None and not (found["bare"] and self._is_numbered):
            rank, line = self._meant(found), (line if found.lastgroup in _TIMED else line[found.end() :])
            if found.lastgroup not in _ONE_LINE:
                self._rank = rank
            return rank, line
        if self._is_labelled:
            found = _SRUN_LABEL.match(line)
            if found is not None:
                self._rank = found["rank"]
                return self._rank, line[found.end() :]
        return ("" if _NOBODY.match(line.lstrip()) else self._rank), line

    def _learn(self, found: re.Match[str] | None) -> None:
        """A line had torch's prefix after one of a launcher's."""
        if found is None or found.lastgroup not in _LEARNED:
            return
        prefix = found[found.lastgroup]
        if found["bare"]:
            self._is_numbered |= prefix != self._rank
        elif len(self._worlds) < WORLDS_MAX:
            prefix = f"{found.lastgroup} {prefix}"
            self._worlds[prefix] = self._rank if self._worlds.get(prefix, self._rank) == self._rank else ""

    def _meant(self, found: re.Match[str]) -> str:
        kind, prefix = found.lastgroup or "", found[found.lastgroup or 0]
        return self._worlds.get(f"{kind} {prefix}", "" if kind == "process" else _plain(prefix))


def _plain(rank: str) -> str:
    """A number without zeros before it; a name as it is."""
    return (rank.lstrip("0") or "0") if rank.isdigit() else rank


def pieces(line: str) -> Iterator[str]:
    """The line without its end, in pieces of at most LINE_CHARS_MAX that share OVERLAP_CHARS."""
    line = line.rstrip("\r\n")
    if len(line) <= LINE_CHARS_MAX:
        yield line
        return
    step = LINE_CHARS_MAX - OVERLAP_CHARS
    for begin in range(0, len(line) - OVERLAP_CHARS, step):
        yield line[begin : begin + LINE_CHARS_MAX]


def has_rank(line: str) -> bool:
    """Could a line mention a rank at all? A cheap test before dear ones."""
    return "ank" in line or "ANK" in line


def speaker(line: str) -> str:
    """The rank that a line says it speaks for, "" if it does not."""
    if not has_rank(line):
        return ""
    found = _SPEAKER.search(line)
    return world_speaker(line) or (_plain(found[found.lastgroup or 0]) if found else "")


def world_speaker(line: str) -> str:
    """The rank in the world that a line says it speaks for, beside the rank on a node or in a group."""
    found = _WORLD_SPEAKER.search(line) if has_rank(line) else None
    return found["rank"] if found else ""


def when_s(line: str) -> float | None:
    """The time a line was printed, in seconds; only differences between lines of the same form mean anything.

    A date and time count from 1970 in whatever zone it was printed; glog's month and day, and a bare time of day, are
    taken in the year 1970. Kernel uptimes are not taken: those of two machines cannot be compared.
    """
    found = _DATE.search(line) or _GLOG.search(line) or _CLOCK.search(line)
    if found is None:
        return None
    parts = found.groupdict()
    try:
        day = datetime.date(int(parts.get("y") or 1970), int(parts.get("m") or 1), int(parts.get("d") or 1)).toordinal()
    except ValueError:
        return None
    fraction = float("0." + parts["f"][1:]) if parts["f"] else 0.0
    return (day - 719163) * 86400.0 + int(parts["H"]) * 3600 + int(parts["M"]) * 60 + int(parts["S"]) + fraction


def time_form(line: str) -> str:
    """Which of the forms of when_s a line has: "date", "day", "clock" or ""."""
    forms = ((_DATE, "date"), (_GLOG, "day"), (_CLOCK, "clock"))
    return next((name for pattern, name in forms if pattern.search(line)), "")
