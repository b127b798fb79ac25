"""Drivers of the two pure machines for tests: short ways to say events, and to read actions."""

from __future__ import annotations

from typing import Any, Literal

from unicron.agent import events as agent_on
from unicron.agent.actions import Action as AgentAction
from unicron.agent.actions import SendCoordinator
from unicron.agent.config import AgentConfig
from unicron.agent.machine import AgentMachine
from unicron.coordinator import events as on
from unicron.coordinator.actions import Action, Refused, SendAgent, WriteJournal
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.job import Job
from unicron.coordinator.journal import decode_entry, encode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.coordinator.state import Purpose, TaskState, WorkerState
from unicron.messages import (
    AgentHeartbeat,
    AgentHello,
    CollectiveFailed,
    ExceptionRaised,
    Finished,
    FromWorker,
    Healed,
    Saved,
    StartWorkers,
    StateLost,
    TaskSpec,
    WorkerContinued,
    WorkerExited,
    WorkerHello,
    WorkerLost,
    WorkerReady,
    WorkerStalled,
    WorkerStatus,
    WorkerStopped,
    WorkerUp,
)
from unicron.types import Budgets, EpochPlan, Layout, Stage, Transfer

TASK = "t"


class Coordinator:
    """The coordinator's machine with a clock, a journal and a memory of what agents were told."""

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        self.config = config or CoordinatorConfig()
        self.machine = CoordinatorMachine(self.config, seed=1)
        self.now_ms = 0.0
        self.journal: list[bytes] = []
        self.actions: tuple[Action, ...] = ()
        self.incarnations: dict[str, int] = {}
        self.feed(on.Started())

    def feed(self, event: on.Event, after_ms: float = 1.0) -> tuple[Action, ...]:
        self.now_ms += after_ms
        self.actions = self.machine.step(event, self.now_ms)
        self.journal += [encode_entry(a.entry) for a in self.actions if isinstance(a, WriteJournal)]
        return self.actions

    def restart(self) -> tuple[Action, ...]:
        self.machine = CoordinatorMachine(self.config, seed=2)
        for data in self.journal:
            self.machine.step(on.Replayed(decode_entry(data)), self.now_ms)
        return self.feed(on.Started())

    @property
    def task(self) -> TaskState:
        return self.machine.state.tasks[TASK]

    def refusals(self) -> list[str]:
        return [a.name for a in self.actions if isinstance(a, Refused)]

    def sent(self, kind: type) -> list[Any]:
        return [a.message for a in self.actions if isinstance(a, SendAgent) and isinstance(a.message, kind)]

    def worker(self, name: str) -> WorkerState:
        """The live worker, or one as it was: facts about the dead arrive late."""
        node, _, number = name.partition(".w")
        gone = WorkerState(name, node, int(number), 0, Purpose.MEMBER)
        return self.task.workers.get(name, gone)

    # ------------------------------------------------------------ events

    def hello(self, node: str, incarnation: int = 1, slots: int = 2, *, knows: bool = False, clock: str = "") -> None:
        """knows: the agent tells the workers and the plan that the machine expects there."""
        self.incarnations[node] = incarnation
        workers: tuple[WorkerStatus, ...] = ()
        plans: tuple[EpochPlan, ...] = ()
        if knows:
            workers = tuple(self.status(w) for w in self.task.workers.values() if w.node == node)
            plans = (self.task.plan,) if self.task.plan else ()
        hello = AgentHello(node, incarnation, slots, 1, f"tcp://{node}:7000", "key", workers, plans, clock)
        self.feed(on.AgentMessage(node, hello))

    def beat(self, node: str) -> None:
        beat = AgentHeartbeat(node, self.incarnations[node], 1)
        self.feed(on.AgentMessage(node, beat))

    def submit(self, layout: Layout, **fields: Any) -> None:
        self.feed(on.TaskSubmitted("r", Job(TASK, ("train.py",), layout, **fields)))

    def status(self, worker: WorkerState, *, ready: bool = True, stage: Stage = Stage.IDLE) -> WorkerStatus:
        return WorkerStatus(
            TASK, worker.name, worker.incarnation, 100, worker.rank, worker.purpose != "member",
            ready, self.task.epoch, stage, max(worker.iteration, 0),
        )  # fmt: skip

    def up(self, name: str, *, ready: bool = True) -> None:
        worker = self.worker(name)
        self.feed(on.AgentMessage(worker.node, WorkerUp(worker.node, self.status(worker, ready=ready))))

    def all_up(self) -> None:
        for name in list(self.task.workers):
            if name in self.task.workers:
                self.up(name)

    def lost(self, name: str, cause: str = "", iteration: int = 5, micro_batch: int = 1) -> None:
        worker = self.worker(name)
        node = worker.node
        lost = WorkerLost(
            node, TASK, name, worker.incarnation, worker.rank, "process",
            cause, "", Stage.COMPUTE, iteration, micro_batch, 1_000_000, 1_500_000, f"/log/{name}",
        )  # fmt: skip
        self.feed(on.AgentMessage(node, lost))

    def exited(self, name: str) -> None:
        worker = self.worker(name)
        self.feed(on.AgentMessage(worker.node, WorkerExited(worker.node, TASK, name, worker.rank, 0)))

    def feed_fact(self, node: str, message: Any) -> None:
        self.feed(on.AgentMessage(node, message))

    def stopped(self, name: str, *, traced: bool = False, held: str = "") -> None:
        worker = self.worker(name)
        stopped = WorkerStopped(worker.node, TASK, name, worker.rank, 1_000_000, 2_000_000, traced, held)
        self.feed(on.AgentMessage(worker.node, stopped))

    def continued(self, name: str) -> None:
        worker = self.worker(name)
        self.feed(on.AgentMessage(worker.node, WorkerContinued(worker.node, TASK, name, worker.rank)))

    def stalled(
        self, name: str, *, waiting: bool, stalled_ms: float = 500.0, stage: Stage = Stage.COMPUTE, **fields: Any
    ) -> None:
        worker = self.worker(name)
        fields = {"epoch": self.task.epoch, "budget_ms": 400.0, "fault_ns": 0, "seen_ns": 1, **fields}
        stalled = WorkerStalled(
            worker.node, TASK, name, worker.rank, stage, 5, 1, waiting, stalled_ms, **fields,
        )  # fmt: skip
        self.feed(on.AgentMessage(worker.node, stalled))

    def says(self, body: Any) -> None:
        node = body.worker.partition(".")[0]
        self.feed(on.AgentMessage(node, FromWorker(node, TASK, body, 2_000_000)))

    def rank_of(self, name: str) -> int:
        return self.worker(name).rank

    def failed(self, name: str, *, inside: bool, epoch: int | None = None, iteration: int = 5) -> None:
        epoch = self.task.epoch if epoch is None else epoch
        body = CollectiveFailed(name, self.rank_of(name), epoch, iteration, Stage.REDUCE, inside, "Connection closed")
        self.says(body)

    def raised(self, name: str, kind: str = "ValueError", iteration: int = 5) -> None:
        epoch = self.task.epoch
        body = ExceptionRaised(
            name, self.rank_of(name), epoch, iteration, 1, Stage.COMPUTE, kind, f"{kind}: bad", "train.py:7", 1_000_000
        )
        self.says(body)

    def healed(
        self,
        name: str,
        epoch: int | None = None,
        recomputed: tuple[tuple[int, int], ...] = (),
        transfers: tuple[Transfer, ...] = (),
        times_ms: tuple[float, float] = (300.0, 100.0),
    ) -> None:
        """times_ms: of the interrupted iteration, and of a usual one."""
        epoch = self.task.epoch if epoch is None else epoch
        body = Healed(
            name, self.rank_of(name), epoch, 6, 5, *times_ms, 3_000_000, recomputed, 1.0, 1, 1, "own_arena", 0, {},
            transfers,
        )  # fmt: skip
        self.says(body)

    def all_healed(self) -> None:
        assert self.task.plan is not None
        for member in self.task.plan.members:
            self.healed(member.worker)

    def saved(self, name: str, iteration: int) -> None:
        self.says(Saved(name, self.rank_of(name), iteration, f"ckpt/{iteration}"))

    def state_lost(self, name: str, epoch: int | None = None) -> None:
        epoch = self.task.epoch if epoch is None else epoch
        self.says(StateLost(name, self.rank_of(name), epoch, 5, (0,)))

    def finished(self, name: str, *, tail: bool = False) -> None:
        self.says(Finished(name, self.rank_of(name), tail=tail))

    def disconnected(self, node: str) -> None:
        self.feed(on.AgentDisconnected(node))

    def probed(self, node: str, answer: Literal["alive", "gone", "unknown"]) -> None:
        self.feed(on.AgentProbed(node, answer))

    def fire(self, timer: str) -> None:
        """Let the time of this timer come."""
        at_ms = self.machine.state.timers[timer]
        self.feed(on.TimerFired(timer), after_ms=max(at_ms - self.now_ms, 0.0))


def running(
    layout: Layout | None = None, nodes: int = 2, slots: int = 2, *,
    clock: str = "", config: CoordinatorConfig | None = None, **fields: Any,
) -> Coordinator:  # fmt: skip
    """A coordinator whose task runs in epoch 1, understudies ready. clock: of the agents."""
    layout = layout or Layout(tp=2, dp=2, num_micro_batches=4)
    driver = Coordinator(config)
    for index in range(nodes):
        driver.hello(f"n{index}", slots=slots, clock=clock)
    driver.submit(layout, **fields)
    driver.all_up()
    return driver


class Agent:
    """The agent's machine with a clock."""

    def __init__(self, **fields: Any) -> None:
        self.config = AgentConfig("n0", 1, 2, 1, "tcp://n0:7000", "key", **fields)
        self.machine = AgentMachine(self.config)
        self.now_ms = 0.0
        self.actions: tuple[AgentAction, ...] = ()
        self.stop_grace_ms = 0

    def feed(self, event: agent_on.Event, after_ms: float = 1.0) -> tuple[AgentAction, ...]:
        self.now_ms += after_ms
        self.actions = self.machine.step(event, self.now_ms)
        return self.actions

    def of(self, kind: type) -> list[Any]:
        return [a for a in self.actions if isinstance(a, kind)]

    def said(self, kind: type) -> list[Any]:
        """Messages of this kind sent to the coordinator in the last step."""
        return [a.message for a in self.of(SendCoordinator) if isinstance(a.message, kind)]

    def order(self, message: Any) -> None:
        self.feed(agent_on.CoordinatorMessage(message))

    def start(self, *workers: tuple[str, int, int, bool], managed: bool = True) -> None:
        self.order(StartWorkers(spec(managed=managed, stop_grace_ms=self.stop_grace_ms), 0, tuple(workers)))

    def join(self, name: str, pid: int = 50) -> None:
        worker = self.machine.state.workers[name]
        hello = WorkerHello(TASK, name, worker.incarnation, worker.pid or pid)
        self.feed(agent_on.WorkerJoined(hello, worker.pid or pid))

    def ready(self, name: str) -> None:
        worker = self.machine.state.workers[name]
        self.say(name, WorkerReady(name, worker.rank, worker.waiting))

    def say(self, name: str, message: Any) -> None:
        self.feed(agent_on.WorkerMessage(name, message, 7_000_000))

    def fire(self, timer: str) -> None:
        at_ms = self.machine.state.timers[timer]
        self.feed(agent_on.TimerFired(timer), after_ms=max(at_ms - self.now_ms, 0.0))

    def beat(self) -> AgentHeartbeat:
        self.fire("heartbeat/coordinator")
        (beat,) = self.said(AgentHeartbeat)
        assert isinstance(beat, AgentHeartbeat)
        return beat

    def live(self, *workers: tuple[str, int, int, bool]) -> None:
        """Start these and bring them to READY."""
        self.feed(agent_on.CoordinatorConnected())
        self.start(*workers)
        for number, (name, *_) in enumerate(workers):
            self.feed(agent_on.WorkerForked(name, 50 + number))
            self.join(name)
            self.ready(name)


def spec(*, managed: bool = True, stop_grace_ms: int = 0) -> TaskSpec:
    return TaskSpec(
        TASK, ("train.py",), "/tmp", {}, Layout(dp=2, num_micro_batches=4), "/log", "ckpt", 5, 0, stop_grace_ms, 3.0,
        Budgets(), managed,
    )  # fmt: skip


def pulse(**fields: Any) -> agent_on.Pulse:
    values: dict[str, Any] = {
        "stage": Stage.COMPUTE, "iteration": 5, "micro_batch": 1, "since_ns": 0, "progress": 10, "waiting": False
    }  # fmt: skip
    return agent_on.Pulse(**{**values, **fields})
