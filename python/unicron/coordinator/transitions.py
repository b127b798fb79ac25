"""The tables: in which phase a node, worker or task is, and what moves it. Everything about phases lives here.

Theory of operation. The coordinator is level-triggered: an event only changes *facts* (which worker holds a role,
which node answers, which report waits for an explanation); after each event `settle` compares the facts with the
aim and takes the next step. So a failure in the middle of a recovery is nothing special: facts changed, settle
again. What keeps this honest are three tables.

* ``*_TRANSITIONS``: (phase, trigger) -> phase. A pair that is not there is a programming error and raises; no
handler assigns a phase in another way than through ``next_phase``.
* ``TASK_POLICY``: may a fact about a task of that phase count? ``TAKE``, or the name of the refusal. The row of a
phase names every kind of fact, so a new kind does not slip in undecided.
* ``NODE_POLICY``: the same for what a node's connection carries.

A task: STARTING (members being started) -> RUNNING <-> RECOVERING (roles without a live holder, or a report
unexplained: no plan yet) -> HEALING (plan out, accounts awaited) -> RUNNING. WAITING has no replica: not admitted
yet, pre-empted, or its nodes are lost; it starts when the allocation gives it slots. SUSPENDED is the same by a
person's word. FINISHING and STOPPING wait for the last exits, bounded. A replica that comes back is prepared beside
RUNNING, and a task that is to leave its slots saves in RUNNING: neither is a phase of its own.
"""

from __future__ import annotations

import enum


class NodePhase(enum.StrEnum):
    AWAITED = "awaited"  # known from the journal; has not said hello since we started
    UP = "up"
    SUSPECT = "suspect"  # connection ended or silent: unknown, never "gone"
    LOST = "lost"  # positive evidence


class WorkerPhase(enum.StrEnum):
    STARTED = "started"  # ordered; its process may not exist yet
    UP = "up"  # said hello
    READY = "ready"  # built: a member managed, or a waiting one ready for a role
    ENDING = "ending"  # EndWorker sent
    FINISHED = "finished"  # its script returned


class TaskPhase(enum.StrEnum):
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    HEALING = "healing"
    SUSPENDED = "suspended"
    FINISHING = "finishing"
    STOPPING = "stopping"
    DONE = "done"
    STOPPED = "stopped"


class UnknownTransition(AssertionError):
    """The machine tried a step that its own table does not have."""


_N, _W, _T = NodePhase, WorkerPhase, TaskPhase

NODE_TRANSITIONS: dict[tuple[NodePhase, str], NodePhase] = {
    (_N.AWAITED, "hello"): _N.UP,
    (_N.UP, "hello"): _N.UP,  # a reconnect that was faster than the news of the disconnect
    (_N.SUSPECT, "hello"): _N.UP,
    (_N.LOST, "hello"): _N.UP,
    (_N.UP, "disconnected"): _N.SUSPECT,
    (_N.UP, "silent"): _N.SUSPECT,
    (_N.SUSPECT, "heard"): _N.UP,  # silent, not disconnected: the heartbeat came after all
    (_N.AWAITED, "gone"): _N.LOST,
    (_N.SUSPECT, "gone"): _N.LOST,
    (_N.UP, "gone"): _N.LOST,  # hello of a higher incarnation: the former one is gone
}

WORKER_TRANSITIONS: dict[tuple[WorkerPhase, str], WorkerPhase] = {
    (_W.STARTED, "up"): _W.UP,
    (_W.STARTED, "ready"): _W.READY,
    (_W.UP, "up"): _W.UP,
    (_W.UP, "ready"): _W.READY,
    (_W.READY, "up"): _W.READY,
    (_W.READY, "ready"): _W.READY,
    (_W.ENDING, "up"): _W.ENDING,
    (_W.ENDING, "ready"): _W.ENDING,
    (_W.FINISHED, "up"): _W.FINISHED,
    (_W.FINISHED, "ready"): _W.FINISHED,
    (_W.STARTED, "ending"): _W.ENDING,
    (_W.UP, "ending"): _W.ENDING,
    (_W.READY, "ending"): _W.ENDING,
    (_W.FINISHED, "ending"): _W.ENDING,  # returned, but its process does not leave
    (_W.STARTED, "finished"): _W.FINISHED,  # an unmanaged script may be short
    (_W.UP, "finished"): _W.FINISHED,
    (_W.READY, "finished"): _W.FINISHED,
    (_W.ENDING, "finished"): _W.ENDING,
    (_W.FINISHED, "finished"): _W.FINISHED,
}

TASK_TRANSITIONS: dict[tuple[TaskPhase, str], TaskPhase] = {
    (_T.STARTING, "started"): _T.RUNNING,  # START plan, or all of an unmanaged script up
    (_T.STARTING, "planned"): _T.HEALING,  # RESTORE plan
    (_T.STARTING, "restarting"): _T.RECOVERING,
    (_T.STARTING, "waiting"): _T.WAITING,
    (_T.RUNNING, "wounded"): _T.RECOVERING,
    (_T.RUNNING, "planned"): _T.HEALING,  # an understudy was ready at once, or GROW
    (_T.RUNNING, "restarting"): _T.RECOVERING,
    (_T.RUNNING, "waiting"): _T.WAITING,
    (_T.RECOVERING, "wounded"): _T.RECOVERING,
    (_T.RECOVERING, "explained"): _T.RUNNING,  # the report was an echo of a plan already healed
    (_T.RECOVERING, "planned"): _T.HEALING,
    (_T.RECOVERING, "restarting"): _T.RECOVERING,
    (_T.RECOVERING, "starting"): _T.STARTING,  # everybody ended; all start again
    (_T.RECOVERING, "waiting"): _T.WAITING,
    (_T.HEALING, "wounded"): _T.RECOVERING,
    (_T.HEALING, "planned"): _T.HEALING,
    (_T.HEALING, "healed"): _T.RUNNING,
    (_T.HEALING, "restarting"): _T.RECOVERING,
    (_T.HEALING, "waiting"): _T.WAITING,
    (_T.WAITING, "starting"): _T.STARTING,
    (_T.WAITING, "held"): _T.SUSPENDED,
    (_T.SUSPENDED, "released"): _T.WAITING,
    (_T.FINISHING, "emptied"): _T.DONE,
    (_T.STOPPING, "emptied"): _T.STOPPED,
}
for _phase in (_T.WAITING, _T.STARTING, _T.RUNNING, _T.RECOVERING, _T.HEALING, _T.SUSPENDED):
    TASK_TRANSITIONS[(_phase, "done")] = _T.FINISHING
    TASK_TRANSITIONS[(_phase, "stop")] = _T.STOPPING
TASK_TRANSITIONS[(_T.FINISHING, "stop")] = _T.STOPPING

TERMINAL = (TaskPhase.DONE, TaskPhase.STOPPED)
ENDED = (*TERMINAL, TaskPhase.FINISHING, TaskPhase.STOPPING)  # decided: nothing is healed any more

TAKE = ""
TASK_FACTS = (
    "worker_up",
    "worker_gone",  # lost or exited
    "worker_stopped",  # and continued
    "worker_stalled",
    "collective_failed",
    "exception_raised",
    "state_lost",
    "healed",
    "saved",
    "layout_ready",
    "move_ready",
    "finished",
    "cancel",
    "inject",
    "suspend",
    "resume",
)


def _row(**refusals: str) -> dict[str, str]:
    unknown = set(refusals) - set(TASK_FACTS)
    assert not unknown, unknown
    return {fact: refusals.get(fact, TAKE) for fact in TASK_FACTS}


_over = dict.fromkeys(TASK_FACTS, "task_over")
_ending = {**_over, "worker_up": TAKE, "worker_gone": TAKE, "finished": TAKE, "saved": TAKE}

_idle = {  # nobody holds a role
    "collective_failed": "no_member",
    "state_lost": "no_member",
    "healed": "no_member",
    "layout_ready": "no_member",
    "move_ready": "no_member",
    "worker_stalled": "no_member",
    "inject": "no_member",
}
# `resume` counts only for a task that is held, whatever its phase: requests.py refuses the others by name.

TASK_POLICY: dict[TaskPhase, dict[str, str]] = {
    _T.STARTING: _row(
        collective_failed="no_epoch_yet",
        state_lost="no_epoch_yet",
        healed="no_epoch_yet",
        layout_ready="no_epoch_yet",
        move_ready="no_epoch_yet",
    ),
    _T.RUNNING: _row(),
    _T.RECOVERING: _row(),
    _T.HEALING: _row(),
    _T.WAITING: _row(**_idle),
    _T.SUSPENDED: _row(**_idle),
    _T.FINISHING: _row(**{**_ending, "healed": TAKE, "cancel": TAKE}),
    _T.STOPPING: _row(**_ending),
    _T.DONE: _row(**_over),
    _T.STOPPED: _row(**_over),
}

NODE_POLICY: dict[NodePhase, str] = {  # everything but a hello
    _N.AWAITED: "no_hello",
    _N.UP: TAKE,
    _N.SUSPECT: TAKE,  # what was on its way when the connection ended still counts
    _N.LOST: "node_lost",
}


def next_node_phase(phase: NodePhase, trigger: str) -> NodePhase:
    try:
        return NODE_TRANSITIONS[(phase, trigger)]
    except KeyError:
        raise UnknownTransition(f"node: {trigger!r} in {phase.value}") from None


def next_worker_phase(phase: WorkerPhase, trigger: str) -> WorkerPhase:
    try:
        return WORKER_TRANSITIONS[(phase, trigger)]
    except KeyError:
        raise UnknownTransition(f"worker: {trigger!r} in {phase.value}") from None


def next_task_phase(phase: TaskPhase, trigger: str) -> TaskPhase:
    try:
        return TASK_TRANSITIONS[(phase, trigger)]
    except KeyError:
        raise UnknownTransition(f"task: {trigger!r} in {phase.value}") from None
