"""The words of a diagnosis: scope, category, strength, and the frozen values that carry them.

A *rule* says what one line means. A *finding* is a rule met in a line of a rank. A *diagnosis* names the root of all
findings, or says that it cannot be named. What decides between findings is their strength: a rank that says why it
fails is believed before one that only says that others left it.

Categories are the rows of Unicron's table of error severities (paper, section on detection); `none` is a fault that
the table does not have.
"""

from __future__ import annotations

import enum
import re
from functools import cached_property

import msgspec

from unicron.diagnosis import literals
from unicron.types import Severity


class Scope(enum.StrEnum):
    """What is to be suspected, and so what a retry has to leave out."""

    GPU = "gpu"
    NODE = "node"
    LINK = "link"
    PROCESS = "process"
    JOB = "job"  # code, data or configuration: the same wherever it runs
    STORAGE = "storage"


class Category(enum.StrEnum):
    LOST_CONNECTION = "lost_connection"
    EXITED_ABNORMALLY = "exited_abnormally"
    CONN_REFUSED_RESET = "conn_refused_reset"
    ILLEGAL_MEMORY = "illegal_memory"
    ECC = "ecc"
    INVALID_DMA = "invalid_dma"
    OTHER_CUDA = "other_cuda"
    NVLINK = "nvlink"
    GPU_DRIVER = "gpu_driver"
    OTHER_NETWORK = "other_network"
    OTHER_SOFTWARE = "other_software"
    NCCL_TIMEOUT = "nccl_timeout"
    LINK_FLAPPING = "link_flapping"
    TASK_HANG = "task_hang"
    NONE = "none"


class Strength(enum.IntEnum):
    """How much a finding says about the root. Up to ECHO a finding never makes its rank the root."""

    ACTIVITY = -2  # what a rank was doing
    UNKNOWN = -1  # a word of failure that no rule knows
    NOISE = 0  # good news, notices, clean-up
    ECHO = 1  # what a rank says when another one failed: timeout, reset, broken pipe, SIGTERM
    WITNESS = 2  # a peer could not be reached: the pair is suspect, not the speaker
    SLOW = 3  # a rank is slower than the others: where to look if nobody fails and nobody is behind
    ABORT = 4  # SIGABRT: says nothing where a watchdog spoke before it
    DEATH = 5  # a process ended, and nobody says why
    EXCEPTION = 6  # an exception that no rule knows
    LINK = 7  # a local port or link is down
    CAUSE = 8  # says why
    HARDWARE = 9  # the device or the kernel says that it broke


class Rule(msgspec.Struct, frozen=True, dict=True):
    """What a line means. `pattern` is searched in one line.

    Its group `rank` (a list of numbers too; also rank_b and so on) says whom the line accuses, `present` who is there,
    so that it accuses all others, and `peer` whom its speaker waits for.
    """

    name: str  # family.what
    pattern: str
    severity: Severity
    scope: Scope
    category: Category
    strength: Strength
    reason: str
    source: str  # where the text comes from: a source file, a manual
    example: str  # a line that it must match
    is_final: bool = False  # says all there is to say of the line: no other rule is asked
    is_mutual: bool = False  # true of a whole group: who says it is no more to blame than the others
    is_of_named: bool = False  # about the ranks that the line mentions, whoever says it

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.ASCII)

    @cached_property
    def is_accusing(self) -> bool:
        """Has the pattern a group that says whom the line accuses?"""
        return any(name.startswith(("rank", "present")) for name in self.regex.groupindex)

    @cached_property
    def words(self) -> tuple[str, ...] | None:
        """Words without one of which no line can match, see literals.py."""
        return literals.words(self.pattern)

    @cached_property
    def shape_regex(self) -> re.Pattern[str] | None:
        """Matches the shape of whatever line this rule matches; None: words alone have to do."""
        pattern = literals.same_digits(self.pattern)
        return None if pattern is None else re.compile(pattern, re.ASCII)


class Family(msgspec.Struct, frozen=True):
    """Rules of one kind of speaker."""

    name: str
    rules: tuple[Rule, ...]


class Finding(msgspec.Struct, frozen=True):
    """A rule met. `rank` is the speaker's key ("" when the text has none), or whom the line is about."""

    rule: str
    severity: Severity
    scope: Scope
    category: Category
    strength: Strength
    reason: str
    rank: str = ""
    text: str = ""  # the line, cut
    line: int = 0  # its number, from 1: in the text, or in the rank's where that is a text of its own
    is_mutual: bool = False
    peer: str = ""  # a rank that it names as the other end
    at_s: float | None = None  # seconds since 1970 as the line says it, in whatever zone it was printed
    count: int = 1  # how often this rule was met in this rank's text
    said_by: str = ""  # whose text the line is in, "" where all share one: lines of one text are in order
    last_line: int = 0  # where it was met last, in the same text
    form: str = ""  # of the time; times of two forms cannot be compared
    is_first: bool = False  # a launcher says that it saw this failure first
    is_told: bool = False  # somebody else accuses this rank


class Progress(msgspec.Struct, frozen=True):
    """How far a rank says it is in a process group: the newest collective given to the device, and the newest done."""

    enqueued: int
    completed: int | None = None
    member: str = ""  # its number in the group, as the line says it


class Diagnosis(msgspec.Struct, frozen=True):
    """The answer. `root_rank` is a key of the input, several joined by commas, or None when it cannot be known."""

    severity: Severity
    scope: Scope
    category: Category
    reason: str
    root_rank: str | None = None
    rule: str = ""
    evidence: tuple[Finding, ...] = ()  # the strongest first; what follows the root is an echo or further evidence
