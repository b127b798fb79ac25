"""A node: the real agent machine with simulated processes, arenas, store and connection around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicron.agent import actions as ask
from unicron.agent import events as on
from unicron.agent.config import AgentConfig
from unicron.agent.machine import AgentMachine
from unicron.messages import (
    ArenaRequest,
    ChangeLayout,
    ChildStatus,
    FinishUnderstudies,
    MoveRoles,
    PublishEpoch,
    SaveAndHold,
    WorkerHello,
)
from unicron.sim import plants
from unicron.sim.clocks import Timers
from unicron.sim.groups import Store
from unicron.sim.memory import Memory
from unicron.sim.network import Connection
from unicron.sim.worker import SimWorker
from unicron.sim.worker_process import WorkerProcess

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster

SAMPLE_MS = 100.0


class AgentHost:
    def __init__(self, world: Cluster, node: str, incarnation: int) -> None:
        self.world, self.node, self.incarnation = world, node, incarnation
        self.rng = world.streams(f"agent/{node}/{incarnation}")
        options = world.options
        config = AgentConfig(
            node=node,
            incarnation=incarnation,
            slots=options.slots,
            understudies=1,
            store=f"tcp://{node}:7000",
            store_key="key",
            stall_ms_min=3_000.0,
            heal_ms_max=20_000.0,
            idle_ms_max=20_000.0,
            start_ms_max=20_000.0,
        )
        self.machine = AgentMachine(plants.agent_config(options.plant, config))
        self.alive = True
        self.frozen: list[Callable[[], None]] | None = None  # what waits while it stands still
        self.is_paused = False  # its workers stand still too
        self.clock = world.new_clock(f"{node}/{incarnation}")
        self.store = Store(world.scheduler, self.rng)
        self.workers: dict[str, SimWorker] = {}
        self.memories: dict[str, Memory] = {}
        self.timers = Timers(world.scheduler, self.clock, self._fired, self.gate)
        self.connection: Connection | None = None
        self._pids = 1000 * (incarnation + 1)
        self._requests: dict[str, tuple[SimWorker, ArenaRequest]] = {}
        self._asked = 0
        self._socket_ms = 0.0
        self._sample()

    # ------------------------------------------------------------ machine

    def feed(self, event: on.Event) -> None:
        self.gate(lambda: self._stepped(event))

    def _stepped(self, event: on.Event) -> None:
        self._step(event)

    def _fired(self, name: str) -> None:
        self._step(on.TimerFired(name))

    def hear_order(self, event: on.CoordinatorMessage, term: int, life: tuple[str, int]) -> None:
        """What this life of a coordinator says in its term."""

        def heard() -> None:
            orders = self._step(event)
            is_refused = any(isinstance(a, ask.Refused) and a.name == "stale_term" for a in orders)
            if not is_refused:
                self.world.checkers.obeyed(self, term, life, event.message)

        self.gate(heard)

    def gate(self, call: Callable[[], None]) -> None:
        """What happens on this machine: not when its agent is gone, and later when it stands still."""
        if self.frozen is not None:
            self.frozen.append(call)
        elif self.alive:
            call()

    def _step(self, event: on.Event) -> tuple[ask.Action, ...]:
        try:
            actions = self.machine.step(event, self.clock.now_ms)
        except Exception as error:
            self.world.violate(f"agent {self.node}: {type(event).__name__}: {error!r}")
            return ()
        self.world.cover_agent(self.machine, event)
        for action in actions:
            self._do(action)
        return actions

    def _do(self, action: ask.Action) -> None:
        match action:
            case ask.SendCoordinator():
                line, node = self.connection, self.node
                if line is not None:
                    line.send("up", lambda m: line.peer.hear(line, node, m), action.message)
            case ask.SendWorker():
                self._to_worker(action)
            case ask.WelcomeWorker():
                worker = self.workers[action.worker]
                self._later(0.2, lambda: worker.gate(lambda: worker.on_welcome(action.message)))
            case ask.ForkWorker() | ask.ExecWorker():
                self._later(self.rng.uniform(2.0, 20.0), lambda: self._fork(action))
            case ask.KillWorker():
                worker = self.workers[action.worker]
                self.world.checkers.killed(worker, action.reason)
                number = action.signal
                self._later(0.1, lambda: worker.die("signaled", number))
            case ask.InspectWorker():
                state = "R" if self.workers[action.worker].alive else ""
                self._later(0.1, lambda: self.feed(on.WorkerInspected(action.worker, state, "")))
            case ask.LookAtOwner():
                owner = self.workers[action.worker]
                gone = not owner.alive
                self._later(0.5, lambda: self.feed(on.OwnerLooked(owner.name, gone)))
            case ask.GrantArena():
                self._grant(action)
            case ask.DropArena():
                del self.memories[action.arena]
            case ask.SetTimer():
                self.timers.set(action.name, action.at_ms)
            case ask.CancelTimer():
                self.timers.cancel(action.name)
            case ask.Refused():
                self.world.log(self.node, f"refused {action.name}: {action.reason}")
            case ask.LeaveCoordinator():
                self.world.log(self.node, f"leaves its coordinator: {action.reason}")
                if self.world.options.coordinators == 1:
                    self.world.violate(f"{self.node} leaves the only coordinator: {action.reason}")
                self.world.leave(self)
            case ask.WatchWorker() | ask.ReleaseSlot() | ask.ArmPulse():
                pass

    def _later(self, delay_ms: float, call: Any) -> None:
        """Work of this agent: lost when it dies."""
        self.world.scheduler.after(delay_ms, lambda: self.gate(call))

    @property
    def now_ns(self) -> int:
        return int(self.clock.now_ms * 1e6)

    # ------------------------------------------------------------ workers

    def _fork(self, action: ask.ForkWorker | ask.ExecWorker) -> None:
        self._pids += 1
        fork = action.message
        worker = SimWorker(
            self, fork.worker, fork.env["UNICRON_TASK"], int(fork.env["UNICRON_INCARNATION"]),
            self._pids,
        )  # fmt: skip
        self.workers[worker.name] = worker
        self.feed(on.WorkerForked(worker.name, worker.pid))

    def _to_worker(self, action: ask.SendWorker) -> None:
        worker, message = self.workers[action.worker], action.message
        delay_ms = self.rng.uniform(0.05, 0.5)
        self._socket_ms = max(self._socket_ms, self.world.scheduler.now_ms + delay_ms)

        def arrive() -> None:
            if isinstance(message, PublishEpoch):
                worker.gate(lambda: worker.on_frame(message.plan))
            elif isinstance(message, FinishUnderstudies):
                worker.gate(worker.on_finish)
            elif isinstance(message, SaveAndHold):
                worker.gate(lambda: worker.on_hold(message))
            elif isinstance(message, MoveRoles):
                worker.gate(lambda: worker.on_move(message))
            elif isinstance(message, ChangeLayout):
                worker.gate(lambda: worker.on_change(message))

        self.world.scheduler.at(self._socket_ms, lambda: self.gate(arrive))

    def heard_hello(self, worker: WorkerProcess) -> None:
        hello = WorkerHello(worker.task, worker.name, worker.incarnation, worker.pid)
        self.feed(on.WorkerJoined(hello, worker.pid))

    def hear(self, worker: WorkerProcess, message: Any) -> None:
        """Over the Unix socket: what was written before a death is still read."""
        now_ns = self.now_ns
        self._later(
            self.rng.uniform(0.05, 0.2),
            lambda: self.feed(on.WorkerMessage(worker.name, message, now_ns)),
        )

    def ask_arena(self, worker: Any, request: ArenaRequest) -> None:
        self._asked += 1
        request_id = f"{worker.name}/{self._asked}"
        self._requests[request_id] = worker, request
        self._later(0.2, lambda: self.feed(on.ArenaRequested(request_id, request)))

    def _grant(self, action: ask.GrantArena) -> None:
        worker, request = self._requests.pop(action.request_id)
        if action.create:
            self.memories[action.arena] = Memory(is_torn=True)  # until its owner says what is in it
        memory = self.memories[action.arena]
        owners = [w for w in self.workers.values() if w.alive and w.memory is memory and w is not worker]
        if owners:
            self.world.violate(f"{action.arena} granted to {worker.name}, {owners[0].name} lives")
        adopted = not action.create
        self._later(0.3, lambda: worker.gate(lambda: worker.on_arena(memory, adopted, request)))

    def child_died(self, worker: WorkerProcess, kind: str, status: int) -> None:
        """The mutex tells at once, the exit status much later."""
        pulse = worker.pulse()
        now_ns = self.now_ns
        self._later(
            self.rng.uniform(0.2, 0.6),  # behind what it had written to its socket
            lambda: self.feed(on.MutexReleased(worker.name, now_ns, pulse)),
        )
        gone = ChildStatus(worker.name, worker.pid, kind, status)
        self._later(
            self.rng.uniform(20.0, 120.0),
            lambda: self.feed(on.ChildStatusSeen(gone, now_ns, pulse)),
        )

    def child_stopped(self, worker: WorkerProcess, kind: str, signal: int) -> None:
        status = ChildStatus(worker.name, worker.pid, kind, signal)
        now_ns = self.now_ns
        self._later(1.0, lambda: self.feed(on.ChildStatusSeen(status, now_ns, worker.pulse())))

    def _sample(self) -> None:
        live = [w for w in self.workers.values() if w.alive]
        if live:
            pulses = tuple((w.name, w.sampled()) for w in live)
            self.feed(on.PulsesSampled(self.now_ns, pulses))
        self._later(SAMPLE_MS, self._sample)

    # ------------------------------------------------------------ life

    def die(self) -> None:
        """The node, or the agent alone: workers end with their agent's socket."""
        self.alive, self.frozen, self.is_paused = False, None, False
        self.store.end()
        for worker in self.workers.values():
            worker.die("signaled", 9)
        self.timers.cancel_all()

    def end_store(self) -> None:
        """Its address is another machine's now."""
        self.store.end()

    def freeze(self, *, whole: bool) -> None:
        """The whole machine stands still (a paused virtual machine), or its agent's loop alone: no answer, nothing
        said, nothing forgotten."""
        if self.alive and self.frozen is None:
            self.frozen, self.is_paused = [], whole
            self.store.freeze()

    def thaw(self) -> None:
        if self.frozen is None:
            return
        calls, self.frozen, self.is_paused = self.frozen, None, False
        self.store.thaw()
        for call in calls:
            self.gate(call)
        for worker in list(self.workers.values()):
            worker.catch_up()
