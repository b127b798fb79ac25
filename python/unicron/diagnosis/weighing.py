"""What a finding weighs beside others, and whom it is about. Pure.

What is told after a failure spread is no failure of its own: an abort behind a watchdog, a crash or an exception behind
an echo of its rank, an end that a launcher brought about (ends.py). The line stays as evidence; it only makes nobody
the root.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set

import msgspec

from unicron.diagnosis.ends import DEADLY, Ends, ends_of
from unicron.diagnosis.naming import ended_pids, parts
from unicron.diagnosis.reader import RankText
from unicron.diagnosis.words import Category, Finding, Strength

# Logs that speak of others; never a suspect themselves.
_SOURCES = re.compile(
    r"(?i)(?:dmesg|kern(?:el)?|syslog|journal\w*|messages|slurm\w*|srun|sbatch|scheduler|controller|launcher|torchrun|"
    r"mpirun|mpiexec|prterun|horovodrun|deepspeed|elastic[\w-]*|agent|kubelet|kubectl|k8s|kubernetes|events?|operator|"
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
_NEAR_LINES = 200  # an echo so far before a failure has to do with it; startup's retries have not
# Deaths of a process that its own clean-up brings about as well, after others are gone.
_CRASHES = ("process.segfault", "process.bus-error", "process.killed", "process.data-loader", "cuda.launch-failure")
# Echoes of a rank that is about to be ended, by itself or by the launcher: what it says afterwards is clean-up.
_GONE = (
    "nccl.peer-closed", "store.connection-lost", "store.host-lost", "store.leader-lost", "store.coordinated-end",
    "store.gloo", "watchdog.timeout", "watchdog.first-collective", "watchdog.own", "watchdog.told", "watchdog.waiting",
    "watchdog.aborted",
)  # fmt: skip
_REMOTE = re.compile(r"(?i)remote|network error")  # in what NCCL says: it lost a peer
_TOLD_TO_END = ("process.terminated", "process.forced-end")


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


def weighed(ranks: Mapping[str, RankText]) -> Iterable[Finding]:
    """All findings, with corrections that need the others.

    What a log of nobody's says is about the rank that it names. An abort says nothing where a watchdog spoke, or where
    its own rank says that it lost somebody; a crash or an unknown exception in that place says as little where another
    rank failed without one, and a signal that a clean-up meets where there are other ranks at all. What a scheduler
    ended is no failure of its own.
    """
    everything = _about_their_ranks(ranks)
    seen = _seen(everything, is_several=len(ranks.keys() - {""}) > 1)
    for finding in everything:
        strength = _strength(finding, seen)
        yield finding if strength is finding.strength else msgspec.structs.replace(finding, strength=strength)


class _Clean(msgspec.Struct, frozen=True):
    """Failures of ranks that had heard of no other one: who, and in which line."""

    found: set[tuple[str, str]]
    ranks: Counter[str]
    texts: Counter[str]

    def is_other(self, rank: str, text: str) -> bool:
        """Is there one of another rank, and in another line?"""
        both = (rank, text) in self.found
        return len(self.found) - self.ranks[rank] - self.texts[text] + both > 0


class _Seen(msgspec.Struct, frozen=True):
    """What all findings together say of one."""

    echoes: dict[str, list[Finding]]  # by rank
    is_several: bool  # there are other ranks
    is_timed_out: bool  # somewhere, by a watchdog
    is_anybody_out: bool  # so does a line of nobody's
    clean: _Clean
    ends: Ends


def _seen(everything: list[Finding], *, is_several: bool) -> _Seen:
    echoes: dict[str, list[Finding]] = {}
    for finding in everything:
        if finding.strength is Strength.ECHO:
            echoes.setdefault(finding.rank, []).append(finding)
    clean = {
        (f.rank, f.text) for f in everything if f.strength >= Strength.DEATH and f.rank and not is_after(f, echoes)
    }
    late = {f.rank for f in everything if f.rule in DEADLY and is_after(f, echoes, _GONE)}
    return _Seen(
        echoes,
        is_several,
        any(finding.rule.startswith("watchdog.") for finding in everything),
        any(finding.rule.startswith("watchdog.") for finding in echoes.get("", ())),
        _Clean(clean, Counter(rank for rank, _ in clean), Counter(text for _, text in clean)),
        ends_of(everything, echoes.keys(), late),
    )


def _strength(finding: Finding, seen: _Seen) -> Strength:
    """How much a finding says beside all others."""
    strength, place = finding.strength, (finding.rank, finding.rule)
    if place == seen.ends.began:
        return max(strength, Strength.DEATH)
    if place in seen.ends.swept and strength >= Strength.ABORT:
        return Strength.ECHO
    if strength is Strength.ABORT:
        is_exit = finding.rule == "process.exit-code" and not seen.is_anybody_out
        is_late = finding.rank in seen.echoes or (seen.is_timed_out and not is_exit)
        return Strength.NOISE if is_late else strength
    if place in seen.ends.doubtful:
        return Strength.ABORT
    if finding.rank and (finding.rule in _CRASHES or strength is Strength.EXCEPTION):
        if seen.is_several and finding.rule in DEADLY and _is_clean_up(finding, seen.echoes):
            return Strength.NOISE
        if seen.clean.is_other(finding.rank, finding.text) and is_after(finding, seen.echoes):
            return Strength.ABORT
    return strength


def _is_clean_up(finding: Finding, echoes: Mapping[str, list[Finding]]) -> bool:
    """Did this one end after it had said that it lost somebody, or that it was told to end?"""
    own = [f for f in echoes.get(finding.rank, ()) if f.said_by == finding.said_by and "closing signal" not in f.text]
    return is_after(finding, {finding.rank: own}, (*_GONE, *_TOLD_TO_END))


# ---------------------------------------------------------------- whom a finding is about


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


# ---------------------------------------------------------------- what came before


def is_after(finding: Finding, echoes: Mapping[str, list[Finding]], rules: tuple[str, ...] | None = None) -> bool:
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
