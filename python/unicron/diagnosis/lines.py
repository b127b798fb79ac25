"""From text to lines of ranks: whose line it is, and when it was printed. Pure; memory is bounded by the longest line.

Who speaks is said by a prefix, if by anything: torch's ``[rank3]:``, torchrun's ``[default3]:`` and ``[3]:``, mpirun's
``[1,3]<stderr>:``, kubectl's ``[pod/worker-3/pytorch]``, compose's ``worker-3  |``, and srun's ``3: `` (label option).
The last is believed only when most lines of the text's head have it, because a traceback's numbered frames look the
same. A bare ``[3]:`` numbers the failures of torchrun's summary. A line without
prefix continues the rank before it; lines of the launcher and the scheduler belong to nobody.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator

LINE_CHARS_MAX = 8192  # a longer line is looked at in pieces that overlap
OVERLAP_CHARS = 256
HEAD_LINES = 200  # looked at to find out whether srun labelled the lines
LABELLED_SHARE_MIN = 0.5

_PREFIX = re.compile(
    r"\[(?:rank|default)?(?P<torch>\d{1,7})\](?::|(?=\s))\s?(?=\S)|"
    r"\[(?:\d{1,7},)?(?P<mpi>\d{1,7})\]<std(?:err|out)>:\s?|"
    r"\[?20\d\d-[\d-]{5}[T ][\d:.,+Z]{8,32}\]? \[(?:rank|default)(?P<stamped>\d{1,7})\]:?\s?(?=\S)|"
    r"\[pod/(?P<pod>[\w.-]{1,80})/[\w.-]{1,80}\] |"
    r"(?P<compose>[a-z][\w.-]{0,60}[-_]\d{1,4})\s{1,8}\| |"
    r"[Rr]ank ?(?P<plain>\d{1,7}): "
)
_ONE_LINE = ("pod", "compose", "plain")  # these say nothing of a line after theirs that has no prefix
_SRUN_LABEL = re.compile(r"\s{0,6}(?P<rank>\d{1,7}): ")
_NOBODY = re.compile(
    r"(?:srun|slurmstepd|salloc|sbatch|mpirun|prterun|torchrun)\b|[WEI]\d{4} .{0,60}torch/distributed/elastic"
)
_SPEAKER = re.compile(r"\[rank(?P<a>\d{1,7})\]|\[?(?:PG (?:ID )?\w+ .{0,60})?\bRank (?P<b>\d{1,7})(?:\]|, node)")

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
    rank = ""
    for whole in lines:
        for number, line in enumerate(pieces(whole)):
            found = _PREFIX.match(line) if number == 0 else None
            if found is not None and found.lastgroup in _ONE_LINE:
                yield found[found.lastgroup], line[found.end() :]
                continue
            if found is None and number == 0 and labelled:
                found = _SRUN_LABEL.match(line)
            if found is not None:
                rank = found[found.lastgroup or 0]
                line = line[found.end() :]
            is_nobody = found is None and number == 0 and _NOBODY.match(line.lstrip()) is not None
            yield ("" if is_nobody else rank), line


def pieces(line: str) -> Iterator[str]:
    """The line without its end, in pieces of at most LINE_CHARS_MAX that share OVERLAP_CHARS."""
    line = line.rstrip("\r\n")
    if len(line) <= LINE_CHARS_MAX:
        yield line
        return
    step = LINE_CHARS_MAX - OVERLAP_CHARS
    for begin in range(0, len(line) - OVERLAP_CHARS, step):
        yield line[begin : begin + LINE_CHARS_MAX]


def speaker(line: str) -> str:
    """The rank that a line says it speaks for, "" if it does not."""
    found = _SPEAKER.search(line)
    return (found["a"] or found["b"]) if found else ""


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
