"""Nodes: hello, silence, disconnection, and the verdict. Silence is suspicion; only evidence makes a node lost.

Evidence is: its store endpoint refuses connections; or its agent came back with a higher incarnation; or its
connection ended, or nobody hears its beats, it does not answer, and members on other nodes report failed collectives,
or all of them wait (a second, independent signal); or it has been silent for a long bound while others wait for a plan
that cannot reach it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from unicron.coordinator.accounting import note_speed
from unicron.coordinator.fitness import KINDS as FITNESS_TIMERS
from unicron.coordinator.fitness import on_joined
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import NodeDeclaredLost, NodeJoined
from unicron.coordinator.lifecycle import tell_over
from unicron.coordinator.moves import tell as tell_move
from unicron.coordinator.reshaping import tell as tell_change
from unicron.coordinator.slowness import note_pace
from unicron.coordinator.state import Hearing, NodeState, State, TaskState, WorkerState, node_order
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import NodePhase, TaskPhase
from unicron.coordinator.workers import forget_worker, incident_of, is_member, note_status
from unicron.messages import (
    AgentHeartbeat,
    AgentHello,
    AgentWelcome,
    AskWaits,
    EndWorker,
    PublishEpoch,
    SaveAndHold,
    WorkersWait,
)
from unicron.planner.cluster import NAME, SLOTS_MAX
from unicron.types import Method, Severity

ASKED_NODES_MAX = 256

NODE_SLOTS_MAX = 1024
STORE_CHARS_MAX = 256
NETWORK_CHARS_MAX = 1024  # the name of a coordinator may be in it


def why_unusable(hello: AgentHello, state: State) -> str:
    """What no plan could mean, '' when it can be used: refused before it is in the journal for good."""
    if not NAME.fullmatch(hello.node):
        return f"node {hello.node[:80]!r}: a name has letters, digits, '_', '.' and '-' only, 128 at most"
    if not (0 <= hello.slots <= NODE_SLOTS_MAX and 0 <= hello.understudies <= NODE_SLOTS_MAX):
        return f"{hello.slots} slots and {hello.understudies} understudies: a node has {NODE_SLOTS_MAX} at most"
    if not 0 <= hello.incarnation < 1 << 62:
        return f"incarnation {hello.incarnation}"
    host, _, port = hello.store.removeprefix("tcp://").rpartition(":")
    if not host or not (port.isdecimal() and int(port) < 1 << 16) or len(hello.store) > STORE_CHARS_MAX:
        return f"store {hello.store[:80]!r} is not host:port"
    for network in (hello.control_network, hello.state_network):
        if network is not None and len(network.interface + network.address + network.why) > NETWORK_CHARS_MAX:
            return f"network {network.interface[:80]!r}: more than {NETWORK_CHARS_MAX} characters"
    others = sum(node.slots for node in state.nodes.values() if node.name != hello.node)
    if others + hello.slots > SLOTS_MAX:
        return f"{others + hello.slots} slots: the planner takes at most {SLOTS_MAX}"
    return ""


def on_hello(step: Step, name: str, hello: AgentHello) -> None:
    if why := why_unusable(hello, step.state):
        step.refuse("unusable_node", why)
        return
    known = step.state.nodes.get(name)
    if known is None and len(step.state.nodes) >= step.config.nodes_max:
        step.refuse("too_many_nodes", f"{name}: {step.config.nodes_max} nodes are known")
        return
    if known is not None and hello.incarnation < known.incarnation:
        step.refuse("stale_incarnation", f"{name}: {hello.incarnation} < {known.incarnation}")
        return
    is_new = known is None or hello.incarnation > known.incarnation
    if known is not None and is_new and known.phase is not NodePhase.LOST:
        lose_node(step, known, f"its agent came back as incarnation {hello.incarnation}")
    was_lost = known is not None and known.phase is NodePhase.LOST
    if is_new or was_lost or known is None or (known.slots, known.store) != (hello.slots, hello.store):
        joined = NodeJoined(name, hello.incarnation, hello.slots, hello.understudies, hello.store, hello.store_key)
        step.write(joined, f"{name} says hello")
    node = step.state.nodes[name]
    step.move_node(node, "hello")
    node.is_connected, node.probe_answer, node.clock, node.hearing = True, "", hello.clock, Hearing.NONE
    node.has_missed = False
    node.control_network, node.state_network = hello.control_network, hello.state_network
    step.cancel_timer("verdict", name, "it is back")
    step.set_timer("silence", name, step.config.silence_ms, "heartbeats are due")
    step.send(name, AgentWelcome(step.state.term), "hello")
    on_joined(step, node, hello, is_new=is_new or was_lost)
    _reconcile(step, name, hello)
    step.has_freed = True
    for task in step.state.tasks.values():
        if is_new:
            task.joins.clear()
        if not task.is_over or task.nodes():
            step.touch(task)


def turned_away(state: State, message: AgentHello | AgentHeartbeat) -> tuple[EndWorker, ...]:
    """What an older life of a node is told that speaks after a newer one joined (its machine stood still meanwhile):
    its workers hold no role any more, and one that needs no peer would train on alone. () for the present life."""
    known = state.nodes.get(message.node)
    if known is None or message.incarnation >= known.incarnation:
        return ()
    reason = f"{message.node} began anew as incarnation {known.incarnation}, this is {message.incarnation}"
    return tuple(EndWorker(status.task, status.worker, reason) for status in message.workers)


def _reconcile(step: Step, name: str, hello: AgentHello) -> None:
    """Agents know which workers live; the journal knows the epochs. Each wins for its own."""
    here = {status.worker: status for status in hello.workers}
    for status in hello.workers:  # first: who has ended hears of no plan, in which its role is another's by now
        if step.state.task_of_worker(status.worker) is None:
            step.send(
                name,
                EndWorker(status.task, status.worker, "no live worker of a known task"),
                f"{status.worker} outlived what it was started for",
            )
    for task in step.state.tasks.values():
        for worker in [w for w in task.workers.values() if w.node == name]:
            if worker.name in here:
                note_status(step, task, here[worker.name])
                if worker.end_reason:
                    end = EndWorker(task.name, worker.name, worker.end_reason)
                    step.send(name, end, "the order may have been lost")
            else:
                _absent(step, task, worker.name)
        _catch_up(step, task, name, hello)


def _absent(step: Step, task: TaskState, name: str) -> None:
    """It died, or its order was lost, while nobody listened. Ended once more, should the order still arrive."""
    worker = task.workers[name]
    reason = "not among the workers its agent has"
    step.send(worker.node, EndWorker(task.name, name, reason), reason)
    known = incident_of(step, task, name) is not None
    newest = max((w.incarnation for w in task.workers.values() if w.rank == worker.rank), default=-1)
    replaced = task.plan is None and newest > worker.incarnation
    skip = known or replaced or task.is_over or task.is_restarting or worker.rank in task.finished
    if is_member(task, worker) and not skip:
        opened = Incident(
            id="", task=task.name, fault="worker lost", severity=Severity.SEV2, node=worker.node,
            rank=worker.rank, method=Method.PROCESS, opened_ms=0.0, worker=name,
            incarnation=worker.incarnation, text=reason,
        )  # fmt: skip
        step.open_incident(opened, f"{name} is {reason}")
    forget_worker(step, task, worker, reason)


def _catch_up(step: Step, task: TaskState, name: str, hello: AgentHello) -> None:
    plan = next((p for p in hello.plans if p.task == task.name), None)
    if plan is not None and plan.epoch > task.epoch:
        step.refuse("epoch_unknown", f"{name} knows epoch {plan.epoch} of {task.name}")
        task.epoch_floor = max(task.epoch_floor, plan.epoch)
    if task.is_over and (plan is not None or any(status.task == task.name for status in hello.workers)):
        tell_over(step, task, name)
    behind = plan is None or plan.epoch < task.epoch
    if task.plan is None or task.is_over:
        return
    if name not in task.nodes():
        if plan is not None and behind:  # roles that went elsewhere left arenas there, which nobody may find any more
            step.send(
                name, PublishEpoch(task.plan), f"{name} missed epoch {task.epoch}, and may keep what was its part"
            )
        return
    if behind:
        step.send(name, PublishEpoch(task.plan), f"{name} missed epoch {task.epoch}")
    tell_change(step, task, only=name)
    tell_move(step, task, only=name)
    if task.leaving:
        step.send(name, SaveAndHold(task.name, task.leaving), task.leaving)


def on_heartbeat(step: Step, node: NodeState, message: AgentHeartbeat) -> None:
    if message.incarnation != node.incarnation:
        step.refuse("stale_incarnation", f"{node.name}: {message.incarnation}")
        return
    hear_again(step, node, "its heartbeat came")
    if not node.beats:
        step.set_timer("silence", node.name, step.config.silence_ms, "heartbeats are due")
    for status in message.workers:
        task_of = step.state.tasks.get(status.task)
        if task_of is not None and status.worker in task_of.workers:
            note_status(step, task_of, status)
    note_pace(step, message.paces)
    for name in sorted({status.task for status in message.workers} & step.state.tasks.keys()):
        note_speed(step, step.state.tasks[name])


def hear_again(step: Step, node: NodeState, reason: str) -> None:
    """It was silent, not disconnected: it is up again. What it missed meanwhile nobody would send it any more: then
    only a hello brings it back, as after an ended connection."""
    if node.phase is NodePhase.SUSPECT and node.is_connected:
        if node.has_missed:
            again = AgentWelcome(step.state.term, again=True)
            step.answer_node(node.name, again, f"{reason}, and something was not sent to it while it was silent")
            return
        step.move_node(node, "heard")
        node.probe_answer = ""
        step.cancel_timer("verdict", node.name, reason)
        for task in step.state.tasks.values():
            step.touch(task)


def on_lost_heartbeat(step: Step, node: NodeState, message: AgentHeartbeat) -> None:
    """A node that was declared lost speaks on a connection that never ended: only a hello brings it back."""
    if node.phase is NodePhase.LOST and message.incarnation == node.incarnation:
        welcome = AgentWelcome(step.state.term, again=True)
        step.answer_node(node.name, welcome, "it was declared lost, and is there")


def suspect_node(step: Step, node: NodeState, trigger: str, reason: str) -> None:
    if trigger == "disconnected":
        node.is_connected = False
    if node.phase is NodePhase.UP:
        step.move_node(node, trigger)
    elif node.phase is not NodePhase.SUSPECT:
        step.refuse("not_up", f"{node.name} is {node.phase.value}")
        return
    step.cancel_timer("silence", node.name, reason)
    ask(step, node, reason)


def ask(step: Step, node: NodeState, reason: str) -> None:
    step.probe(node, reason)
    for task in step.state.tasks.values():
        _ask_who_waits(step, node, task)
    grace_ms = step.config.reconnect_grace_ms
    step.set_timer("verdict", node.name, grace_ms, "it may reconnect, or answer the probe")


def _ask_who_waits(step: Step, node: NodeState, task: TaskState) -> None:
    """Of a task of many nodes nobody is asked: what they tell by themselves comes a second later, and only once."""
    if task.plan is None or task.is_over or node.name not in task.nodes():
        return
    others = sorted({m.node for m in task.plan.members} - {node.name}, key=node_order)
    if len(others) > ASKED_NODES_MAX:
        return
    for name in others:
        if _is_heard(step.state, name):
            step.send(name, AskWaits(task.name), f"{node.name} is silent: who waits for others?")


def on_probed(step: Step, node: NodeState, answer: str) -> None:
    if node.phase in (NodePhase.UP, NodePhase.LOST):
        step.refuse("stale_probe", f"{node.name} is {node.phase.value}")
        return
    node.probe_answer = answer
    judge(step, node)


def on_verdict(step: Step, node: NodeState) -> None:
    if node.phase in (NodePhase.UP, NodePhase.LOST):
        return
    if not judge(step, node):
        ask(step, node, "it neither came back nor is it known to be gone")


def on_waits(step: Step, message: WorkersWait) -> None:
    """Who waits for others where a node is silent (AskWaits)."""
    task = step.state.tasks.get(message.task)
    if task is None or message.node not in step.state.nodes:
        step.refuse("unknown_task", f"{message.node} says who waits in {message.task}")
        return
    for worker in task.workers.values():
        if worker.node == message.node:
            worker.waits_ms = step.now_ms if worker.name in message.workers else None
    for name in sorted(task.nodes(), key=node_order):
        node = step.state.nodes[name]
        if node.phase is NodePhase.SUSPECT and node.probe_answer:
            judge(step, node)


def judge(step: Step, node: NodeState) -> bool:
    """True when the evidence suffices: the node is lost."""
    elapsed_ms = step.now_ms - node.since_ms
    awaited = node.phase is NodePhase.AWAITED
    bound_ms = step.config.return_ms_max if awaited else step.config.silence_ms_max
    words = [_word_of(step, task, node.name) for task in step.state.tasks.values()]
    waiting = any(_is_waiting(task, node.name) for task in step.state.tasks.values())
    how = "its connection ended" if not node.is_connected else "nobody hears its beats"
    is_cut_off = _is_cut_off(node) and elapsed_ms >= step.config.cut_off_delay_ms
    evidence = evidence_of_loss(
        node.probe_answer, how if is_cut_off else "", elapsed_ms, is_past=elapsed_ms >= bound_ms,
        word=max(words, default=Word.NONE), is_awaited=waiting,
    )  # fmt: skip
    if evidence:
        lose_node(step, node, evidence)
    return bool(evidence)


class Word(enum.IntEnum):
    """What members elsewhere say that speaks against a node."""

    NONE = 0
    SOME_WAIT = 1  # as they do for any straggler: that a silent node is to blame would be a coincidence
    ENOUGH = 2  # a collective failed, or all that are heard wait


def evidence_of_loss(answer: str, how: str, elapsed_ms: float, *, is_past: bool, word: Word, is_awaited: bool) -> str:
    """What makes a suspect a lost node; "": nothing does.

    answer: of its probe; how: it is cut off, "" if it is not; is_past: it was silent for its bound; is_awaited: a task
    cannot go on without it.
    """
    if answer == "gone":
        return "its store endpoint refuses connections"
    if answer == "unknown" and how and word is Word.ENOUGH:
        return f"{how}, it does not answer, and members elsewhere lost their peers"
    if is_past and (word is not Word.NONE or is_awaited):
        return f"silent for {elapsed_ms:.0f} ms while others wait for it"
    return ""


def _is_cut_off(node: NodeState) -> bool:
    """From us by its connection, which beats that somebody still hears contradict; or from all who listen to it."""
    return node.hearing is Hearing.SILENT or (not node.is_connected and not node.beats)


def _word_of(step: Step, task: TaskState, node: str) -> Word:
    if task.plan is None or not any(m.node == node for m in task.plan.members):
        return Word.NONE
    elsewhere = [m for m in task.plan.members if m.node != node]
    if any(member.rank in task.reports for member in elsewhere):
        return Word.ENOUGH
    waits = [
        _waits(step, task.workers[m.worker])
        for m in elsewhere
        if m.worker in task.workers and _is_heard(step.state, m.node)
    ]
    return word_of_waits(waits)


def word_of_waits(waits: Collection[bool]) -> Word:
    """waits: does each member that is heard, on other nodes, wait?"""
    if not any(waits):
        return Word.NONE
    return Word.ENOUGH if all(waits) else Word.SOME_WAIT


def _waits(step: Step, worker: WorkerState) -> bool:
    if worker.stalled is not None and worker.stalled.waiting_in_collective:
        return True
    said_ms = worker.waits_ms  # true then; the next question is a grace away
    return said_ms is not None and step.now_ms - said_ms <= 2 * step.config.reconnect_grace_ms


def _is_heard(state: State, name: str) -> bool:
    node = state.nodes.get(name)
    return node is not None and node.phase is NodePhase.UP


def _is_waiting(task: TaskState, node: str) -> bool:
    """The task cannot go on without a word from this node."""
    if node not in task.nodes():
        return False
    if task.finished and not task.is_over:  # nobody else is left who could say that it waits
        return True
    return task.phase in (
        TaskPhase.STARTING, TaskPhase.RECOVERING, TaskPhase.HEALING, TaskPhase.WAITING, TaskPhase.SUSPENDED,
        TaskPhase.FINISHING, TaskPhase.STOPPING,
    )  # fmt: skip


def lose_node(step: Step, node: NodeState, evidence: str) -> None:
    """Its agent is gone, and workers do not outlive their agent: all its workers are lost."""
    hit: list[TaskState] = []
    for task in step.state.tasks.values():
        here = [w for w in task.workers.values() if w.node == node.name]
        for worker in here:
            for kind in ("end", "stop", "exception", "stall"):
                step.cancel_timer(kind, worker.name, evidence)
        if here and not task.is_over and any(is_member(task, w) for w in here):
            hit.append(task)
        if here:
            step.touch(task)
    since_ms = node.since_ms if node.phase is NodePhase.SUSPECT else step.now_ms
    step.write(NodeDeclaredLost(node.name, node.incarnation, evidence), evidence)
    step.move_node(node, "gone")
    node.is_connected = False
    for kind in ("verdict", "silence", *FITNESS_TIMERS):
        step.cancel_timer(kind, node.name, evidence)
    for task in hit:
        lost = sorted(r for r in task.lost if task.placement.get(r) == node.name)
        incident = step.open_incident(
            Incident(
                id="", task=task.name, fault="node lost", severity=Severity.SEV1, node=node.name,
                rank=lost[0] if lost else -1, method=Method.CONNECTION, opened_ms=since_ms,
                cause=evidence, iteration=task.iteration,
            ),
            f"{node.name} is lost: {evidence}",
        )  # fmt: skip
        for other in step.state.open_incidents(task.name):
            if other.node == node.name and other.worker:
                step.change_incident(other, "its node is lost", part_of=incident.id)
