"""Who of several ranks with equally strong findings is to be suspected. Pure.

Every test here keeps those that pass it, if some do and some do not; what is left is no order of likelihood but of
what is surer: who failed before it heard of others' failure, broken devices before the links to them, who spoke first
by the clock, who has more to say, and who says what is seldom a consequence.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Callable, Mapping

from unicron.diagnosis.reader import RankText
from unicron.diagnosis.weighing import is_after, is_source
from unicron.diagnosis.words import Finding, Scope, Strength

_SKEW_S = 2.0  # clocks of nodes agree that well
# What a rank says as well when another one failed, though it sounds like a cause; the least telling first.
_OFTEN_SECOND = (
    "watchdog.desync", "program.nan-iterations", "program.diverged", "cuda.contained", "process.data-loader",
    "program.exception",
)  # fmt: skip
_UP = ("kernel.link-up", "nccl.port-up")


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
        lambda left: {f.rank for f in left if not is_after(f, echoes)},
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
