"""The agent's machine: keeper and supervisor of one node's workers. One event in, actions out; no I/O, no clock.

The coordinator may vanish: workers go on, reports are kept (bounded) and told again after the next hello. The agent
itself does not outlive its incarnation: a new agent finds no workers, because workers end with the agent's socket.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from unicron.agent import arenas, gpus, lives
from unicron.agent.actions import Action, ArmPulse, LeaveCoordinator, RunChecks, SendCoordinator, SendWorker
from unicron.agent.config import AgentConfig
from unicron.agent.events import (
    ArenaRequested,
    BeatsAnswered,
    ChildStatusSeen,
    CoordinatorConnected,
    CoordinatorDisconnected,
    CoordinatorMessage,
    CoordinatorSays,
    Event,
    ForkFailed,
    GpuRequested,
    HardwareFailed,
    MutexReleased,
    NodeChecked,
    OwnerLooked,
    PulsesSampled,
    TemplateLost,
    TimerFired,
    WorkerDisconnected,
    WorkerForked,
    WorkerInspected,
    WorkerJoined,
    WorkerMessage,
)
from unicron.agent.progress import on_sampled, tell_waits
from unicron.agent.state import State
from unicron.agent.step import Step
from unicron.agent.transitions import Phase
from unicron.messages import (
    AgentChecked,
    AgentHeartbeat,
    AgentHello,
    AgentWelcome,
    ArmFault,
    AskWaits,
    ChangeLayout,
    CheckNode,
    EndWorker,
    FinishUnderstudies,
    HardwareSeen,
    MoveRoles,
    PublishEpoch,
    SaveAndHold,
    StartWorkers,
    StopTask,
    WorkerPace,
    WorkerStatus,
)
from unicron.types import Stage

EARLY_MS = 0.5  # hosts round timers


class AgentMachine:
    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.state = State()
        self._now_ms = float("-inf")

    def step(self, event: Event, now_ms: float) -> tuple[Action, ...]:
        assert now_ms >= self._now_ms, f"time went back from {self._now_ms} to {now_ms}"
        self._now_ms = now_ms
        step = Step(self.state, self.config, now_ms)
        self._dispatch(step, event)
        self.invariants()
        return tuple(step.actions)

    def invariants(self) -> None:
        state = self.state
        slots = [w.slot for w in state.workers.values() if w.phase is not Phase.GONE]
        assert len(slots) == len(set(slots)), f"two workers share a pulse page: {slots}"
        assert len(state.reports) <= self.config.reports_kept_max
        assert len(state.arenas) <= self.config.arenas_max
        for arena_id in state.roles.values():
            assert arena_id in state.arenas, f"a role's arena {arena_id} is dropped"
        for adoption in state.adoptions:
            owner = state.arenas[adoption.arena].owner
            assert f"look/{owner}" in state.timers, f"adoption from {owner} waits without a bound"
        for worker in state.workers.values():
            if worker.phase is Phase.DYING:
                assert f"status/{worker.name}" in state.timers, f"{worker.name} dies unbounded"
            elif worker.phase is Phase.ORDERED:
                assert f"fork/{worker.name}" in state.timers, f"{worker.name} starts unbounded"

    def _dispatch(self, step: Step, event: Event) -> None:
        match event:
            case CoordinatorConnected():
                self._on_connected(step)
            case CoordinatorDisconnected():
                if self.state.is_connected and not self.state.is_stale:
                    self.state.term_ms = step.now_ms
                self.state.is_connected = self.state.is_heard = False
            case NodeChecked():
                self._on_checked(step, event)
            case HardwareFailed(severity, text):
                if self.state.is_connected:
                    step.actions.append(SendCoordinator(HardwareSeen(self.config.node, severity, text), text))
            case BeatsAnswered(answered):
                self.state.is_heard = answered
            case CoordinatorMessage():
                self._on_order(step, event.message)
            case WorkerForked():
                lives.on_forked(step, event)
            case ForkFailed():
                lives.on_fork_failed(step, event.worker, event.text)
            case WorkerJoined():
                lives.on_joined(step, event)
            case WorkerMessage():
                lives.on_said(step, event)
            case WorkerDisconnected():
                lives.on_disconnected(step, event.worker)
            case MutexReleased():
                lives.on_released(step, event)
            case ChildStatusSeen():
                lives.on_status(step, event)
            case PulsesSampled():
                if on_sampled(step, event):
                    self._beat(step, is_news=True)
            case ArenaRequested():
                arenas.on_requested(step, event)
            case GpuRequested():
                gpus.on_requested(step, event)
            case WorkerInspected():
                lives.on_inspected(step, event)
            case OwnerLooked():
                arenas.on_looked(step, event.worker, event.gone)
            case TemplateLost():
                for worker in list(self.state.workers.values()):
                    if worker.phase is Phase.ORDERED:
                        lives.on_fork_failed(step, worker.name, "the template process ended")
            case TimerFired():
                self._on_timer(step, event.timer)
            case _:
                raise AssertionError(f"unknown event {type(event).__name__}")

    # ------------------------------------------------------------ coordinator

    def _on_connected(self, step: Step) -> None:
        state, config = self.state, self.config
        state.is_connected, state.is_stale = True, False
        here = [w for w in state.workers.values() if not w.is_dead or w.has_finished]
        hello = AgentHello(
            node=config.node,
            incarnation=config.incarnation,
            slots=config.slots,
            understudies=config.understudies,
            store=config.store,
            store_key=config.store_key,
            workers=tuple(w.status() for w in here if w.task not in state.ended),
            plans=tuple(state.plans[t] for t in sorted(state.plans)),
            clock=config.clock,
            beat_port=config.beat_port,
            checks=config.checks,
            control_network=config.control_network,
            state_network=config.state_network,
        )
        step.actions.append(SendCoordinator(hello, "connected"))
        if state.checked is not None:
            step.actions.append(SendCoordinator(state.checked, "connected"))
        for report in state.reports:
            step.actions.append(SendCoordinator(report, "it may not have arrived"))
        step.set_timer("heartbeat", "coordinator", config.heartbeat_ms, "heartbeats while connected")

    def _on_checked(self, step: Step, event: NodeChecked) -> None:
        config = self.config
        self.state.checked = AgentChecked(config.node, config.incarnation, event.unfit, event.checks)
        if self.state.is_connected:
            step.actions.append(SendCoordinator(self.state.checked, event.unfit or "nothing is bad"))

    def _on_welcome(self, step: Step, message: AgentWelcome) -> None:
        """Two coordinators may both believe that they decide, for a moment (one was frozen): the newer term counts."""
        state = self.state
        if message.term < state.term and step.now_ms < state.term_ms + self.config.term_ms_max:
            state.is_stale = True
            reason = f"term {message.term}, know {state.term}"
            step.refuse("stale_term", reason)
            step.actions.append(LeaveCoordinator(reason))
            return
        state.term, state.term_ms = message.term, step.now_ms
        if message.again and state.is_connected:
            self._on_connected(step)

    def _on_order(self, step: Step, message: CoordinatorSays) -> None:
        if self.state.is_stale:
            step.refuse("stale_term", f"{type(message).__name__} of a coordinator that another one followed")
            return
        match message:
            case AgentWelcome():
                self._on_welcome(step, message)
            case StartWorkers():
                lives.start_workers(step, message)
            case PublishEpoch():
                self._on_plan(step, message)
            case EndWorker():
                lives.end_worker(step, message.task, message.worker, message.reason)
            case StopTask():
                self._on_stop(step, message)
            case FinishUnderstudies():
                self._on_finish(step, message)
            case SaveAndHold():
                for worker in self.state.of_task(message.task):
                    if worker.can_hear and not worker.waiting:
                        step.actions.append(SendWorker(worker.name, message, worker.epoch, (), message.reason))
            case ChangeLayout():
                self._on_change(step, message)
            case MoveRoles():
                self._on_move(step, message)
            case ArmFault():
                self._on_arm(step, message)
            case AskWaits(task):
                tell_waits(step, task)
            case CheckNode(reason):
                is_idle = all(w.is_dead for w in self.state.workers.values())
                step.actions.append(RunChecks(is_idle, reason))
            case _:
                raise AssertionError(f"unknown order {type(message).__name__}")

    def _on_plan(self, step: Step, message: PublishEpoch) -> None:
        plan = message.plan
        known = self.state.plans.get(plan.task)
        if plan.task in self.state.ended:
            step.refuse("task_over", f"{plan.task}: {self.state.ended[plan.task]}")
            return
        if known is not None and plan.epoch <= known.epoch:
            step.refuse("stale_epoch", f"{plan.task}: epoch {plan.epoch}, know {known.epoch}")
            return
        self.state.plans[plan.task] = plan
        arenas.settle_staged(step, plan)
        arenas.settle_moved(step, plan)
        for worker in self.state.of_task(plan.task):
            is_ending = bool(worker.end_reason) and all(m.worker != worker.name for m in plan.members)
            if not worker.is_dead and not is_ending:  # it would take the plan for its own: another has its role
                lives.forward_plan(step, worker, message)
                if plan.member(worker.rank) is not None and not worker.waiting:
                    arenas.role_taken(step, worker)

    def _on_change(self, step: Step, message: ChangeLayout) -> None:
        """To the members and to who joins them. Told again after whatever may have lost it."""
        known = self.state.plans.get(message.task)
        if message.task in self.state.ended or (known is not None and message.plan.epoch <= known.epoch):
            step.refuse("stale_epoch", f"{message.task}: a change of layout as epoch {message.plan.epoch}")
            return
        self.state.changes[message.task] = message.plan
        names = {m.worker for m in (*message.former.members, *message.plan.members)}
        for worker in self.state.of_task(message.task):
            if worker.name in names and worker.can_hear:
                step.actions.append(SendWorker(worker.name, message, worker.epoch, (), message.reason))

    def _on_move(self, step: Step, message: MoveRoles) -> None:
        """To the members and to who joins them. Told again after whatever may have lost it."""
        known = self.state.plans.get(message.task)
        if message.task in self.state.ended or (known is not None and message.plan.epoch <= known.epoch):
            step.refuse("stale_epoch", f"{message.task}: a move as epoch {message.plan.epoch}")
            return
        names = {m.worker for m in (*message.former.members, *message.plan.members)}
        for worker in self.state.of_task(message.task):
            if worker.name in names and worker.can_hear:
                step.actions.append(SendWorker(worker.name, message, worker.epoch, (), message.reason))

    def _on_stop(self, step: Step, message: StopTask) -> None:
        self._end(message.task, message.reason)
        for worker in self.state.of_task(message.task):
            if not worker.is_dead:
                grace_ms = 0 if worker.is_stopped else self.state.specs[worker.task].stop_grace_ms
                lives.end_worker(step, message.task, worker.name, message.reason, grace_ms)
        arenas.drop_of_ended(step, message.task)

    def _on_finish(self, step: Step, message: FinishUnderstudies) -> None:
        self._end(message.task, message.reason)
        for worker in self.state.of_task(message.task):
            if worker.is_dead or not worker.waiting:
                continue
            worker.is_leaving = True
            if not worker.can_hear:
                lives.end_worker(step, message.task, worker.name, message.reason)
                continue
            step.actions.append(SendWorker(worker.name, message, worker.epoch, (), message.reason))
            delay_ms = self.config.exit_ms_max
            step.set_timer("exit", worker.name, delay_ms, "it was told to leave")
        arenas.drop_of_ended(step, message.task)

    def _end(self, task: str, reason: str) -> None:
        self.state.ended[task] = reason
        self.state.plans.pop(task, None)
        self.state.changes.pop(task, None)
        for key in [key for key in self.state.times if key[0] == task]:
            del self.state.times[key]
        while len(self.state.ended) > self.config.reports_kept_max:
            del self.state.ended[next(iter(self.state.ended))]

    def _on_arm(self, step: Step, message: ArmFault) -> None:
        for worker in self.state.of_task(message.task):
            if worker.rank == message.rank and not worker.waiting and not worker.is_dead:
                step.actions.append(ArmPulse(worker.name, worker.slot, message, "asked for"))
                return
        step.refuse("no_holder", f"rank {message.rank} of {message.task} does not live here")

    # ------------------------------------------------------------ time

    def _on_timer(self, step: Step, name: str) -> None:
        at_ms = self.state.timers.get(name)
        if at_ms is None or step.now_ms < at_ms - EARLY_MS:
            step.refuse("stale_timer", f"{name} was cancelled or moved")
            return
        del self.state.timers[name]
        kind, _, subject = name.partition("/")
        if kind == "heartbeat":
            self._beat(step)
            return
        worker = self.state.workers[subject]
        match kind:
            case "fork":
                lives.on_fork_failed(step, subject, "no process in time")
            case "kill":
                lives.on_kill_timer(step, worker)
            case "status":
                lives.on_status_timer(step, worker)
            case "exit":
                reason = "told to leave, or finished, and did not exit in time"
                lives.end_worker(step, worker.task, worker.name, reason)
            case "look":
                arenas.on_look_timer(step, worker)
            case _:
                raise AssertionError(f"unknown timer {name}")

    def _paces(self) -> Iterator[WorkerPace]:
        for worker in self.state.workers.values():
            if worker.pace and not worker.is_dead and not worker.waiting:
                yield WorkerPace(worker.name, worker.rank, tuple(worker.pace))
            worker.pace.clear()

    def _beat(self, step: Step, *, is_news: bool = False) -> None:
        """A heartbeat also says that this node lives; once its beats say so it needs news to be sent at once."""
        state = self.state
        if not state.is_connected:
            return  # the next connection starts them again
        workers = tuple(w.status() for w in state.workers.values() if not w.is_dead)
        paces = tuple(self._paces())
        facts = tuple(_without_progress(status) for status in workers)
        is_due = step.now_ms - state.told_ms >= self.config.quiet_ms_max - EARLY_MS
        if is_news or not state.is_heard or paces or facts != state.told or is_due:
            state.told, state.told_ms = facts, step.now_ms
            state.sequence += 1
            beat = AgentHeartbeat(self.config.node, self.config.incarnation, state.sequence, workers, paces)
            step.actions.append(SendCoordinator(beat, "alive"))
        step.set_timer("heartbeat", "coordinator", self.config.heartbeat_ms, "the next one")


def _without_progress(status: WorkerStatus) -> WorkerStatus:
    stage = status.stage if status.stage is Stage.DONE else Stage.IDLE
    return msgspec.structs.replace(status, stage=stage, iteration=0, progress=0, loss=None)
