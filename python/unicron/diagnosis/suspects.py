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

from unicron.diagnosis.naming import ended, ended_pids, parts
from unicron.diagnosis.reader import RankText
from unicron.diagnosis.words import Category, Finding, Scope, Strength

# Logs that speak of others; never a suspect themselves.
_SOURCES = re.compile(
    r"(?i)(?:dmesg|kern(?:el)?|syslog|journal\w*|messages|slurm\w*|srun|sbatch|scheduler|controller|launcher|torchrun|"
    r"mpirun|prterun|horovodrun|deepspeed|elastic[\w-]*|agent|kubelet|kubectl|k8s|kubernetes|events?|operator|"
    r"monitor|supervisor|parent|orchestrator|system|all)(?:[-_ .]?\d{1,4})?(?:\.log)?|"
    r"(?:the )?(?:node|host|machine|cluster|pod|driver|ray|cgroup|oom)(?:[ _-](?:log|events?))?"
)
_REST = re.compile(r"(?i)(?:all )?(?:the )?(?:others?|rest|remaining)\b.*")  # keys of whoever is not named
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
# Echoes of a rank that is about to be ended, by itself or by the launcher: what it says afterwards is clean-up.
_GONE = (
    "nccl.peer-closed", "store.connection-lost", "store.host-lost", "store.leader-lost", "store.coordinated-end",
    "store.gloo", "watchdog.timeout", "watchdog.first-collective", "watchdog.own", "watchdog.told", "watchdog.waiting",
    "watchdog.aborted",
)  # fmt: skip
_REMOTE = re.compile(r"(?i)remote|network error")  # in what NCCL says: it lost a peer
_TOLD_TO_END = ("process.terminated", "process.forced-end")
_SIGNALS = ("process.segfault", "process.bus-error")  # that a process's own clean-up meets
_ENDS = ("process.killed", "process.exit-code", "process.aborted", *_SIGNALS)
# srun, once: the end that it has just told of makes it end the whole step.
_STEP_ENDS = re.compile(r"(?i)Terminating (?:Step|Job)|First task exited|\bSTEP \S{1,40} (?:ON \S{1,80} )?CANCELLED")


@functools.cache
def is_source(rank: str) -> bool:
    """Is this the log of somebody that only tells of others: a kernel, a scheduler, a launcher?"""
    return _SOURCES.fullmatch(rank) is not None


@functools.cache
def tells_of_others(rank: str) -> bool:
    """Is this, or one with a node's name (``dmesg n2``), such a log?"""
    return is_source(rank) or any(map(is_source, parts(rank)))


@functools.cache
def is_rest(rank: str) -> bool:
    """Is this the name of whoever is not named, ``others``?"""
    return _REST.fullmatch(rank) is not None


# ---------------------------------------------------------------- what a finding weighs


def weighed(ranks: Mapping[str, RankText]) -> Iterable[Finding]:
    """All findings, with corrections that need the others.

    What a log of nobody's says is about the rank that it names. An abort says nothing where a watchdog spoke, or where
    its own rank says that it lost somebody; a crash or an unknown exception in that place says as little where another
    rank failed without one, and a signal that a clean-up meets where there are other ranks at all. What a scheduler
    ended is no failure of its own.
    """
    everything = _about_their_ranks(ranks)
    seen = _seen(everything, len(ranks.keys() - {""}) > 1)
    for finding in everything:
        strength = _strength(finding, seen)
        yield finding if strength is finding.strength else msgspec.structs.replace(finding, strength=strength)


class _Seen(msgspec.Struct, frozen=True):
    """What all findings together say of one."""

    echoes: dict[str, list[Finding]]  # by rank
    is_several: bool  # there are other ranks
    is_timed_out: bool  # somewhere, by a watchdog
    is_anybody_out: bool  # so does a line of nobody's
    clean: set[str]  # ranks that failed before they heard of others
    swept: set[tuple[str, str]]  # rank and rule of the ends that a launcher brought about
    began: tuple[str, str] | None  # rank and rule of the end for which a scheduler ended the rest
    doubtful: set[str]  # ranks that were killed, or somebody's exit had them killed


def _seen(everything: list[Finding], is_several: bool) -> _Seen:
    echoes: dict[str, list[Finding]] = {}
    for finding in everything:
        if finding.strength is Strength.ECHO:
            echoes.setdefault(finding.rank, []).append(finding)
    began = _began(everything, echoes)
    swept = _swept(everything) | {
        (f.rank, f.rule) for f in everything if _is_told_to_end(f, echoes) or _is_of_step(f, began)
    }
    killed = [f for f in everything if f.rule == "process.killed" and _is_by_srun(f)]
    exits = [f for f in everything if f.rule == "process.exit-code" and f.rank and f.rank not in echoes]
    explained = [exit for exit in exits if _has_own_words(exit, everything)]
    swept |= {(f.rank, f.rule) for f in killed if any(f.said_by != exit.said_by != "" for exit in explained)}
    swept |= {(f.rank, f.rule) for f in killed if _is_of_many(f, everything, echoes)}
    return _Seen(
        echoes,
        is_several,
        any(finding.rule.startswith("watchdog.") for finding in everything),
        any(finding.rule.startswith("watchdog.") for finding in echoes.get("", ())),
        {f.rank for f in everything if f.strength >= Strength.DEATH and not _is_after(f, echoes) and f.rank},
        swept,
        began,
        {f.rank for f in killed if any(f.said_by != exit.said_by != "" for exit in exits)},
    )


def _strength(finding: Finding, seen: _Seen) -> Strength:
    """How much a finding says beside all others."""
    strength, place = finding.strength, (finding.rank, finding.rule)
    if place == seen.began:
        return max(strength, Strength.DEATH)
    if place in seen.swept and strength >= Strength.ABORT:
        return Strength.ECHO
    if strength is Strength.ABORT:
        is_exit = finding.rule == "process.exit-code" and not seen.is_anybody_out
        is_late = finding.rank in seen.echoes or (seen.is_timed_out and not is_exit)
        return Strength.NOISE if is_late else strength
    if finding.rule == "process.killed" and finding.rank in seen.doubtful:
        return Strength.ABORT
    if finding.rank and (finding.rule in _CRASHES or strength is Strength.EXCEPTION):
        if seen.is_several and finding.rule in _SIGNALS and _is_after(finding, seen.echoes, _GONE):
            return Strength.NOISE
        if seen.clean - {finding.rank} and _is_after(finding, seen.echoes):
            return Strength.ABORT
    return strength


def _began(everything: list[Finding], echoes: Mapping[str, list[Finding]]) -> tuple[str, str] | None:
    """Rank and rule of the end behind which, in a text of its own, srun says that it ends the step; if it is one."""
    steps: dict[str, int] = {}  # by text: the line
    for finding in everything:
        if finding.rule == "process.cancelled" and finding.said_by and _STEP_ENDS.search(finding.text):
            steps[finding.said_by] = min(finding.line, steps.get(finding.said_by, finding.line))
    found: dict[str, Finding] = {}
    for end in everything:
        if end.rule in _ENDS and end.rank and end.line < steps.get(end.said_by, 0):
            found[end.rank] = min(end, found.get(end.rank, end), key=lambda f: f.line)
    if len(found) != 1:
        return None
    end = next(iter(found.values()))
    return None if _is_after(end, echoes, _GONE) else (end.rank, end.rule)


def _is_of_step(finding: Finding, began: tuple[str, str] | None) -> bool:
    """Is this an end of which srun told when it was ending the step already?"""
    return began is not None and finding.rank != began[0] and finding.rule in _ENDS and _is_by_srun(finding)


def _is_of_many(kill: Finding, everything: list[Finding], echoes: Mapping[str, list[Finding]]) -> bool:
    """Were many killed at once, where one ended otherwise, and not after them?"""
    if len(ended(kill.text)) < _TASKS_MIN:
        return False
    return any(
        end.rule in _ENDS
        and end.text != kill.text
        and end.rank not in {"", *echoes}
        and (end.said_by != kill.said_by or end.line < kill.line)
        for end in everything
    )


def _is_by_srun(finding: Finding) -> bool:
    return "srun: " in finding.text


def _is_told_to_end(finding: Finding, echoes: Mapping[str, list[Finding]]) -> bool:
    """Was this one killed after it had said that it was told to end?"""
    told = [f for f in echoes.get(finding.rank, ()) if f.rule in _TOLD_TO_END and "closing signal" not in f.text]
    return finding.rule == "process.killed" and bool(finding.rank) and _is_after(finding, {finding.rank: told})


def _has_own_words(exit: Finding, everything: list[Finding]) -> bool:
    """Did the rank that ended itself say before that something failed?"""
    return any(
        f.rank == exit.rank and f.said_by == exit.said_by and f.line < exit.line
        for f in everything
        if f.rule.startswith(("program.unknown", "program.complaint", "program.other", "process.mpi"))
    )


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


def _is_after(finding: Finding, echoes: Mapping[str, list[Finding]], rules: tuple[str, ...] | None = None) -> bool:
    """Did this rank say before that it lost others? A launcher's word on its end comes after all of its own.

    Args:
        rules: only these, and NCCL's own error where it speaks of a remote end; None: all.
    """
    for echo in echoes.get(finding.rank, ()):
        if rules is not None and echo.rule not in rules:
            if echo.rule != "nccl.system-error" or not _REMOTE.search(echo.text):
                continue
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
