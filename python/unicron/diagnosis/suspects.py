"""Who of several ranks with equally strong findings is to be suspected, and what a finding weighs beside others. Pure.

Every test here keeps those that pass it, if some do and some do not; what is left is no order of likelihood but of
what is surer: who failed before it heard of others' failure, broken devices before the links to them, who spoke first
by the clock, who has more to say, and who says what is seldom a consequence.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set

import msgspec

from unicron.diagnosis.naming import ended_pids, parts
from unicron.diagnosis.reader import RankText
from unicron.diagnosis.words import Category, Finding, Scope, Strength

# Logs that speak of others; never a suspect themselves.
_SOURCES = re.compile(
    r"(?i)(?:dmesg|kern(?:el)?|syslog|journal\w*|messages|slurm\w*|srun|sbatch|scheduler|controller|launcher|torchrun|"
    r"mpirun|prterun|horovodrun|deepspeed|elastic[\w-]*|agent|kubelet|kubectl|k8s|kubernetes|events?|operator|"
    r"monitor|supervisor|parent|orchestrator|system|all)(?:[-_ .]?\d{1,4})?(?:\.log)?"
)
_PID = re.compile(r"(?i)\b(?:process|pid)[=: ]{1,3}(\d{2,8})\b")
_RANK_WORD = re.compile(r"(?i)\brank[ =:#]{0,2}(\d{1,7})\b")
_WORD = re.compile(r"[\w.-]+")
_TORCH_NODE = re.compile(r"_\d+_\d+$")  # torch calls a node name_pid_agent
# Slurm prints this on a node that is alive, with that node's name, when another one of the job failed.
_SURVIVOR = re.compile(r"\bON \S{1,80} CANCELLED .{0,60}DUE TO NODE FAILURE")
_SKEW_S = 2.0  # clocks of nodes agree that well
_NEAR_LINES = 200  # an echo so far before a failure has to do with it; startup's retries have not
# Deaths of a process that its own clean-up brings about as well, after others are gone.
_CRASHES = ("process.segfault", "process.bus-error", "process.killed", "process.data-loader", "cuda.launch-failure")
# What a rank says as well when another one failed, though it sounds like a cause; the least telling first.
_OFTEN_SECOND = (
    "watchdog.desync", "program.nan-iterations", "program.diverged", "cuda.contained", "process.data-loader",
    "program.exception",
)  # fmt: skip
_TASKS_MIN = 3  # so many ranks whose end one line tells of were ended by somebody
_UP = ("kernel.link-up", "nccl.port-up")


@functools.cache
def is_source(rank: str) -> bool:
    """Is this the log of somebody that only tells of others: a kernel, a scheduler, a launcher?"""
    return _SOURCES.fullmatch(rank) is not None


@functools.cache
def tells_of_others(rank: str) -> bool:
    """Is this, or one with a node's name (``dmesg n2``), such a log?"""
    return is_source(rank) or any(map(is_source, parts(rank)))


# ---------------------------------------------------------------- what a finding weighs


def weighed(ranks: Mapping[str, RankText]) -> Iterable[Finding]:
    """All findings, with corrections that need the others.

    What a log of nobody's says is about the rank that it names. An abort says nothing where a watchdog spoke, or where
    its own rank says that it lost somebody; a crash or an unknown exception in that place says as little where another
    rank failed without one.
    """
    everything = _about_their_ranks(ranks)
    echoes: dict[str, list[Finding]] = {}
    for finding in everything:
        if finding.strength is Strength.ECHO:
            echoes.setdefault(finding.rank, []).append(finding)
    is_timed_out = any(finding.rule.startswith("watchdog.") for finding in everything)
    is_anybody_out = any(finding.rule.startswith("watchdog.") for finding in echoes.get("", ()))
    clean = {f.rank for f in everything if f.strength >= Strength.DEATH and not _is_after(f, echoes) and f.rank}
    swept = _swept(everything)
    for finding in everything:
        strength = finding.strength
        if strength in (Strength.ABORT, Strength.DEATH) and (finding.rank, finding.rule) in swept:
            strength = Strength.ECHO
        elif strength is Strength.ABORT:
            is_exit = finding.rule == "process.exit-code" and not is_anybody_out
            if finding.rank in echoes or (is_timed_out and not is_exit):
                strength = Strength.NOISE
        elif finding.rule in _CRASHES or strength is Strength.EXCEPTION:
            if finding.rank and clean - {finding.rank} and _is_after(finding, echoes):
                strength = Strength.ABORT
        yield finding if strength is finding.strength else msgspec.structs.replace(finding, strength=strength)


def _swept(everything: list[Finding]) -> set[tuple[str, str]]:
    """Rank and rule of the ends that a launcher brought about after it had seen another one.

    It says so by a line of its own in between, or by telling of many in one line.
    """
    ends = [f for f in everything if f.rule.startswith("process.") and f.strength >= Strength.ABORT and f.rank]
    first: dict[str, Finding] = {}
    for end in ends:
        first[end.said_by] = min(end, first.get(end.said_by, end), key=lambda f: f.line)
    tidied: dict[str, set[int]] = {}
    for finding in everything:
        if finding.rule == "process.cancelled":
            tidied.setdefault(finding.said_by, set()).update((finding.line, finding.last_line))
    told = Counter((end.said_by, end.line, end.rule) for end in ends)
    swept = set()
    for end in ends:
        begin = first[end.said_by].line
        is_many = told[end.said_by, end.line, end.rule] >= _TASKS_MIN
        is_tidied = any(begin < line < end.line for line in tidied.get(end.said_by, ()))
        if begin < end.line and (is_many or is_tidied):
            swept.add((end.rank, end.rule))
    return swept


def _about_their_ranks(ranks: Mapping[str, RankText]) -> list[Finding]:
    everything = [finding for entry in ranks.values() for finding in entry.findings.values()]
    names = {rank for rank in ranks if rank and not is_source(rank)}
    pids: dict[str, set[str]] = {}
    for rank, entry in ranks.items():
        for pid in entry.pids if rank and not is_source(rank) else ():
            pids.setdefault(pid, set()).add(rank)
    for finding in everything:
        for pid in _PID.findall(finding.text) if finding.rank and not is_source(finding.rank) else ():
            pids.setdefault(pid, set()).add(finding.rank)
    return [_about(finding, names, pids) for finding in everything]


def _named_in(text: str, names: Set[str]) -> set[str]:
    """The names that stand by themselves in a text; a number only where it is said to be a rank's."""
    words = set(_RANK_WORD.findall(text))
    for word in _WORD.findall(text):
        word = word.rstrip(".")
        words |= {word, word.partition(".")[0], _TORCH_NODE.sub("", word)} if not word.isdigit() else set()
    return words & names


def _about(finding: Finding, names: Set[str], pids: Mapping[str, set[str]]) -> Finding:
    """What says that a node was lost is about that node, whoever says it; what a source says is about whom it names."""
    if finding.strength <= Strength.ECHO:
        return finding
    if tells_of_others(finding.rank):
        owner = set(parts(finding.rank)) & names
        if len(owner) == 1:
            return msgspec.structs.replace(finding, rank=owner.pop())
    if not finding.rank and finding.rule.startswith(("process.", "kernel.")):
        about = set().union(*(pids.get(pid, set()) for pid in ended_pids(finding.text)))
        return msgspec.structs.replace(finding, rank=about.pop()) if len(about) == 1 else finding
    if finding.category is not Category.LOST_CONNECTION and not is_source(finding.rank):
        return finding
    if _SURVIVOR.search(finding.text):
        return msgspec.structs.replace(finding, rank="slurm")
    about = _named_in(finding.text, names)
    if not about and is_source(finding.rank):
        about = set().union(*(pids.get(pid, set()) for pid in ended_pids(finding.text)))
    return msgspec.structs.replace(finding, rank=about.pop()) if len(about) == 1 else finding


def _is_after(finding: Finding, echoes: Mapping[str, list[Finding]]) -> bool:
    """Did this rank say before that it lost others? A launcher's word on its end comes after all of its own."""
    for echo in echoes.get(finding.rank, ()):
        if echo.said_by != finding.said_by:
            if finding.rule.startswith("process."):
                return True
        elif echo.line < finding.line <= echo.last_line + _NEAR_LINES:
            return True
    return False


# ---------------------------------------------------------------- who of several


def the_suspects(strongest: list[Finding], findings: list[Finding], ranks: Mapping[str, RankText]) -> list[str]:
    """The ranks that are left of those with equally strong findings; one, if it can be known which.

    Args:
        strongest: findings of at least two ranks.
        findings: all of them.
    """
    echoes: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.strength is Strength.ECHO:
            echoes.setdefault(finding.rank, []).append(finding)
    left = [finding for finding in strongest if not is_source(finding.rank)]
    tests: tuple[Callable[[list[Finding]], set[str]], ...] = (
        lambda left: {f.rank for f in left if not _is_after(f, echoes)},
        lambda left: {
            f.rank for f in left if not (f.is_told and f.rule.startswith("watchdog."))
        },  # deaths that were seen
        lambda left: {f.rank for f in left if not _accuses(f, ranks)},
        lambda left: {f.rank for f in left if f.strength is Strength.HARDWARE and f.scope is not Scope.LINK},
        lambda left: {f.rank for f in left if not _is_up_again(f, ranks)},
        lambda left: _first(left, _SKEW_S),
        lambda left: _most_evidence({f.rank for f in left}, findings),
        lambda left: _first(left, 0.0),
        lambda left: {f.rank for f in left if f.is_first},
        *(lambda left, rule=rule: {f.rank for f in left if f.rule != rule} for rule in _OFTEN_SECOND),
    )
    for test in tests:
        kept = test(left)
        left = [finding for finding in left if finding.rank in kept] or left
    return sorted({finding.rank for finding in left})


def _accuses(finding: Finding, ranks: Mapping[str, RankText]) -> bool:
    """Who is waited for, and itself waits for another one, is not the end of the chain."""
    return finding.is_told and finding.rank in ranks and ranks[finding.rank].accuses


def _is_up_again(finding: Finding, ranks: Mapping[str, RankText]) -> bool:
    """A link that came back afterwards is suspected after one that did not."""
    spoke = ranks[finding.rank].spoke if finding.rank in ranks else {}
    began = spoke.get(finding.rule, 0)
    return finding.strength is Strength.LINK and any(spoke.get(rule, -1) > began for rule in _UP)


def _most_evidence(suspects: set[str], findings: list[Finding]) -> set[str]:
    """The rank with most findings that are more than echoes, if one has more than any other."""
    counts = Counter(f.rank for f in findings if f.rank in suspects and f.strength >= Strength.DEATH)
    most = max(counts.values(), default=0)
    ahead = {rank for rank in suspects if counts[rank] == most}
    return ahead if len(ahead) == 1 else set()


def _first(left: list[Finding], lead_s: float) -> set[str]:
    """The rank that spoke first by more than lead_s, if all of them say when, in forms of time that can be compared."""
    forms = {finding.form for finding in left}
    if forms != {"date", "day"} and len(forms) != 1:
        return set()
    first: dict[str, float] = {}
    for finding in left:
        if finding.at_s is None:
            return set()
        at_s = finding.at_s if len(forms) == 1 else _in_1970(finding.at_s)
        first[finding.rank] = min(first.get(finding.rank, float("inf")), at_s)
    earliest = min(first.values())
    ahead = {rank for rank, at_s in first.items() if at_s - earliest <= lead_s}
    return ahead if len(ahead) == 1 else set()


def _in_1970(at_s: float) -> float:
    """A time without its year, as glog's times have none."""
    moment = datetime.datetime.fromtimestamp(at_s, datetime.UTC)
    day = 28 if (moment.month, moment.day) == (2, 29) else moment.day
    return moment.replace(year=1970, day=day).timestamp()
