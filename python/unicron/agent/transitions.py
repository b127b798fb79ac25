"""The life of a worker as its agent sees it: the table, and which facts count in which phase.

ORDERED (fork asked for) -> FORKED (a process exists) -> JOINED (said hello on the socket) -> READY
(built) ->
FINISHED (script returned). Every phase ends in DYING at the first positive evidence of death (mutex
released, exit
status, connection to the template lost), which is reported at once; the exit status may follow and
only adds the
cause. GONE is reported and reaped; the entry stays as long as its arena may have an adopter.

A loop that is stopped or stalled keeps its phase: these are facts beside it.
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    ORDERED = "ordered"
    FORKED = "forked"
    JOINED = "joined"
    READY = "ready"
    FINISHED = "finished"
    DYING = "dying"
    GONE = "gone"


class UnknownTransition(AssertionError):
    """The machine tried a step that its own table does not have."""


_P = Phase
TRANSITIONS: dict[tuple[Phase, str], Phase] = {
    (_P.ORDERED, "forked"): _P.FORKED,
    (_P.ORDERED, "joined"): _P.JOINED,  # its hello may overtake the template's answer
    (_P.JOINED, "forked"): _P.JOINED,
    (_P.READY, "forked"): _P.READY,
    (_P.FORKED, "joined"): _P.JOINED,
    (_P.JOINED, "ready"): _P.READY,
    (_P.READY, "ready"): _P.READY,  # an understudy again, as a member
    (_P.JOINED, "finished"): _P.FINISHED,
    (_P.READY, "finished"): _P.FINISHED,
    (_P.FINISHED, "finished"): _P.FINISHED,
    (_P.FINISHED, "ready"): _P.FINISHED,
    (_P.DYING, "gone"): _P.GONE,
    (_P.DYING, "forked"): _P.DYING,
    (_P.GONE, "forked"): _P.GONE,
}
for _phase in (_P.ORDERED, _P.FORKED, _P.JOINED, _P.READY, _P.FINISHED):
    TRANSITIONS[(_phase, "dying")] = _P.DYING

TAKE = ""
FACTS = ("forked", "fork_failed", "joined", "said", "disconnected", "released", "status")
_dead = {"joined": "worker_dead", "released": "known"}


def _row(**refusals: str) -> dict[str, str]:
    assert set(refusals) <= set(FACTS), refusals
    return {fact: refusals.get(fact, TAKE) for fact in FACTS}


POLICY: dict[Phase, dict[str, str]] = {
    _P.ORDERED: _row(said="no_hello", released="no_hello", disconnected="no_hello"),
    _P.FORKED: _row(forked="duplicate", fork_failed="duplicate", said="no_hello",
                    released="no_hello", disconnected="no_hello"),
    _P.JOINED: _row(fork_failed="duplicate", joined="duplicate"),
    _P.READY: _row(fork_failed="duplicate", joined="duplicate"),
    _P.FINISHED: _row(forked="duplicate", fork_failed="duplicate", joined="duplicate"),
    _P.DYING: _row(**_dead, fork_failed="duplicate"),
    _P.GONE: _row(**_dead, said="worker_dead", fork_failed="duplicate",
                  status="known", disconnected="known"),
}  # fmt: skip

DEAD = (Phase.DYING, Phase.GONE)


def next_phase(phase: Phase, trigger: str) -> Phase:
    try:
        return TRANSITIONS[(phase, trigger)]
    except KeyError:
        raise UnknownTransition(f"worker: {trigger!r} in {phase.value}") from None
