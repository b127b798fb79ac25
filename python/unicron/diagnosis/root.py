"""The root of what many ranks say, and everything else as evidence under it. Pure.

Findings are compared by strength: hardware, then a stated cause, a local link, an exception nobody knows, a death
without a reason, an abort, a witness of a peer; what only echoes another rank's failure never makes its rank the root.
Among equals the rank with more evidence, then the one that spoke first, where the clocks can be compared; a cause that
several ranks share and that belongs to the job or to storage has no root rank. When nobody says why, the root is who is
behind: the lowest sequence number in the same process group, or the one that waits for nobody while all others wait.

The order of the ranks never matters, and another rank that only echoes never changes the root: both are tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from unicron.diagnosis.collectives import odd_one
from unicron.diagnosis.lines import time_form
from unicron.diagnosis.reader import RankText, Reader
from unicron.diagnosis.rules import RULES
from unicron.diagnosis.words import Category, Diagnosis, Finding, Progress, Scope, Strength
from unicron.types import Severity

EVIDENCE_MAX = 64
ROOTS_SHARE_MAX = 0.5  # more ranks than this share behind are no root: the others are ahead

_ORDER = {rule.name: index for index, rule in enumerate(RULES)}
# Logs that speak of others; never a suspect themselves.
_SOURCES = re.compile(
    r"(?i)(?:dmesg|kernel|kern|syslog|journal\w*|slurm\w*|srun|scheduler|controller|launcher|torchrun|"
    r"agent|system|all)(?:\.log)?"
)
_SHARED_SCOPES = (Scope.JOB, Scope.STORAGE)
NOTHING = Diagnosis(Severity.INFO, Scope.PROCESS, Category.NONE, "no rule knows anything in this text")


def diagnose_text(text: str) -> Diagnosis:
    """The diagnosis of one text, of one rank or of several with prefixes. Never raises."""
    reader = Reader()
    reader.read_unranked(text.splitlines())
    return diagnose(reader.ranks)


def diagnose_ranks(texts: Mapping[str, str]) -> Diagnosis:
    """The diagnosis of texts by rank (or by node; any key). Never raises."""
    reader = Reader(known=texts.keys())
    for rank, text in texts.items():
        reader.read(rank, text)
    return diagnose(reader.ranks)


def diagnose(ranks: Mapping[str, RankText]) -> Diagnosis:
    """The diagnosis of what a Reader understood.

    `root_rank` is a key of `ranks`, several joined by commas, None when it cannot be known.
    """
    findings = sorted(_weighed(ranks), key=_rank_of_finding)
    is_said = bool(findings) and findings[0].strength > Strength.WITNESS
    if is_said and not findings[0].is_mutual:
        return _named(findings, [f for f in findings if f.strength is findings[0].strength], ranks)
    found = _mismatched(findings, ranks)
    if is_said and found is None:
        return _diagnosis(findings[0], None, findings, findings[0].reason)
    found = found or _behind(findings, ranks)
    if found is not None or not findings:
        return found or NOTHING
    best = findings[0]
    best = _commonest([f for f in findings if f.strength is best.strength])
    return _diagnosis(best, None, findings, best.reason)


def _rank_of_finding(finding: Finding) -> tuple[int, int, int, str, str]:
    """Strongest first; of one rank the earliest line, then the order of the rules."""
    return (-finding.strength, finding.line, _ORDER.get(finding.rule, -1), finding.rule, finding.rank)


def _weighed(ranks: Mapping[str, RankText]) -> Iterable[Finding]:
    """All findings, with two corrections that need the others.

    An abort says nothing where a watchdog spoke, or where its own rank says that it lost somebody. What says that a
    node was lost is about that node, whoever says it.
    """
    everything = [finding for entry in ranks.values() for finding in entry.findings.values()]
    is_timed_out = any(finding.rule.startswith("watchdog.") for finding in everything)
    names = [rank for rank in ranks if rank and not rank.isdigit()]
    for finding in everything:
        if finding.strength is Strength.ABORT:
            entry = ranks.get(finding.rank)
            own = entry.findings.values() if entry else ()
            if is_timed_out or any(other.strength is Strength.ECHO for other in own):
                finding = msgspec.structs.replace(finding, strength=Strength.NOISE)
        elif finding.category is Category.LOST_CONNECTION:
            about = [name for name in names if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", finding.text)]
            if len(about) == 1:
                finding = msgspec.structs.replace(finding, rank=about[0])
        yield finding


# ---------------------------------------------------------------- somebody says why


def _named(findings: list[Finding], strongest: list[Finding], ranks: Mapping[str, RankText]) -> Diagnosis:
    roots = sorted({finding.rank for finding in strongest})
    best = strongest[0] if len(roots) == 1 else _commonest(strongest)
    if len(roots) == 1 and _SOURCES.fullmatch(roots[0]):
        return _diagnosis(best, _victim(findings), findings, best.reason)
    if len(roots) == 1:
        best = _with_verdict(best, findings)
        # Who is seen alone to have ended, without a cause, is a root only beside others that did not.
        is_known = best.strength >= Strength.LINK or len(ranks.keys() - {""}) > 1
        return _diagnosis(best, (is_known and roots[0]) or None, findings, best.reason)
    if best.scope in _SHARED_SCOPES and _is_shared(best, strongest, roots):
        return _diagnosis(best, None, findings, f"{best.reason} (the same on {len(roots)} ranks: no rank is to blame)")
    suspects = [rank for rank in roots if not _SOURCES.fullmatch(rank)] or roots
    root = _most_evidence(suspects, findings) or _first([f for f in strongest if f.rank in suspects])
    if root is None and best.strength is Strength.HARDWARE and best.scope in (Scope.GPU, Scope.NODE):
        # Broken hardware in several places at once is broken in each of them.
        return _diagnosis(best, ",".join(suspects), findings, f"{best.reason} (on each of them)")
    if root is None:
        return _diagnosis(best, None, findings, f"{best.reason} (on {len(roots)} ranks, none known to be the first)")
    best = _with_verdict(next(f for f in strongest if f.rank == root), findings)
    return _diagnosis(best, root, findings, best.reason)


def _victim(findings: list[Finding]) -> str | None:
    """Whom a cause befell that a log of nobody's tells of (dmesg, scheduler): the one rank that died of something."""
    died = {f.rank for f in findings if f.strength >= Strength.ABORT and not _SOURCES.fullmatch(f.rank)}
    return died.pop() or None if len(died) == 1 else None


def _is_shared(best: Finding, strongest: list[Finding], roots: list[str]) -> bool:
    return {finding.rank for finding in strongest if finding.rule == best.rule} == set(roots)


def _most_evidence(roots: list[str], findings: list[Finding]) -> str | None:
    """The rank with most findings that are causes, if one has more than any other."""
    counts = Counter(f.rank for f in findings if f.rank in roots and f.strength >= Strength.LINK)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    is_one = len(ordered) == 1 or (len(ordered) > 1 and ordered[0][1] > ordered[1][1])
    return ordered[0][0] if is_one else None


def _first(strongest: list[Finding]) -> str | None:
    """The rank that spoke first, if all of them say when, in one form of time."""
    times = {(time_form(finding.text), finding.at_s is None) for finding in strongest}
    if len(times) != 1 or next(iter(times))[1]:
        return None
    ordered = sorted((finding.at_s or 0.0, finding.rank) for finding in strongest)
    earliest = {rank for at_s, rank in ordered if at_s == ordered[0][0]}
    return earliest.pop() if len(earliest) == 1 else None


def _with_verdict(best: Finding, findings: list[Finding]) -> Finding:
    """A link's error beside the driver's verdict on the GPU (Xid 154) is the GPU's."""
    if best.category is Category.NVLINK and best.scope is Scope.LINK:
        if any(f.rule == "xid.154" and f.rank == best.rank and f.severity is Severity.SEV1 for f in findings):
            reason = f"{best.reason}; the driver wants the GPU reset"
            return msgspec.structs.replace(best, scope=Scope.GPU, reason=reason)
    return best


# ---------------------------------------------------------------- nobody says why


def _mismatched(findings: list[Finding], ranks: Mapping[str, RankText]) -> Diagnosis | None:
    """Members of a group that called different collectives: code, whoever of them is odd."""
    odd = odd_one({rank: entry.collectives for rank, entry in ranks.items() if rank})
    if odd is None:
        return None
    reason = f"{odd.words} at the same place: code or data that differ between ranks"
    base = Finding("root.mismatch", Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE, reason)
    return _diagnosis(base, odd.root, findings, reason)


def _behind(findings: list[Finding], ranks: Mapping[str, RankText]) -> Diagnosis | None:
    """Who all wait for, when there are several ranks and only echoes, witnesses or nothing."""
    if len(ranks.keys() - {""}) < 2:
        return None
    waiting = {f.rank for f in findings if f.strength in (Strength.ECHO, Strength.WITNESS)}
    recorded = {rank for rank, entry in ranks.items() if rank and entry.progress}
    idle = (recorded | {f.rank for f in findings if f.rule == "watchdog.idle"}) - waiting
    if idle and waiting and len(idle) <= ROOTS_SHARE_MAX * len(ranks):
        reason = "all others have a collective pending and this rank has none"
        return _hang(",".join(sorted(idle, key=_as_number)), Scope.PROCESS, findings, reason)
    late = _laggards(ranks)
    if late:
        reason = "fewer collectives were started or done here than on the other ranks of the group, and they wait"
        return _hang(",".join(late), Scope.PROCESS, findings, reason)
    peers = (f.peer for f in findings if f.peer != f.rank)
    named = {peer for peer in peers if peer in ranks and peer and peer not in waiting}
    if len(named) == 1:
        return _hang(named.pop(), Scope.PROCESS, findings, "the others name it as the one they wait for")
    return _silent(findings, ranks, waiting)


def _silent(findings: list[Finding], ranks: Mapping[str, RankText], waiting: set[str]) -> Diagnosis | None:
    """The one rank that does not wait, if all others do and it says what it does, or there are several others."""
    silent = sorted(ranks.keys() - waiting - {""})
    if len(silent) != 1 or not waiting:
        return None
    doing = next((f for f in findings if f.rank == silent[0] and f.category is Category.TASK_HANG), None)
    if doing is not None:
        return _hang(silent[0], doing.scope, findings, f"all others wait and it does not: {doing.reason}")
    if len(waiting) > 1:
        return _hang(silent[0], Scope.PROCESS, findings, "all others wait and it does not")
    return None


def _laggards(ranks: Mapping[str, RankText]) -> list[str]:
    """The ranks with the lowest number in a process group, if they are the fewer ones. Groups are never compared.

    By collectives started; where all started as many, by those done (a device that stopped).
    """
    groups: dict[str, dict[str, Progress]] = {}
    for rank, entry in ranks.items():
        for group, progress in entry.progress.items() if rank else ():
            groups.setdefault(group, {})[rank] = progress
    late: set[str] = set()
    for members in groups.values():
        started = {rank: progress.enqueued for rank, progress in members.items()}
        done = {rank: progress.completed for rank, progress in members.items() if progress.completed is not None}
        late |= _fewest(started) or (_fewest(done) if len(done) == len(started) else set())
    return sorted(late, key=_as_number)


def _fewest(numbers: Mapping[str, int]) -> set[str]:
    lowest = min(numbers.values(), default=0)
    behind = {rank for rank, number in numbers.items() if number == lowest}
    return behind if len(behind) <= ROOTS_SHARE_MAX * len(numbers) else set()


def _as_number(rank: str) -> tuple[int, str]:
    return (int(rank) if rank.isascii() and rank.isdigit() else -1, rank)


def _hang(root: str, scope: Scope, findings: list[Finding], reason: str) -> Diagnosis:
    base = Finding("root.behind", Severity.SEV2, scope, Category.TASK_HANG, Strength.CAUSE, reason)
    return _diagnosis(base, root, findings, reason)


# ---------------------------------------------------------------- the answer


def _commonest(findings: list[Finding]) -> Finding:
    """The finding that most ranks share; among equals the first in the order of findings."""
    counts = Counter(finding.rule for finding in findings)
    return min(findings, key=lambda f: (-counts[f.rule], *_rank_of_finding(f)))


def _diagnosis(best: Finding, root: str | None, findings: list[Finding], reason: str) -> Diagnosis:
    """Evidence begins with the root's own, strongest first."""
    roots = set(root.split(",")) if root else set()
    ordered = sorted(findings, key=lambda f: (f.rank not in roots, *_rank_of_finding(f)))
    return Diagnosis(best.severity, best.scope, best.category, reason, root, best.rule, tuple(ordered[:EVIDENCE_MAX]))
