"""Which ends of processes a launcher or scheduler brought about, after it had seen another one. Pure.

It says so by a line of its own in between, by telling of many in one line, or (srun) by ending the whole step once,
behind the end that made it do so. A process that srun only says was killed, without a word on why, is beside one that
ended by itself with an error more often its victim than its cause; where nothing tells them apart neither is believed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set

import msgspec

from unicron.diagnosis.naming import ended
from unicron.diagnosis.words import Finding, Strength

DEADLY = ("process.segfault", "process.bus-error", "process.killed")  # what clean-up meets, or brings
_ENDS = ("process.exit-code", "process.aborted", *DEADLY)
_TASKS_MIN = 3  # so many ranks whose end one line tells of were ended by somebody
_CRASHES = ("process.segfault", "process.bus-error")
# srun, once: the end that it has just told of makes it end the whole step. Slurm's daemon says the same on a node, too,
# and where a person cancelled it.
_STEP_ENDS = re.compile(r"(?i)Terminating (?:Step|Job)|First task exited|\bSTEP \S{1,40} (?:ON \S{1,80} )?CANCELLED")
_BY_DAEMON = re.compile(r"CANCELLED")  # not srun
# Lightning's monitor, of the first of its children that ended with an error: it kills all others, and itself.
_FIRST = re.compile(r"Forcefully terminating all other processes")
_OWN_WORDS = ("program.unknown-failure", "program.complaint", "program.other-exception", "process.mpi")

Place = tuple[str, str]  # a rank and the rule of its finding


class Ends(msgspec.Struct, frozen=True):
    swept: set[Place]  # brought about by who tidies up
    began: Place | None  # the one for which the rest was ended
    doubtful: set[Place]  # cause or victim: it cannot be told


def ends_of(everything: list[Finding], echoing: Set[str], late: Set[str]) -> Ends:
    """What the ends among all findings are.

    Args:
        echoing: ranks that say that others failed.
        late: ranks that ended after they had said that they lost others.
    """
    steps = _step_ends(everything)
    swept = _swept(everything)
    began = _began(everything, steps, late)
    if began is not None:
        swept |= {_place(f) for f in everything if f.rank != began.rank and _is_of_step(f, began, steps)}
    else:
        began = _first_child(everything, late)
        if began is not None:
            swept |= {_place(f) for f in everything if f.rule == "process.killed" and f.rank != began.rank}
    kills = [f for f in everything if f.rule == "process.killed" and _is_by_srun(f)]
    cancelled = {f.text for f in kills if f.said_by in steps and f.line > steps[f.said_by].line}
    swept |= {_place(f) for f in kills if f.text in cancelled} | _of_many(kills, everything, steps, echoing)
    exits = [f for f in everything if f.rule == "process.exit-code" and f.rank and f.rank not in echoing]
    explained = {f.said_by for f in _with_own_words(exits, everything)} - {""}
    swept |= {_place(f) for f in kills if _is_elsewhere(f, explained)}
    few = [exit for exit in exits if len(ended(exit.text)) < _TASKS_MIN]
    told = {f.said_by for f in few} - {""} if len({f.rank for f in few}) < _TASKS_MIN else set()
    return Ends(swept, None if began is None else _place(began), {_place(f) for f in kills if _is_elsewhere(f, told)})


def _place(finding: Finding) -> Place:
    return finding.rank, finding.rule


def _is_by_srun(finding: Finding) -> bool:
    return "srun: " in finding.text


def _step_ends(everything: list[Finding]) -> dict[str, Finding]:
    """By text: the first that a scheduler says of ending the whole step."""
    steps: dict[str, Finding] = {}
    for finding in everything:
        if finding.rule == "process.cancelled" and _STEP_ENDS.search(finding.text):
            steps[finding.said_by] = min(finding, steps.get(finding.said_by, finding), key=lambda f: f.line)
    return steps


def _began(everything: list[Finding], steps: Mapping[str, Finding], late: Set[str]) -> Finding | None:
    """The end behind which, in a text of its own, it is said that the step ends; if it is one."""
    found: dict[str, Finding] = {}
    for end in everything:
        if end.rule in _ENDS and end.rank and end.said_by in steps and end.line < steps[end.said_by].line:
            found[end.rank] = min(end, found.get(end.rank, end), key=lambda f: f.line)
    if len(found) != 1 or "" in {end.said_by for end in found.values()} or found.keys() & late:
        return None
    return next(iter(found.values()))


def _is_of_step(finding: Finding, began: Finding, steps: Mapping[str, Finding]) -> bool:
    """Did this one end with the step? A crash of another kind only where srun says so: a daemon knows no order."""
    if finding.rule not in _ENDS or not _is_by_srun(finding):
        return False
    is_by_daemon = _BY_DAEMON.search(steps[began.said_by].text) is not None
    return not is_by_daemon or finding.rule not in _CRASHES or finding.rule == began.rule


def _first_child(everything: list[Finding], late: Set[str]) -> Finding | None:
    """The end for which a parent says that it kills all its other children."""
    found = [f for f in everything if f.rule in _ENDS and f.rank and f.rank not in late and _FIRST.search(f.text)]
    return found[0] if len(found) == 1 else None


def _of_many(
    kills: list[Finding], everything: list[Finding], steps: Mapping[str, Finding], echoing: Set[str]
) -> set[Place]:
    """Those killed with many others at once, where the step or another rank ended otherwise, and not after them."""
    many = [kill for kill in kills if len(ended(kill.text)) >= _TASKS_MIN]
    texts = {kill.text for kill in many}
    first = {said_by: step.line for said_by, step in steps.items()}  # by text: the line
    for end in everything if many else ():
        if end.rule in _ENDS and end.text not in texts and end.rank and end.rank not in echoing:
            first[end.said_by] = min(end.line, first.get(end.said_by, end.line))
    return {_place(k) for k in many if _is_elsewhere(k, first) or first.get(k.said_by, k.line) < k.line}


def _is_elsewhere(finding: Finding, texts: Collection[str]) -> bool:
    """Is one of these another text than that of the finding?"""
    return len(texts) > (finding.said_by in texts)


def _with_own_words(exits: list[Finding], everything: list[Finding]) -> Iterable[Finding]:
    """The ranks that ended themselves and had said before that something failed."""
    words: dict[Place, int] = {}  # by rank and text: the line
    for finding in everything:
        if finding.rule in _OWN_WORDS:
            place = finding.rank, finding.said_by
            words[place] = min(finding.line, words.get(place, finding.line))
    return (exit for exit in exits if words.get((exit.rank, exit.said_by), exit.line) < exit.line)


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
