"""One step of the machine: the state, the time, and the actions collected so far.

The only way handlers change the journaled part of the state is `write`, which applies the entry and asks for it to
be journaled; since actions are carried out in order, what is written comes before what it licenses.
"""

from __future__ import annotations

from typing import Any

import msgspec

from unicron.coordinator.actions import (
    Action,
    Answer,
    CancelTimer,
    ProbeAgent,
    RecordIncident,
    Refused,
    SendAgent,
    SetTimer,
    ToAgent,
    WriteJournal,
)
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import Entry, IncidentRecorded
from unicron.coordinator.replay import apply_entry
from unicron.coordinator.state import NodeState, State, TaskState
from unicron.coordinator.transitions import TASK_POLICY, NodePhase
from unicron.messages import Reply
from unicron.types import Severity


class Step:
    def __init__(self, state: State, config: CoordinatorConfig, seed: int, now_ms: float) -> None:
        self.state = state
        self.config = config
        self.seed = seed
        self.now_ms = now_ms
        self.actions: list[Action] = []
        self.touched: dict[str, None] = {}  # tasks whose facts changed: an ordered set
        self.has_freed = False  # a slot, or a node: tasks that wait for one must look again

    def write(self, entry: Entry, reason: str) -> None:
        self.state.version += 1
        apply_entry(entry, self.state)
        self.actions.append(WriteJournal(entry, reason))

    def move_node(self, node: NodeState, trigger: str) -> None:
        self.state.version += 1
        node.move(trigger, self.now_ms)

    def move_task(self, task: TaskState, trigger: str) -> None:
        self.state.version += 1
        task.move(trigger)

    def send(self, node: str, message: ToAgent, reason: str) -> None:
        """To a node that is not UP nothing is sent: its next hello tells what it lacks."""
        state = self.state.nodes.get(node)
        if state is not None and state.phase is NodePhase.UP:
            self.answer_node(node, message, reason)
        elif state is not None:
            state.has_missed = True

    def answer_node(self, node: str, message: ToAgent, reason: str) -> None:
        """To whom just spoke, whatever its phase."""
        self.actions.append(SendAgent(node, message, reason))

    def touch(self, task: TaskState) -> None:
        self.touched[task.name] = None

    def set_timer(self, kind: str, subject: str, delay_ms: float, reason: str) -> None:
        name = f"{kind}/{subject}"
        at_ms = self.now_ms + delay_ms
        self.state.timers[name] = at_ms
        self.actions.append(SetTimer(name, at_ms, reason))

    def has_timer(self, kind: str, subject: str) -> bool:
        return f"{kind}/{subject}" in self.state.timers

    def cancel_timer(self, kind: str, subject: str, reason: str) -> None:
        name = f"{kind}/{subject}"
        if self.state.timers.pop(name, None) is not None:
            self.actions.append(CancelTimer(name, reason))

    def probe(self, node: NodeState, reason: str) -> None:
        self.actions.append(ProbeAgent(node.name, node.store, reason))

    def refuse(self, name: str, reason: str) -> None:
        self.actions.append(Refused(name, reason))

    def answer(self, request_id: str, reply: Reply, reason: str) -> None:
        self.actions.append(Answer(request_id, reply, reason))

    def may(self, task: TaskState, fact: str, reason: str) -> bool:
        """Does a fact of this kind count in the task's phase? Refuses by name when it does not."""
        refusal = TASK_POLICY[task.phase][fact]
        if refusal:
            self.refuse(refusal, f"{reason}: task {task.name} is {task.phase.value}")
        return not refusal

    # incidents: journaled whole at every change, so the newest entry of an id is the incident

    def open_incident(self, incident: Incident, reason: str) -> Incident:
        number = self.state.incident_count + 1
        task = self.state.tasks.get(incident.task)
        may_lose = incident.severity is not Severity.INFO and not incident.is_only_told
        incident = msgspec.structs.replace(
            incident,
            slots=len(task.placement) if task is not None else 0,
            iterations_lost=None
            if may_lose and task is not None and not task.job.managed
            else incident.iterations_lost,
            id=f"i{number}",
            opened_ms=incident.opened_ms or self.now_ms,
            timeline=((self.now_ms, reason),),
        )
        self._record(incident, reason)
        self._check_soon(incident)
        return incident

    def _check_soon(self, incident: Incident) -> None:
        """The node of a failure looks at its hardware, a moment later."""
        node = self.state.nodes.get(incident.node)
        is_failure = incident.severity in (Severity.SEV1, Severity.SEV2) and not incident.is_only_told
        if node is None or not node.can_check or not is_failure or self.has_timer("check", node.name):
            return
        self.set_timer("check", node.name, self.config.check_delay_ms, f"after {incident.id} on it")

    def change_incident(self, incident: Incident, reason: str, **changes: Any) -> Incident:
        incident = msgspec.structs.replace(
            incident, timeline=(*incident.timeline, (self.now_ms, reason))[-32:], **changes
        )
        self._record(incident, reason)
        return incident

    def _record(self, incident: Incident, reason: str) -> None:
        self.write(IncidentRecorded(incident), reason)
        self.actions.append(RecordIncident(incident, reason))
