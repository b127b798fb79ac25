"""The agent's process: the machine under sockets, pulse pages, the template and a clock. One thread
beside the native one.

Order of a turn: deaths first (the native supervisor's eventfd), then the template, workers,
coordinator and store. The agent has no pulse of its own: when it dies its sockets close, and its
workers end on that, natively.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from unicron import _core
from unicron.agent.actions import (
    Action,
    ArmPulse,
    CancelTimer,
    DropArena,
    ExecWorker,
    ForkWorker,
    GrantArena,
    GrantGpu,
    InspectWorker,
    KillWorker,
    LeaveCoordinator,
    LookAtOwner,
    Refused,
    ReleaseSlot,
    RunChecks,
    SendCoordinator,
    SendWorker,
    SetTimer,
    WatchWorker,
    WelcomeWorker,
)
from unicron.agent.config import AgentConfig
from unicron.agent.events import (
    CoordinatorConnected,
    CoordinatorDisconnected,
    CoordinatorMessage,
    CoordinatorSays,
    Event,
    ForkFailed,
    MutexReleased,
    OwnerLooked,
    PulsesSampled,
    TemplateLost,
    TimerFired,
    WorkerForked,
    WorkerInspected,
    WorkerJoined,
)
from unicron.agent.interfaces import socket_environment
from unicron.agent.machine import AgentMachine
from unicron.messages import (
    ArenaGrant,
    BeatOrder,
    Fork,
    Forked,
    GpuGrant,
    MessageRefused,
    PublishEpoch,
    StopTask,
    decode,
    encode,
)
from unicron.runtime import key_rotation, keys, logs, processes
from unicron.runtime.arena_keeper import ArenaKeeper
from unicron.runtime.beats import AgentBeats
from unicron.runtime.clock import clock_id, now_ms
from unicron.runtime.coordinator_link import CoordinatorLink
from unicron.runtime.ending import Ending, rise, settle
from unicron.runtime.endpoints import endpoints_of
from unicron.runtime.files import FileProblem, make_folder, write_atomically
from unicron.runtime.framing import MESSAGE_FRAME, PLAN_FRAME
from unicron.runtime.hardware import HardwareWatch
from unicron.runtime.holding import why_held
from unicron.runtime.keyring import KeyRing, server_keys
from unicron.runtime.networks import Networks, choose_networks, tell_networks
from unicron.runtime.post_mortem import PostMortem
from unicron.runtime.pulses import Pulses
from unicron.runtime.store_server import ZAP_DOMAIN, StoreServer
from unicron.runtime.store_server import now_ms as store_now_ms
from unicron.runtime.template_link import TemplateLink
from unicron.runtime.timers import Timers
from unicron.runtime.worker_server import WorkerServer
from unicron.runtime.zap import Gatekeeper

if TYPE_CHECKING:  # imported where metrics are wanted
    from prometheus_client.core import Metric

    from unicron.runtime.exposition import Exposition

TEMPLATE_MS_MAX = 120_000  # its imports
SAMPLE_MS = 200.0  # a tenth of the least budget of a stall; stages shorter than this have that budget anyway
LOOK_MS = 1.0  # between two looks at a dying process
LOOK_MS_MAX = 10.0  # then the machine hears "not yet"
POLL_MS_MAX = 500.0
BURST_QUIET_MS = 1  # so long without a question, and the burst is over
BURST_MS_MAX = 5.0
ENVIRONMENT_DROPPED = ("UNICRON_AGENT", "UNICRON_TASK", "UNICRON_WORKER")

log = logging.getLogger("unicron.agent")


class AgentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: str
    coordinator: str  # host:port, or several with commas between: of coordinators of which one decides
    keys: str  # directory with agent.key, worker.key, coordinator.pub
    slots: int
    understudies: int
    run_dir: str  # of the sockets
    interface: str = ""  # name, address or network: of the store and the line to the coordinator; '': the route's
    host: str = ""  # another word for interface: also a name that the resolver knows
    state_interface: str = ""  # of the workers' process groups; '': the same
    store_port: int = 0
    template: str = ""  # socket of the template; '': <run_dir>/template.sock
    checks: bool = False  # of the hardware, before the node is used and after each incident on it
    metrics: str = ""  # host:port of /metrics, /healthz, /readyz; '': none. Whoever reaches it reads it
    incarnation: int = 0  # 0: one more than the last on this run_dir
    machine: dict[str, float] = {}  # bounds of AgentConfig that differ from its defaults

    @property
    def template_path(self) -> Path:
        return Path(self.template) if self.template else Path(self.run_dir) / "template.sock"


class AgentProcess:
    def __init__(self, settings: AgentSettings, lifeline: int = -1) -> None:
        endpoints = endpoints_of(settings.coordinator)
        rise()  # before all that makes threads: they keep the priority of their maker
        networks = choose_networks(
            endpoints, settings.interface, settings.state_interface, os.environ, host=settings.host
        )
        host = networks.control.address
        tell_networks(log, networks)
        directory = Path(settings.run_dir)
        make_folder(directory, "folder of the agent's sockets")
        key_directory = Path(settings.keys)
        self._own = own = keys.load(key_directory / "agent.key")
        self._worker_key = keys.load(key_directory / "worker.key")
        servers = server_keys(key_directory)
        self._ring = KeyRing(key_directory)
        self._ending = Ending(lifeline)
        self._timers = Timers()
        self._queue: deque[Event] = deque()
        self._looks: dict[str, tuple[int, float]] = {}  # worker -> (pid, until)
        self._pidfds: dict[str, int] = {}
        self._on_gpu: set[str] = set()  # workers whose arenas hold GPU memory
        self._next_sample_ms = 0.0
        self._poller = zmq.Poller()
        self._burst_poller = zmq.Poller()
        self._interests: list[tuple[Any, int]] = []
        self._last_reasons: dict[str, str] = {}
        self._environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT_DROPPED}
        self._server = WorkerServer(directory / "agent.sock")
        self._template_path = settings.template_path
        self._template: TemplateLink | None = TemplateLink(self._template_path, TEMPLATE_MS_MAX)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context)
        self._admit()
        self._store = StoreServer(self._context, own.secret, host, settings.store_port)
        incarnation = settings.incarnation or _next_incarnation(directory)
        self._beats = AgentBeats(host, incarnation)
        facts = {
            "node": settings.node,
            "incarnation": incarnation,
            "slots": settings.slots,
            "understudies": settings.understudies,
            "store": self._store.endpoint,
            "store_key": own.public,
            "clock": clock_id(),
            "socket": str(self._server.path),
            "beat_port": self._beats.port,
            "checks": settings.checks,
            "control_network": networks.control,
            "state_network": networks.state,
        }
        config = msgspec.convert({**settings.machine, **facts}, AgentConfig)
        self._machine = AgentMachine(config)
        self._pulses = Pulses(config.workers_max)
        self._arenas = ArenaKeeper()
        source = host if networks.is_named else ""
        self._coordinator = CoordinatorLink(self._context, endpoints, servers, own, source)
        settle()  # what is left to start are programs
        self._hardware = HardwareWatch(directory, checks=settings.checks, addresses=_chosen(networks))
        self._post_mortem = PostMortem()
        self._exposition: Exposition | None = None
        if settings.metrics:
            try:
                self._expose(settings.metrics)
            except OSError:
                self.close()
                raise

    # ------------------------------------------------------------ loop

    def run(self) -> int:
        self._ending.catch_signals()
        log.info("store at %s, workers at %s", self._store.endpoint, self._server.path)
        try:
            while not self._ending.reason:
                self._turn()
        finally:
            self.close()
        log.info("stopped: %s", self._ending.reason)
        return 1 if self._template is None else 0

    def _turn(self) -> None:
        ready = self._poll()
        self._beats.turned()
        self._ending.look(ready)
        if self._pulses.fileno() in ready:
            self._read_deaths()
        if self._template is not None and self._template.fileno() in ready:
            self._read_template()
        for fd, _ in [*self._server.interests()]:
            if fd in ready:
                for event in self._server.serve(fd):
                    self._take(event)
        if self._gate.socket in ready:
            self._gate.serve()
        if self._exposition is not None and self._exposition.fileno() in ready:
            self._exposition.serve()
        if self._beats.fileno() in ready:
            for change in self._beats.changes():
                self._take(change)
        if self._hardware.is_overdue or not ready.keys().isdisjoint(self._hardware.fds):
            for seen in self._hardware.serve():
                self._take(seen)
        if not ready.keys().isdisjoint(self._coordinator.sockets):
            self._read_coordinator()
        if self._store.socket in ready:
            self._serve_store()
        self._do_what_is_due()
        self._drain()

    def _poll(self) -> dict[object, int]:
        """The poller is made anew only when something came, went or wants to write (healing waits for the store)."""
        interests: list[tuple[Any, int]] = [
            *((fd, zmq.POLLIN | (zmq.POLLOUT if writes else 0)) for fd, writes in self._server.interests()),
            *((socket, zmq.POLLIN) for socket in self._coordinator.sockets),
            *((fd, zmq.POLLIN) for fd in self._hardware.fds),
        ]
        if self._template is not None:
            writing = zmq.POLLOUT if self._template.wants_to_write else 0
            interests.append((self._template.fileno(), zmq.POLLIN | writing))
        if interests != self._interests:
            self._interests = interests
            self._poller = zmq.Poller()
            for each, events in interests:
                self._poller.register(each, events)
            for socket in (self._gate.socket, self._store.socket):
                self._poller.register(socket, zmq.POLLIN)
            self._poller.register(self._pulses.fileno(), zmq.POLLIN)
            self._poller.register(self._beats.fileno(), zmq.POLLIN)
            if self._exposition is not None:
                self._poller.register(self._exposition.fileno(), zmq.POLLIN)
            self._ending.register(self._poller)
            self._burst_poller = zmq.Poller()
            for each in (self._store.socket, *self._coordinator.sockets, self._pulses.fileno()):
                self._burst_poller.register(each, zmq.POLLIN)
        return dict(self._poller.poll(self._wait_ms()))

    def _serve_store(self) -> None:
        """A rendezvous is a burst of small questions: stay with it while it lasts, bounded, and until a death or an
        order comes."""
        until = now_ms() + BURST_MS_MAX
        while True:
            self._store.serve()
            ready = self._burst_poller.poll(BURST_QUIET_MS)
            if len(ready) != 1 or ready[0][0] is not self._store.socket or now_ms() >= until:
                return

    def _wait_ms(self) -> int:
        now = now_ms()
        wait = self._timers.wait_ms(now, POLL_MS_MAX)
        if self._looks:
            wait = min(wait, LOOK_MS)
        if self._pulses.num_watched:
            wait = min(wait, max(0.0, self._next_sample_ms - now))
        due = self._store.next_deadline_ms()
        if due is not None:
            wait = min(wait, max(0.0, due - store_now_ms()))
        return int(-(-wait // 1))  # rounded up: no turns that find nothing due

    def _drain(self) -> None:
        """Answers to what the machine asked of us, after the step that asked."""
        while self._queue:
            self._take(self._queue.popleft())

    def _do_what_is_due(self) -> None:
        self._store.expire()
        if self._ring.changed():
            self._renew_keys()
        now = now_ms()
        for worker, (pid, until) in [*self._looks.items()]:
            gone = self._is_gone(worker, pid)
            if gone or now >= until:
                del self._looks[worker]
                self._take(OwnerLooked(worker, gone))
        for name in self._timers.due(now_ms()):
            self._take(TimerFired(name))
        if self._pulses.num_watched and now >= self._next_sample_ms:
            self._next_sample_ms = now + SAMPLE_MS
            self._server.drop_silent()
            self._take(PulsesSampled(time.monotonic_ns(), self._pulses.sample()))

    def _take(self, event: Event) -> None:
        for action in self._machine.step(event, now_ms()):
            self._log(action)
            self._carry_out(action)
        if isinstance(event, WorkerJoined):
            self._server.refuse_joining(event.hello.worker)

    # ------------------------------------------------------------ keys

    def _admit(self) -> None:
        """To the stores of this node: workers of every node, and ourselves."""
        names = dict.fromkeys(key_rotation.publics(self._ring.directory, "worker"), "worker")
        self._gate.replace(ZAP_DOMAIN, {**names, self._own.public: "agent"})

    def _renew_keys(self) -> None:
        """What is connected stays; whoever comes, and where we call next, goes by the new ones. The stores of this node
        keep their own pair for this life."""
        directory = self._ring.directory
        try:
            self._admit()
            self._worker_key = keys.load(directory / "worker.key")
            self._coordinator.renew(server_keys(directory), keys.load(directory / "agent.key"))
        except keys.KeyProblem as problem:
            log.error("the keys changed and cannot be used: %s; the former ones stay", problem)
            return
        log.info("the keys changed")

    # ------------------------------------------------------------ what others see

    def _expose(self, address: str) -> None:
        from unicron.runtime.exposition import Exposition

        self._exposition = Exposition(address)
        self._exposition.watch(self._families, self._unready)

    def _families(self) -> Iterable[Metric]:
        from unicron.runtime import metrics_agent

        return metrics_agent.families(self._machine.state, self._machine.config, self._gate.num_refused)

    def _unready(self) -> str:
        if self._template is None:
            return "the template is gone"
        return "" if self._coordinator.is_connected else "no coordinator"

    # ------------------------------------------------------------ what arrives

    def _read_deaths(self) -> None:
        for worker, seen_ns, pulse in self._pulses.take_deaths():
            for event in self._server.serve_last(worker):
                self._take(event)
            self._take(MutexReleased(worker, seen_ns, pulse))

    def _read_template(self) -> None:
        assert self._template is not None
        try:
            self._template.flush()
            for message in self._template.receive():
                if isinstance(message, Forked):
                    self._on_forked(message)
                    continue
                self._take(self._post_mortem.seen(message, self._pulses.read(message.worker)))
        except ConnectionError as error:
            self._lose_template(str(error))

    def _on_forked(self, message: Forked) -> None:
        if message.pid == 0:
            self._take(ForkFailed(message.worker, "the template could not fork"))
            return
        with contextlib.suppress(OSError):  # reaped already: its end is the next message
            self._pidfds[message.worker] = os.pidfd_open(message.pid)
            self._post_mortem.forked(message.worker, message.pid)
        self._take(WorkerForked(message.worker, message.pid))

    def _lose_template(self, text: str) -> None:
        """Without it nothing can be started, and its children were killed with it: this node is no
        use.
        """
        if self._template is not None:
            log.error("the template is gone: %s", text)
            self._template.close()
            self._template = None
            processes.end_of_workers(self._machine.state.workers, self._template_path)
            self._take(TemplateLost())
            self._ending.ask("the template is gone")

    def _read_coordinator(self) -> None:
        for connected in self._coordinator.changes():
            log.info("coordinator %s", "connected" if connected else "disconnected")
            self._take(CoordinatorConnected() if connected else CoordinatorDisconnected())
        for data in self._coordinator.receive():
            try:
                message = decode(data)
            except MessageRefused as error:
                log.warning("refused from the coordinator: %s: %s", type(error).__name__, error)
                continue
            if isinstance(message, BeatOrder):
                self._beats.follow(message, self._coordinator.endpoint)
                continue
            if not isinstance(message, CoordinatorSays):
                log.warning("refused from the coordinator: %s", type(message).__name__)
                continue
            if isinstance(message, PublishEpoch):
                self._store.announce(message.plan.task, message.plan.epoch)
            elif isinstance(message, StopTask):
                self._store.forget_task(message.task)
            self._take(CoordinatorMessage(message))

    # ------------------------------------------------------------ what the machine wants

    def _carry_out(self, action: Action) -> None:
        match action:
            case SendCoordinator(message):
                self._coordinator.send(encode(message))
            case SendWorker(worker, message, epoch, touched):
                kind = PLAN_FRAME if isinstance(message, PublishEpoch) else MESSAGE_FRAME
                data = encode(message)
                self._server.send(worker, data, kind=kind, epoch=epoch, touched=touched)
            case WelcomeWorker(worker, message):
                pair = self._worker_key
                filled = msgspec.structs.replace(message, store_secret=pair.secret, store_public=pair.public)
                self._server.welcome(worker, filled, self._pulses.fd)
            case ForkWorker(request, slot) | ExecWorker(request, slot):
                self._fork(request, slot, is_exec=isinstance(action, ExecWorker))
            case WatchWorker(worker, slot):
                self._pulses.watch(worker, slot)
            case ReleaseSlot(worker, slot):
                self._release(worker, slot)
            case KillWorker():
                self._kill(action.worker, action.pid, action.signal)
            case InspectWorker(worker, pid):
                self._queue.append(WorkerInspected(worker, _core.process_state(pid), why_held(pid)))
            case LookAtOwner(worker, pid):
                self._looks[worker] = (pid, now_ms() + LOOK_MS_MAX)
            case SetTimer(name, at_ms):
                self._timers.set(name, at_ms)
            case CancelTimer(name):
                self._timers.cancel(name)
            case GrantArena():
                self._grant(action)
            case GrantGpu(request, index, reason):
                self._server.answer(request, GpuGrant(index, reason if index < 0 else ""), ())
            case DropArena(arena):
                self._arenas.drop(arena)
            case RunChecks(is_idle):
                self._hardware.check(is_idle=is_idle)
            case LeaveCoordinator():
                self._coordinator.leave()
                self._queue.append(CoordinatorDisconnected())
            case ArmPulse():
                self._arm(action)
            case Refused():
                pass

    def _fork(self, request: Fork, slot: int, *, is_exec: bool) -> None:
        self._pulses.prepare(slot)
        self._post_mortem.ordered(request.worker, request.stderr)
        environment = {**self._environment, **request.env, processes.TEMPLATE_MARK: str(self._template_path)}
        environment.update(socket_environment(self._machine.config.state_network, environment))
        if is_exec:
            environment["UNICRON_EXEC"] = "1"
        if self._template is None:
            self._queue.append(ForkFailed(request.worker, "the template is gone"))
            return
        try:
            self._template.fork(msgspec.structs.replace(request, env=environment))
        except ConnectionError as error:
            self._queue.append(ForkFailed(request.worker, str(error)))

    def _release(self, worker: str, slot: int) -> None:
        self._pulses.release(worker, slot)
        self._server.release(worker)
        self._looks.pop(worker, None)
        self._on_gpu.discard(worker)
        self._post_mortem.forget(worker)
        pidfd = self._pidfds.pop(worker, None)
        if pidfd is not None:
            os.close(pidfd)

    def _kill(self, worker: str, pid: int, number: int) -> None:
        """By pidfd, so never a stranger with the same number."""
        pidfd = self._pidfds.get(worker)
        if pidfd is None:
            log.info("%s (pid %d) is gone already", worker, pid)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)

    def _grant(self, grant: GrantArena) -> None:
        refused = grant.refused
        kept = None
        offered, sizes = self._server.take_offered(grant.request_id)
        try:
            if grant.create:
                kept = self._arenas.create(grant.arena, grant.nbytes, offered, sizes)
                offered = ()
            else:
                kept = self._arenas.get(grant.arena)
        except (_core.UnicronError, OSError, MemoryError) as error:
            refused = f"cannot make an arena of {grant.nbytes} bytes: {error}"
        for fd in offered:
            os.close(fd)
        if kept is None:
            answer = ArenaGrant(grant.nbytes, False, refused or "the arena is not here")
            self._server.answer(grant.request_id, answer, ())
            return
        if kept.gpu_fds:
            self._on_gpu.add(grant.worker)
        gpu_fds = () if grant.create else kept.gpu_fds  # a fresh one's are the worker's own
        answer = ArenaGrant(grant.nbytes, not grant.create, refused, kept.sizes if gpu_fds else ())
        self._server.answer(grant.request_id, answer, (kept.fd, *gpu_fds))

    def _is_gone(self, worker: str, pid: int) -> bool:
        """Can it write to its arena no more? A GPU's kernels go on after the process's threads, until its files are
        closed and its context with them: then its pidfd says so."""
        if worker not in self._on_gpu:
            return bool(_core.owner_gone(pid))
        pidfd = self._pidfds.get(worker)
        return pidfd is None or bool(select.select([pidfd], [], [], 0)[0])

    def _arm(self, action: ArmPulse) -> None:
        from unicron.faults.kinds import fault_kind, fault_point

        fault = action.fault
        outside = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        try:
            kind, point = int(fault_kind(fault.fault)), fault_point(fault.point)
        except ValueError as error:
            log.warning("refused fault: %s", error)
            return
        if fault.point == "now" and fault.fault in outside:
            self._pulses.mark_fault(action.slot)
            self._kill(action.worker, 0, outside[fault.fault])
            return
        self._pulses.arm(action.slot, kind, point, fault.iteration, fault.micro_batch)

    def _log(self, action: Action) -> None:
        match action:
            case SetTimer() | CancelTimer() | LookAtOwner():
                return
            case SendCoordinator(message):
                key = f"tell {type(message).__name__}"
            case Refused(name):
                key = f"refused {name}"
            case _:
                key = f"{type(action).__name__} {getattr(action, 'worker', '')}"
        if self._last_reasons.get(key) == action.reason:
            return
        if len(self._last_reasons) > 10_000:
            self._last_reasons.clear()
        self._last_reasons[key] = action.reason
        log.info("%s: %s", key, action.reason)

    def close(self) -> None:
        """Workers end first: the template kills them when our connection to it closes."""
        if self._exposition is not None:
            self._exposition.close()
        if self._template is not None:
            self._template.close()
        self._server.close()
        self._coordinator.close()
        self._store.close()
        self._gate.close()
        self._context.destroy(linger=100)
        self._beats.close()
        self._hardware.close()
        self._pulses.close()
        self._arenas.close()
        self._post_mortem.close()
        self._ending.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)


def _chosen(networks: Networks) -> list[str]:
    """Addresses of interfaces that are known."""
    return [each.address for each in (networks.control, networks.state) if each.interface]


def _next_incarnation(directory: Path) -> int:
    path = directory / "incarnation"
    try:
        last = int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        last = 0
    write_atomically(path, str(last + 1))
    return last + 1


def main(arguments: list[str] | None = None) -> int:
    """For a local cluster; people use the command line (unicron agent)."""
    parser = argparse.ArgumentParser(prog="python -m unicron.runtime.agent_process")
    parser.add_argument("--config", type=Path, required=True, help="AgentSettings as JSON")
    parser.add_argument("--log", type=Path)
    parser.add_argument("--lifeline", type=int, default=-1)
    options = parser.parse_args(arguments)
    logs.set_up(options.log)
    settings = msgspec.json.decode(options.config.read_bytes(), type=AgentSettings)
    try:
        process = AgentProcess(settings, options.lifeline)
    except (OSError, FileProblem, keys.KeyProblem) as problem:
        sys.stderr.write(f"unicron agent: {problem}\n")
        return 1
    return process.run()


if __name__ == "__main__":
    sys.exit(main())
