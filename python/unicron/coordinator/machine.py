"""The coordinator's machine: one event in, the actions it licenses out. No clock, socket, file, thread or random.

Host contract. (1) Feed `Replayed` for every journal entry in order, then `Started`, then everything else, one at a
time. (2) Carry out the actions of a step in order; WriteJournal is durable before what follows is sent. (3)
`now_ms` is a monotonic clock that never goes back within one life; timers of a former life are not replayed, the
machine sets new ones. (4) After a crash anywhere in (2): start again with the journal. Whether the last step's
sends went out does not matter: agents say in their hello what they have.
"""

from __future__ import annotations

from unicron.coordinator import fitness, moves, nodes, requests, reshaping, symptoms, workers
from unicron.coordinator.accounting import note_accounts
from unicron.coordinator.accounts import on_healed, on_saved
from unicron.coordinator.actions import Action, WriteJournal
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.events import (
    AgentDisconnected,
    AgentMessage,
    AgentProbed,
    CancelRequested,
    DrainRequested,
    Event,
    FaultRequested,
    NodeHeard,
    NodeSilent,
    NodeVouched,
    Replayed,
    ReshapeRequested,
    ResumeRequested,
    Started,
    SuspendRequested,
    TaskSubmitted,
    TimerFired,
)
from unicron.coordinator.hearing import on_hearing
from unicron.coordinator.invariants import check
from unicron.coordinator.journal import TermBegan
from unicron.coordinator.replay import apply_entry, trim
from unicron.coordinator.settle import settle_all
from unicron.coordinator.speaking import foreign
from unicron.coordinator.state import State
from unicron.coordinator.step import Step
from unicron.coordinator.timers import on_timer, timers_after_replay
from unicron.coordinator.transitions import NODE_POLICY
from unicron.messages import (
    AgentChecked,
    AgentHeartbeat,
    AgentHello,
    CollectiveFailed,
    ExceptionRaised,
    Finished,
    FromWorker,
    HardwareSeen,
    Healed,
    LayoutReady,
    MoveReady,
    Saved,
    StateLost,
    WorkerContinued,
    WorkerExited,
    WorkerLost,
    WorkerStalled,
    WorkerStopped,
    WorkersWait,
    WorkerUnkillable,
    WorkerUp,
)

WorkerFact = (
    WorkerUp | WorkerLost | WorkerStopped | WorkerContinued | WorkerStalled | WorkerUnkillable | WorkerExited
    | FromWorker
)  # fmt: skip
CHECK_MS = 100.0  # between two looks at the invariants while nothing but heartbeats comes
ALWAYS_CHECKED = 256  # nodes and workers; of more the time between two looks grows with what a look takes


class CoordinatorMachine:
    def __init__(self, config: CoordinatorConfig | None = None, seed: int = 0) -> None:
        self.config = config or CoordinatorConfig()
        self.state = State(gpu=self.config.gpu)
        self._seed = seed
        self._now_ms = float("-inf")
        self._checked_ms = float("-inf")

    def step(self, event: Event, now_ms: float) -> tuple[Action, ...]:
        assert now_ms >= self._now_ms, f"time went back from {self._now_ms} to {now_ms}"
        self._now_ms = now_ms
        if isinstance(event, Replayed):
            assert not self.state.is_started, "Replayed after Started"
            self.state.version += 1
            apply_entry(event.entry, self.state)
            return ()
        step = Step(self.state, self.config, self._seed, now_ms)
        self._dispatch(step, event)
        # Twice a second from every node nothing changes: what is looked at then must not grow with the cluster.
        has_changed = not _changed_nothing(step, event)
        if has_changed:
            settle_all(step)
            note_accounts(step)
            trim(self.state, self.config.incidents_kept_max, self.config.plans_kept_max)
        size = self._size() / ALWAYS_CHECKED
        if (has_changed and size <= 1) or now_ms - self._checked_ms >= CHECK_MS * max(size, 1.0):
            self.invariants()
        return tuple(step.actions)

    def _size(self) -> int:
        return len(self.state.nodes) + sum(len(task.workers) for task in self.state.tasks.values())

    def invariants(self) -> None:
        check(self.state, self.config)
        self._checked_ms = self._now_ms

    def _dispatch(self, step: Step, event: Event) -> None:
        if isinstance(event, Started):
            assert not self.state.is_started, "Started twice"
            self.state.is_started = True
            step.write(TermBegan(self.state.term + 1), "a coordinator began")
            timers_after_replay(step)
            return
        assert self.state.is_started, f"{type(event).__name__} before Started"
        match event:
            case AgentMessage():
                self._on_message(step, event)
            case AgentDisconnected():
                node = self.state.nodes.get(event.node)
                if node is None:
                    step.refuse("unknown_node", f"{event.node} never said hello")
                else:
                    nodes.suspect_node(step, node, "disconnected", "its connection ended")
            case AgentProbed():
                node = self.state.nodes.get(event.node)
                if node is None:
                    step.refuse("unknown_node", f"{event.node} never said hello")
                else:
                    nodes.on_probed(step, node, event.answer)
            case NodeHeard() | NodeVouched() | NodeSilent():
                node = self.state.nodes.get(event.node)
                if node is None:
                    step.refuse("unknown_node", f"{event.node} never said hello")
                else:
                    on_hearing(step, node, event)
            case TimerFired():
                on_timer(step, event.timer)
            case TaskSubmitted():
                requests.on_submitted(step, event.request_id, event.job)
            case CancelRequested():
                requests.on_cancel(step, event.request_id, event.task)
            case SuspendRequested():
                requests.on_suspend(step, event.request_id, event.task)
            case ResumeRequested():
                requests.on_resume(step, event.request_id, event.task)
            case ReshapeRequested():
                reshaping.on_reshape(step, event.request_id, event.task, event.layout)
            case DrainRequested():
                requests.on_drain(step, event.request_id, event.node, event.drained)
            case FaultRequested():
                requests.on_fault(step, event)
            case _:
                raise AssertionError(f"unknown event {type(event).__name__}")

    def _on_message(self, step: Step, event: AgentMessage) -> None:
        message = event.message
        other = foreign(event.node, message)
        if other is not None:
            step.refuse("wrong_node", f"{event.node} speaks of {other}")
            return
        if isinstance(message, AgentHello):
            nodes.on_hello(step, event.node, message)
            return
        node = self.state.nodes.get(event.node)
        refusal = "no_hello" if node is None else NODE_POLICY[node.phase]
        if refusal or node is None:
            step.refuse(refusal, f"{type(message).__name__} from {event.node}")
            if node is not None and isinstance(message, AgentHeartbeat):
                nodes.on_lost_heartbeat(step, node, message)
            return
        if isinstance(message, AgentHeartbeat):
            nodes.on_heartbeat(step, node, message)
            return
        if isinstance(message, AgentChecked):
            fitness.on_checked(step, node, message)
            return
        if isinstance(message, WorkersWait):
            nodes.on_waits(step, message)
            return
        if isinstance(message, HardwareSeen):
            fitness.on_hardware(step, node, message)
            return
        self._on_fact(step, message)

    def _on_fact(
        self,
        step: Step,
        message: WorkerFact,
    ) -> None:
        name = message.status.task if isinstance(message, WorkerUp) else message.task
        task = self.state.tasks.get(name)
        if task is None:
            step.refuse("unknown_task", f"{type(message).__name__} of task {name}")
            return
        spoken = message.body if isinstance(message, FromWorker) else message
        if not step.may(task, FACT_OF[type(spoken)], type(spoken).__name__):
            return
        match message:
            case WorkerUp():
                workers.on_worker_up(step, task, message)
            case WorkerLost():
                workers.on_worker_lost(step, task, message)
            case WorkerExited():
                workers.on_worker_exited(step, task, message)
            case WorkerStopped():
                symptoms.on_stopped(step, task, message)
            case WorkerContinued():
                symptoms.on_continued(step, task, message)
            case WorkerStalled():
                symptoms.on_stalled(step, task, message)
            case WorkerUnkillable():
                symptoms.on_unkillable(step, task, message)
            case FromWorker():
                self._on_words(step, message)

    def _on_words(self, step: Step, message: FromWorker) -> None:
        task = self.state.tasks[message.task]
        body = message.body
        match body:
            case CollectiveFailed():
                symptoms.on_collective_failed(step, task, body)
            case ExceptionRaised():
                symptoms.on_exception(step, task, message)
            case StateLost():
                symptoms.on_state_lost(step, task, body)
            case Healed():
                on_healed(step, task, body)
            case LayoutReady():
                if symptoms.speaker(step, task, body.worker) is not None:
                    reshaping.on_layout_ready(step, task, body)
            case MoveReady():
                if symptoms.speaker(step, task, body.worker) is not None:
                    moves.on_move_ready(step, task, body)
            case Saved():
                on_saved(step, task, body)
            case Finished():
                worker = symptoms.speaker(step, task, body.worker)
                if worker is not None:
                    worker.has_tail = body.tail
                    workers.note_finished(step, task, worker)


def _changed_nothing(step: Step, event: Event) -> bool:
    """A heartbeat after which every task, and what is decided, is as settled as the step before left it."""
    is_heartbeat = isinstance(event, AgentMessage) and isinstance(event.message, AgentHeartbeat)
    if not is_heartbeat and not isinstance(event, NodeHeard | NodeVouched):
        return False
    return not step.touched and not step.has_freed and not any(isinstance(a, WriteJournal) for a in step.actions)


FACT_OF: dict[type, str] = {
    WorkerUp: "worker_up",
    WorkerLost: "worker_gone",
    WorkerExited: "worker_gone",
    WorkerStopped: "worker_stopped",
    WorkerContinued: "worker_stopped",
    WorkerStalled: "worker_stalled",
    WorkerUnkillable: "worker_gone",
    CollectiveFailed: "collective_failed",
    ExceptionRaised: "exception_raised",
    StateLost: "state_lost",
    Healed: "healed",
    Saved: "saved",
    LayoutReady: "layout_ready",
    MoveReady: "move_ready",
    Finished: "finished",
}
