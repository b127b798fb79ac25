"""The root of what many ranks say, and everything else as evidence under it. Pure.

Findings are compared by strength: hardware, then a stated cause, a local link, an exception nobody knows, a death
without a reason, an abort, a slow rank, a witness of a peer; what only echoes another rank's failure never makes its
rank the root. A line that accuses another rank is about that one, never about its speaker. Among equals suspects.py
decides; a cause that several ranks share and that belongs to the job or to storage has no root rank. When nobody says
why, the root is who is behind (behind.py), whom the others name as their other end, or the one that waits for nobody
while others wait.

The order of the ranks never matters, and another rank that only echoes never changes the root: both are tests.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import msgspec

from unicron.diagnosis.behind import SHARE_MAX, is_pending, laggards, runaway
from unicron.diagnosis.collectives import LISTED, TOLD_PROGRESS, odd_one
from unicron.diagnosis.naming import Keys, as_number, short
from unicron.diagnosis.reader import RankText, Reader
from unicron.diagnosis.rules import RULES
from unicron.diagnosis.suspects import the_suspects
from unicron.diagnosis.weighing import is_rest, is_source, tells_of_others, weighed
from unicron.diagnosis.words import Category, Diagnosis, Finding, Scope, Strength
from unicron.types import Severity

EVIDENCE_MAX = 64
DOING_LINES_MAX = 10  # a rank that has said more than so much since does something else by now

_ORDER = {rule.name: index for index, rule in enumerate(RULES)}
_MANY = re.compile(  # keys of several ranks
    r"(?i)(?:all )?(?:the )?(?:others?|rest)\b.*|(?:ranks? ?)?\d+(?:\s?-\s?|, ?)\d.*"
)
_SHARED_SCOPES = (Scope.JOB, Scope.STORAGE)
_UNKNOWN = "program.unknown-failure"
_LOUD = re.compile(r"\b(?:ERROR|FATAL|CRITICAL)\b|(?i:\bfatal error\b|\bpanic)")  # a failure, whatever it is
_LOST = (Category.CONN_REFUSED_RESET, Category.LOST_CONNECTION)  # the other end went away
_HOSTED = ("store.host-lost", "store.leader-lost")  # lost what lives in rank 0
# What a rank says after it was told to end.
_LATER = ("watchdog.waiting", "watchdog.aborted", "process.terminated", "process.forced-end", "process.cancelled")
_ELSEWHERE = ("store.gloo", "watchdog.stack")  # waits in a collective of another backend, or is seen in one
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
    findings = sorted(weighed(ranks), key=_rank_of_finding)
    is_said = bool(findings) and findings[0].strength > Strength.SLOW
    if is_said and not findings[0].is_mutual:
        return _named(findings, [f for f in findings if f.strength is findings[0].strength], ranks)
    found = _mismatched(findings, ranks)
    if is_said and found is None:
        late = laggards(ranks) if findings[0].rule == "nccl.mismatch" else []
        return _diagnosis(findings[0], ",".join(late) or None, findings, findings[0].reason)
    found = found or _behind(findings, ranks)
    if found is not None or not findings:
        return found or NOTHING
    best = findings[0]
    if best.strength is Strength.SLOW:
        return _named(findings, [f for f in findings if f.strength is Strength.SLOW], ranks)
    best = _commonest([f for f in findings if f.strength is best.strength])
    return _diagnosis(best, None, findings, best.reason)


def _rank_of_finding(finding: Finding) -> tuple[int, int, int, str, str]:
    """Strongest first; of one rank the earliest line, then the order of the rules."""
    return (-finding.strength, finding.line, _ORDER.get(finding.rule, -1), finding.rule, finding.rank)


# ---------------------------------------------------------------- somebody says why


def _named(findings: list[Finding], strongest: list[Finding], ranks: Mapping[str, RankText]) -> Diagnosis:
    strongest = _of_somebody(strongest)
    strongest = [finding for finding in strongest if not is_rest(finding.rank)] or strongest
    roots = sorted({finding.rank for finding in strongest}, key=as_number)
    best = strongest[0] if len(roots) == 1 else _commonest(strongest)
    if all(map(is_source, roots)):
        return _diagnosis(best, _victim(findings, ranks), findings, best.reason)
    if len(roots) == 1:
        best = _with_verdict(best, findings)
        # Who is seen alone to have ended, without a cause, is a root only beside others that did not.
        is_first = any(finding.is_first for finding in strongest)
        is_known = best.strength >= (Strength.DEATH if is_first else Strength.LINK) or best.is_told
        is_known |= len(ranks.keys() - {""}) > 1
        root = None if is_rest(roots[0]) else roots[0] or _only_death(findings)
        return _diagnosis(best, (is_known and root) or None, findings, best.reason)
    if best.scope in _SHARED_SCOPES and _is_shared(best, strongest, roots):
        return _diagnosis(best, None, findings, f"{best.reason} (the same on {len(roots)} ranks: no rank is to blame)")
    suspects = the_suspects(strongest, findings, ranks)
    own = [finding for finding in strongest if finding.rank in suspects]
    best = _with_verdict(own[0], findings) if len(suspects) == 1 else _commonest(own)
    if len(suspects) == 1:
        return _diagnosis(best, suspects[0] or None, findings, best.reason)
    root = ",".join(sorted(suspects, key=as_number))
    if best.strength is Strength.HARDWARE and best.scope in (Scope.GPU, Scope.NODE) and "" not in suspects:
        # Broken hardware in several places at once is broken in each of them.
        return _diagnosis(best, root, findings, f"{best.reason} (on each of them)")
    if _are_together(own) and "" not in suspects and len(suspects) <= SHARE_MAX * _num_members(ranks):
        return _diagnosis(best, root, findings, f"{best.reason} (they are named together)")
    return _diagnosis(best, None, findings, f"{best.reason} (on {len(suspects)} ranks, none known to be the first)")


def _of_somebody(strongest: list[Finding]) -> list[Finding]:
    """Without what nobody's lines say too of somebody."""
    rules = {finding.rule for finding in strongest if finding.rank}
    return [finding for finding in strongest if finding.rank or finding.rule not in rules]


def _only_death(findings: list[Finding]) -> str | None:
    """The one rank whose end somebody tells of: what nobody's lines say is about it."""
    died = {f.rank for f in findings if f.strength >= Strength.ABORT and f.rank and not is_source(f.rank)}
    return died.pop() if len(died) == 1 else None


def _are_together(own: list[Finding]) -> bool:
    """Does one line name them all, or does somebody accuse each of them of the same?"""
    if len({(finding.said_by, finding.line, finding.text) for finding in own}) == 1:
        return True
    return all(finding.is_told for finding in own) and len({finding.rule for finding in own}) == 1


def _num_members(ranks: Mapping[str, RankText]) -> int:
    """How many ranks there are at least, by those that speak or are named and by their numbers."""
    numbers = [number for number, _ in map(as_number, ranks)]
    return max(len(ranks), *(number + 1 for number in numbers), 0)


def _victim(findings: list[Finding], ranks: Mapping[str, RankText]) -> str | None:
    """Whom a cause befell that a log of nobody's tells of (dmesg, scheduler): the one rank that died, or was lost."""
    died = {f.rank for f in findings if f.strength >= Strength.ABORT and not is_source(f.rank)}
    if died:
        return died.pop() or None if len(died) == 1 else None
    lost = _behind(findings, ranks, is_one_lost=True)
    alive = {finding.said_by for finding in findings if is_source(finding.rank)}  # they tell of another one
    return lost.root_rank if lost is not None and lost.root_rank not in alive else None


def _is_shared(best: Finding, strongest: list[Finding], roots: list[str]) -> bool:
    return {finding.rank for finding in strongest if finding.rule == best.rule} == set(roots)


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
    is_reported = any(finding.rule == "nccl.mismatch" for finding in findings)
    called = {rank: entry.collectives for rank, entry in ranks.items() if rank}
    if not is_reported:
        called = {rank: {at: call for at, call in calls.items() if at != LISTED} for rank, calls in called.items()}
    odd = odd_one(called)
    if odd is None:
        return None
    reason = f"{odd.words} at the same place: code or data that differ between ranks"
    base = Finding("root.mismatch", Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE, reason)
    return _diagnosis(base, odd.root, findings, reason)


def _behind(findings: list[Finding], ranks: Mapping[str, RankText], *, is_one_lost: bool = False) -> Diagnosis | None:
    """Who all wait for, when there are several ranks and only echoes, witnesses or nothing.

    Args:
        is_one_lost: somebody else tells that one of them was ended.
    """
    members = {rank for rank in ranks if rank and not tells_of_others(rank)}
    if len(members) < 2:
        return None
    told = _told(findings, ranks) & members
    waiting = {f.rank for f in findings if f.strength in (Strength.ECHO, Strength.WITNESS)} & members - told
    alone = runaway({rank: ranks[rank] for rank in members}, told)
    others = told | ({f.rank for f in findings if f.rule in _ELSEWHERE} & members - {alone})
    if alone is not None and len(others) >= SHARE_MAX * _num_members(ranks):
        return _gone_on(alone, findings)
    # What is told with another's timeout are numbers of the first group, whatever group it was.
    recorded = {rank for rank in members - told if _is_recorded(ranks[rank])}
    idle = (recorded | {f.rank for f in findings if f.rule == "watchdog.idle"} & members) - waiting
    if idle and waiting and len(idle) <= SHARE_MAX * len(members):
        reason = "all others have a collective pending and this rank has none"
        return _hang(",".join(sorted(idle, key=as_number)), Scope.PROCESS, findings, reason)
    late = laggards({rank: ranks[rank] for rank in members})
    if late:
        reason = "fewer collectives were started or done here than on the other ranks of the group, and they wait"
        return _hang(",".join(late), Scope.PROCESS, findings, reason)
    ends = _ends(findings, ranks)
    named = {end for f, end in ends if end in members - waiting and (f.strength >= Strength.ECHO or waiting)}
    if len(named) == 1:
        return _hang(named.pop(), Scope.PROCESS, findings, "the others name it as the one they wait for")
    quiet = _wordless(findings, ranks, members - waiting - told, waiting | told, is_one_lost=is_one_lost)
    return quiet or _silent(findings, ranks, members, waiting) or _common_end(findings, ends)


def _told(findings: list[Finding], ranks: Mapping[str, RankText]) -> set[str]:
    """Who only heard of another one's timeout, and is not known to have begun what has not ended."""
    told = {finding.rank for finding in findings if finding.rule == "watchdog.told"}
    others = {f.rank for f in findings if f.strength is Strength.ECHO and f.rule not in ("watchdog.told", *_LATER)}
    return {rank for rank in told - others if not any(map(is_pending, ranks[rank].progress.values()))}


def _is_recorded(entry: RankText) -> bool:
    """Does it say how far it is, with nothing that has not ended?"""
    said = [progress for group, progress in entry.progress.items() if group != TOLD_PROGRESS]
    return bool(said) and not any(map(is_pending, said))


def _gone_on(alone: str, findings: list[Finding]) -> Diagnosis:
    reason = "it alone began collectives, and the others, which stand together, did not follow"
    if any(finding.rule in _ELSEWHERE and finding.rank != alone for finding in findings):
        reason += ": they wait in another one, so ranks called different collectives: code or data"
        base = Finding("root.alone", Severity.FATAL, Scope.JOB, Category.OTHER_SOFTWARE, Strength.CAUSE, reason)
        return _diagnosis(base, alone, findings, reason)
    return _hang(alone, Scope.PROCESS, findings, reason)


def _wordless(
    findings: list[Finding], ranks: Mapping[str, RankText], silent: set[str], others: set[str], *, is_one_lost: bool
) -> Diagnosis | None:
    """The one rank whose text is empty, when all others lost a connection; the store's host before any other one."""
    empty = {rank for rank in silent if ranks[rank].num_lines == 0}
    lost = [f for f in findings if f.rank in others and f.strength is Strength.ECHO and f.category in _LOST]
    host = Keys(ranks.keys()).find("0")
    if host in empty and any(finding.rule in _HOSTED for finding in lost):
        return _hang(host, Scope.PROCESS, findings, "the others lost what lives in this rank, which says nothing")
    if len(empty) != 1 or silent != empty or not others:
        return None
    is_pair = bool(lost) and (is_one_lost or _num_members(ranks) == len(others) + 1)
    if len(others) > 1 or is_pair or any(map(is_rest, others)):
        return _hang(
            empty.pop(), Scope.PROCESS, findings, "all others lost somebody or wait, and this rank says nothing"
        )
    return None


def _ends(findings: list[Finding], ranks: Mapping[str, RankText]) -> list[tuple[Finding, str]]:
    """Findings that name another rank of the input as their other end, by its key or by an address of its own."""
    owners: dict[str, set[str]] = {}
    for rank, entry in ranks.items():
        for address in entry.addresses:
            owners.setdefault(address, set()).add(rank)
    found = []
    for finding in findings:
        owner = owners.get(short(finding.peer), set()) if finding.peer not in ranks else {finding.peer}
        found += [(finding, rank) for rank in owner if rank not in ("", finding.rank) and len(owner) == 1]
    return found


def _common_end(findings: list[Finding], ends: list[tuple[Finding, str]]) -> Diagnosis | None:
    """The one rank that is an end of every connection that failed, of several ones: all wait, and all for it."""
    pairs = {frozenset((finding.rank, end)) for finding, end in ends if finding.strength is Strength.WITNESS}
    shared = frozenset.intersection(*pairs) if len(pairs) > 1 else frozenset()
    if len(shared) != 1:
        return None
    best = next(finding for finding in findings if finding.strength is Strength.WITNESS)
    return _diagnosis(best, next(iter(shared)), findings, f"{best.reason}; it is one end of every one that failed")


def _silent(
    findings: list[Finding], ranks: Mapping[str, RankText], members: set[str], waiting: set[str]
) -> Diagnosis | None:
    """The one rank that does not wait, if all others do and it says what it does, or there are several others.

    Of several that are silent, the only one that was doing something that takes long.
    """
    silent = members - waiting
    if not silent or not waiting:
        return None
    doing = {f.rank: f for f in reversed(findings) if f.rank in silent and _is_at_it(f, ranks[f.rank])}
    if len(doing) == 1:
        found = next(iter(doing.values()))
        return _hang(found.rank, found.scope, findings, f"others wait and it does not: {found.reason}")
    failing = [f for f in findings if f.rank in silent and f.rule == _UNKNOWN and _LOUD.search(f.text)]
    if len(silent) == 1 and failing:
        return _diagnosis(failing[0], silent.pop(), findings, "all others wait, and it alone speaks of a failure")
    if len(silent) == 1 and (len(waiting) > 1 or any(map(_MANY.fullmatch, waiting))):
        return _hang(silent.pop(), Scope.PROCESS, findings, "all others wait and it does not")
    return None


def _is_at_it(finding: Finding, entry: RankText) -> bool:
    """Was this the last that its rank was doing? What it has said it finished, or went on from, is over."""
    if finding.category is not Category.TASK_HANG or finding.peer:
        return False
    began = entry.spoke.get(finding.rule, 0)
    ended = entry.spoke.get("program.finished", -1)
    return ended < began and entry.num_lines - began <= DOING_LINES_MAX


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
