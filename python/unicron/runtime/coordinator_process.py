"""The coordinator's process: the machine under ZeroMQ, a clock, timers and the journal.

The order of a step is journal -> send: its decisions are on the disk, in one transaction, before
the first action goes out. A journal that cannot be written stops the deciding (exit code 74) and
nothing else: agents and workers go on, and a coordinator started again continues from what was
written.

One port for agents and command lines; the key a peer showed says which of the two it is.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from unicron import diagnosis
from unicron.coordinator.actions import (
    Action,
    Answer,
    CancelTimer,
    ProbeAgent,
    RecordIncident,
    Refused,
    SendAgent,
    SetTimer,
    WriteJournal,
)
from unicron.coordinator.bandwidth import slow_words
from unicron.coordinator.events import (
    AgentDisconnected,
    AgentMessage,
    AgentProbed,
    AgentSays,
    Event,
    NodeSilent,
    Replayed,
    Started,
    TimerFired,
)
from unicron.coordinator.journal import JournalUnreadable, NodeDeclaredLost, encode_entry
from unicron.coordinator.machine import CoordinatorMachine
from unicron.coordinator.nodes import turned_away
from unicron.coordinator.replay import MISFITS, replay
from unicron.coordinator.speaking import foreign
from unicron.coordinator.state import Hearing
from unicron.messages import (
    MESSAGE_BYTES_MAX,
    AgentHeartbeat,
    AgentHello,
    BeatOrder,
    MessageRefused,
    Reply,
    Request,
    WorkerStatus,
    WorkerUp,
    decode,
    encode,
)
from unicron.runtime import keys, requests
from unicron.runtime.beats import BeatDesk
from unicron.runtime.clock import clock_id, now_ms
from unicron.runtime.coordinator_settings import CoordinatorSettings, listens_at
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.ending import Ending, settle
from unicron.runtime.endpoints import parse_endpoint
from unicron.runtime.journal_problem import JournalProblem, LeadershipLost
from unicron.runtime.keyring import Caller, Callers, KeyRing
from unicron.runtime.logs import Once
from unicron.runtime.peers import Peers
from unicron.runtime.probe import Probes
from unicron.runtime.store_server import bind
from unicron.runtime.timers import Timers
from unicron.runtime.webhook import Webhook
from unicron.runtime.zap import Gatekeeper, serve_curve

if TYPE_CHECKING:  # imported where metrics are wanted: they take longer than all else of a small daemon
    from prometheus_client.core import Metric

    from unicron.runtime.dashboard import Dashboard
    from unicron.runtime.exposition import Exposition
    from unicron.runtime.metrics_coordinator import CoordinatorMetrics

ZAP_DOMAIN = "coordinator"
MESSAGES_PER_TURN_MAX = 256
QUEUED_MESSAGES_MAX = 100_000
PENDING_ANSWERS_MAX = 4096
POLL_MS_MAX = 500.0
BEHIND_MS_MAX = 5_000.0  # timers wait so long at most for messages that are not read yet
HEARTBEAT_MS = 500  # ZeroMQ's own: a peer that went silent below TCP
HEARTBEAT_TIMEOUT_MS = 2_000
EXIT_JOURNAL = 74
EXIT_FOLLOWED = 75  # another coordinator may decide now
EXIT_RENEWED = 76  # its own key changed: begin again with it

log = logging.getLogger("unicron.coordinator")


class Journal(Protocol):
    """What ``append`` returned from is durable; after a JournalProblem nothing more may be decided."""

    def entries(self) -> Iterator[bytes]: ...
    def append(self, entries: Sequence[bytes]) -> None: ...
    def close(self) -> None: ...


class Term(Protocol):
    """A coordinator's right to decide, where there are several."""

    offset_ms: float  # of the cluster's clock against our monotonic one

    def require(self) -> None:
        """JournalProblem when it may be over."""


class CoordinatorProcess:
    def __init__(
        self, settings: CoordinatorSettings, journal: Journal, ending: Ending, term: Term | None = None
    ) -> None:
        """The process closes the journal, also when this raises; the ending stays its owner's."""
        self._journal, self._ending, self._term = journal, ending, term
        self._journal_name = settings.journal_name
        directory = Path(settings.keys)
        try:
            pair = keys.load(directory / "coordinator.key")
        except keys.KeyProblem:
            journal.close()
            raise
        config = msgspec.structs.replace(
            settings.machine, clock="" if term else clock_id(), gpu=settings.gpu or settings.machine.gpu
        )
        self._machine = CoordinatorMachine(config, random.getrandbits(32))
        self._timers = Timers()
        self._probes = Probes()
        self._seen: dict[str, WorkerStatus] = {}
        self._pending: dict[str, bytes] = {}  # request -> who asked
        self._num_requests = 0
        self._num_refused = 0  # messages of admitted peers
        self._once = Once(log)
        self._slow = Once(log)
        self._keys_of: dict[str, str] = {}  # node -> the key it showed last
        self._listened_ms = 0.0  # when the queue was empty last
        self._heard_ms: dict[str, float] = {}  # node -> its last message
        self._exposition: Exposition | None = None
        self._metrics: CoordinatorMetrics | None = None
        self._dashboard: Dashboard | None = None
        self._webhook = Webhook(settings.webhook) if settings.webhook else None
        self._encoded: tuple[Any, bytes] = (None, b"")  # the message sent last
        self._last_reasons: dict[str, str] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context)
        self._pair, self._ring = pair, KeyRing(directory)
        self._callers = Callers(directory, self._gate, ZAP_DOMAIN)
        self._router = self._make_router(pair.secret)
        self._peers = Peers(self._router)
        self._beats: BeatDesk | None = None
        try:
            host, port = listens_at(settings)
            self.endpoint = bind(self._router, host, port)
            self._beats = BeatDesk(host, parse_endpoint(self.endpoint)[1], self._order_beats)
            if settings.metrics:
                self._expose(settings.metrics)
            if settings.dashboard is not None:
                self._show(settings.dashboard)
        except (OSError, ValueError):
            self.close()
            raise

    def _order_beats(self, node: str, order: BeatOrder) -> None:
        identity = self._peers.identity_of(node)
        if identity is not None:
            self._send(identity, order)

    def _expose(self, address: str) -> None:
        from unicron.runtime.exposition import Exposition
        from unicron.runtime.metrics_coordinator import CoordinatorMetrics

        self._exposition = Exposition(address)
        self._metrics = CoordinatorMetrics(self._exposition.registry)

    def _show(self, settings: DashboardSettings) -> None:
        from unicron.runtime.dashboard import Dashboard
        from unicron.runtime.dashboard_view import Looks

        looks = Looks()
        self._dashboard = Dashboard(settings, lambda: looks.look(self._machine.state, self._seen, self._now_ms()))

    def _make_router(self, secret: str) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        serve_curve(router, secret, ZAP_DOMAIN, message_bytes_max=MESSAGE_BYTES_MAX + 1)
        router.router_mandatory = True
        router.sndhwm = router.rcvhwm = QUEUED_MESSAGES_MAX
        router.heartbeat_ivl = HEARTBEAT_MS
        router.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        return router

    # ------------------------------------------------------------ loop

    def run(self) -> int:
        try:
            self._begin()
            # Beside the loop: half a second of patterns that the first failure should not have to wait for.
            settle()
            threading.Thread(target=diagnosis.warm_up, name="unicron-warm", daemon=True).start()
            while not self._ending.reason:
                self._turn()
                if self._ring.changed() and self._renew_keys():
                    return EXIT_RENEWED
        except LeadershipLost as problem:
            log.warning("does not decide any more: %s", problem)
            return EXIT_FOLLOWED
        except (JournalProblem, JournalUnreadable) as problem:
            log.error("%s", problem)
            sys.stderr.write(f"unicron coordinator: {problem}\n")
            return EXIT_JOURNAL
        finally:
            self.close()
        log.info("stopped: %s", self._ending.reason)
        return 0

    def _begin(self) -> None:
        count = replay(
            self._journal.entries(),
            self._journal_name,
            lambda entry: self._machine.step(Replayed(entry), self._now_ms()),
        )
        log.info("listening on %s, %d journal entries", self.endpoint, count)
        if self._metrics is not None and self._exposition is not None:
            self._metrics.begin(self._machine.state, self._now_ms())
            self._exposition.watch(self._families, lambda: "")
        self._perform(self._started())
        log.info("term %d begins", self._machine.state.term)

    def _started(self) -> tuple[Action, ...]:
        """The first step, which looks at everything that the entries made."""
        try:
            return self._machine.step(Started(), self._now_ms())
        except MISFITS as error:
            log.debug("the journal does not fit", exc_info=True)
            raise JournalUnreadable(
                f"{self._journal_name} cannot be gone on with ({error!r}): restore the copy of the journal, or what"
                " `machine:` in the configuration was when it was written"
            ) from None

    def _families(self) -> Iterable[Metric]:
        assert self._metrics is not None
        now_ms, state = self._now_ms(), self._machine.state
        beating = {node.name: now_ms for node in state.nodes.values() if node.hearing is Hearing.HEARD}
        heard = {**self._heard_ms, **beating}
        return self._metrics.families(state, heard, now_ms, self._gate.num_refused, self._num_refused)

    def _now_ms(self) -> float:
        """Of one clock for all coordinators of a cluster."""
        return now_ms() + (self._term.offset_ms if self._term else 0.0)

    def _require_term(self) -> None:
        """Before anything is done: LeadershipLost when somebody else may decide by now."""
        if self._term is not None:
            self._term.require()

    def _turn(self) -> None:
        poller = zmq.Poller()
        for socket in (self._gate.socket, self._peers.monitor, self._router):
            poller.register(socket, zmq.POLLIN)
        assert self._beats is not None
        poller.register(self._beats.fileno(), zmq.POLLIN)
        self._ending.register(poller)
        if self._exposition is not None:
            poller.register(self._exposition.fileno(), zmq.POLLIN)
        if self._dashboard is not None:
            poller.register(self._dashboard.fileno(), zmq.POLLIN)
        for fd in self._probes.fds:
            poller.register(fd, zmq.POLLOUT)
        most_ms = 20.0 if self._probes.is_pending else POLL_MS_MAX
        ready = dict(poller.poll(int(-(-self._timers.wait_ms(self._now_ms(), most_ms) // 1))))
        self._ending.look(ready)
        self._require_term()
        if self._gate.socket in ready:
            self._gate.serve()
        if self._exposition is not None and self._exposition.fileno() in ready:
            self._exposition.serve()
        if self._dashboard is not None and self._dashboard.fileno() in ready:
            self._dashboard.serve()
        is_behind = self._read_messages()
        self._read_endings()
        if self._beats.fileno() in ready:
            for change in self._beats.changes():
                self._step(change)
        writable = {fd for fd in self._probes.fds if fd in ready}
        for node, answer in self._probes.finished(writable):
            self._step(AgentProbed(node, answer))
        if not self._must_listen_first(is_behind):
            for name in self._timers.due(self._now_ms()):
                self._step(TimerFired(name))

    def _must_listen_first(self, is_behind: bool) -> bool:
        """Whoever has not read what was said calls nobody silent: timers wait for the queue, though not for ever."""
        now = self._now_ms()
        if not is_behind or now - self._listened_ms >= BEHIND_MS_MAX:
            self._listened_ms = now
            return False
        return True

    def _step(self, event: Event) -> None:
        self._perform(self._machine.step(event, self._now_ms()))

    def _perform(self, actions: tuple[Action, ...]) -> None:
        """The order that everything rests on: first the journal, then what is sent."""
        entries = [encode_entry(a.entry) for a in actions if isinstance(a, WriteJournal)]
        began = time.perf_counter()
        self._journal.append(entries)
        if self._metrics is not None:
            self._metrics.note_append(len(entries), time.perf_counter() - began)
        for action in actions:
            self._carry_out(action)
        if self._dashboard is not None and entries:
            self._dashboard.changed()

    # ------------------------------------------------------------ keys

    def _renew_keys(self) -> bool:
        """The directory changed. True: our own pair did, so we must listen anew."""
        try:
            self._callers.renew()
            is_new = keys.load(self._ring.directory / "coordinator.key") != self._pair
        except keys.KeyProblem as problem:
            log.error("the keys changed and cannot be used: %s; the former ones stay", problem)
            return False
        log.info("the keys changed%s", ": listens anew" if is_new else "")
        for node, key in [*self._keys_of.items()]:
            caller = self._callers.find(key)
            if caller is None:
                self._callers.cut(key, self._peers.fd_of(node))
                if self._beats is not None:
                    self._beats.forget(node)
                self._step(NodeSilent(node, 0.0))
        return is_new

    # ------------------------------------------------------------ what arrives

    def _read_messages(self) -> bool:
        """True when there may be more."""
        for _ in range(MESSAGES_PER_TURN_MAX):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            if len(frames) != 2:
                self._refused(str(frames[-1].get("User-Id")), "frames", f"message of {len(frames)} frames")
                continue
            identity = frames[0].bytes
            key = str(frames[1].get("User-Id"))
            caller = self._callers.find(key)
            if caller is None:
                self._callers.cut(key, int(frames[1].get(zmq.SRCFD)))
                continue
            try:
                message = decode(frames[1].bytes)
            except MessageRefused as error:
                self._refused(key, type(error).__name__, f"{type(error).__name__}: {error}")
                self._answer_refusal(identity, caller.role, str(error))
                continue
            self._dispatch(identity, frames[1], message, caller)
        return True

    def _dispatch(self, identity: bytes, frame: Any, message: Any, caller: Caller) -> None:
        role = caller.role
        if role == "client" and isinstance(message, Request):
            self._serve_request(identity, message)
        elif caller.node and isinstance(message, AgentHello) and message.node != caller.node:
            key = str(frame.get("User-Id"))
            self._refused(key, message.node, f"hello of {message.node} with the key of {caller.node}")
        elif role == "agent" and isinstance(message, AgentHello) and self._is_of_older_life(message):
            # Refused by name. The node's line stays that of its newer life, which would never say hello again.
            self._turn_away(identity, message)
            self._step(AgentMessage(message.node, message))
        elif role == "agent" and isinstance(message, AgentHello) and foreign(message.node, message) is not None:
            self._refused_foreign(str(frame.get("User-Id")), message.node, message)
        elif role == "agent" and isinstance(message, AgentHello):
            # What the monitor knows so far is older than this hello: read it first, lest the end of
            # an earlier connection with the same descriptor is taken for this one's.
            self._read_endings()
            self._peers.hello(message.node, identity, int(frame.get(zmq.SRCFD)))
            self._keys_of[message.node] = str(frame.get("User-Id"))
            self._note_statuses(message.workers)
            self._heard_ms[message.node] = self._now_ms()
            self._step(AgentMessage(message.node, message))
            self._expect_beats(message)
            if not self._peers.is_open(message.node):
                self._step(AgentDisconnected(message.node))
        elif role == "agent" and isinstance(message, AgentSays):
            node = self._peers.node_of(identity)
            if node is None:
                if isinstance(message, AgentHeartbeat):
                    self._turn_away(identity, message)
                name = type(message).__name__
                self._refused(str(frame.get("User-Id")), name, f"{name} of a connection without hello")
                return
            if foreign(node, message) is not None:
                self._refused_foreign(str(frame.get("User-Id")), node, message)
                return
            self._heard_ms[node] = self._now_ms()
            if isinstance(message, AgentHeartbeat):
                self._note_statuses(message.workers)
            elif isinstance(message, WorkerUp):
                self._note_statuses((message.status,))
            self._step(AgentMessage(node, message))
        else:
            name = type(message).__name__
            self._refused(str(frame.get("User-Id")), name, f"{name} from a peer with the key of {role}")
            self._answer_refusal(identity, str(role), f"a {role} may not send {name}")

    def _refused(self, key: str, what: str, text: str) -> None:
        """Once a key and reason: whoever says it again and again does not fill the log."""
        self._num_refused += 1
        self._once.warn((key, what), f"refused of key {key[:8]}...: {text}")

    def _refused_foreign(self, key: str, node: str, message: AgentSays) -> None:
        name = type(message).__name__
        self._refused(key, f"foreign {name}", f"{name} from {node} that speaks of {foreign(node, message)!r}")

    def _is_of_older_life(self, hello: AgentHello) -> bool:
        """Its machine stood still, and meanwhile the node began anew."""
        known = self._machine.state.nodes.get(hello.node)
        return known is not None and hello.incarnation < known.incarnation

    def _turn_away(self, identity: bytes, message: AgentHello | AgentHeartbeat) -> None:
        for order in turned_away(self._machine.state, message):
            log.warning("%s ends: %s", order.worker, order.reason)
            self._send(identity, order)

    def _expect_beats(self, hello: AgentHello) -> None:
        """If the machine took it."""
        node = self._machine.state.nodes.get(hello.node)
        if self._beats is not None and node is not None and node.incarnation == hello.incarnation:
            self._beats.hello(hello)

    def _note_statuses(self, statuses: tuple[WorkerStatus, ...]) -> None:
        for status in statuses:
            self._seen[status.worker] = status
        if len(self._seen) > 65_536:  # what ended long ago
            self._seen = {w.worker: w for w in statuses}

    def _read_endings(self) -> None:
        for node in self._peers.ended():
            log.info("connection of %s ended", node)
            self._step(AgentDisconnected(node))

    def _serve_request(self, identity: bytes, request: Request) -> None:
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        try:
            answer = requests.answer(request, request_id, self._machine.state, self._seen, self._now_ms())
        except Exception as error:  # looking at the state changed nothing: the look failed, not the deciding
            log.exception("cannot answer %s", request.verb)
            answer = Reply(False, f"the coordinator cannot answer {request.verb}: {error!r}; its log says more")
        if answer is None:
            self._send(identity, Reply(True, result={}))
            self._ending.ask("asked to")
        elif isinstance(answer, Reply):
            self._send(identity, answer)
        elif len(self._pending) >= PENDING_ANSWERS_MAX:
            self._send(identity, Reply(False, "too many requests wait: try again"))
        else:
            self._pending[request_id] = identity
            self._step(answer)

    def _answer_refusal(self, identity: bytes, role: str, text: str) -> None:
        if role == "client":
            self._send(identity, Reply(False, f"refused: {text}"))

    # ------------------------------------------------------------ what the machine wants

    def _carry_out(self, action: Action) -> None:
        self._log(action)
        match action:
            case SendAgent(node, message):
                identity = self._peers.identity_of(node)
                if identity is not None:
                    self._send(identity, message)
            case SetTimer(name, at_ms):
                self._timers.set(name, at_ms)
            case CancelTimer(name):
                self._timers.cancel(name)
            case ProbeAgent(node, endpoint):
                self._probes.begin(node, endpoint)
            case Answer(request_id, reply):
                asker = self._pending.pop(request_id, None)
                if asker is not None:
                    self._send(asker, reply)
            case RecordIncident(incident):
                slow = slow_words(incident.transfers)
                if slow:
                    self._slow.warn((incident.task, f"epoch {incident.epoch}"), f"{incident.task}: {slow}")
                if self._webhook is not None:
                    self._webhook.note(incident)
                if self._metrics is not None:
                    self._metrics.note_incident(incident, self._now_ms())
            case WriteJournal(NodeDeclaredLost(node)):
                if self._beats is not None:
                    self._beats.forget(node)
            case WriteJournal() | Refused():
                pass

    def _encode(self, message: Any) -> bytes:
        """A plan goes to every node, and grows with their number: the same one is encoded once."""
        if message is not self._encoded[0]:
            self._encoded = message, encode(message)
        return self._encoded[1]

    def _send(self, identity: bytes, message: Any) -> None:
        self._require_term()
        try:
            self._router.send_multipart((identity, self._encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise  # gone or not reading: its connection's end, or its silence, is seen apart
            log.warning("could not send %s: %s", type(message).__name__, error)

    def _log(self, action: Action) -> None:
        """Every reason once per change: a timer that is set again and again says nothing new."""
        known = ""  # by what it is known again, where that is less than its whole reason
        match action:
            case SetTimer() | CancelTimer() | WriteJournal():
                return
            case SendAgent(node, message):
                worker = getattr(message, "worker", "")
                key = f"send {type(message).__name__} {f'of {worker} ' if worker else ''}to {node}"
            case RecordIncident(incident):
                key = f"incident {incident.id} ({incident.severity.value}) {incident.fault}"
            case Refused(name):
                key = f"refused {name}"
                if name == "task_over":  # a new coordinator hears it of every worker that ever was: once a task
                    known = f"{key}: {action.reason.rpartition(': ')[2]}"
            case ProbeAgent(node):
                key = f"probe {node}"
            case _:
                key = type(action).__name__
        last = self._last_reasons.get(known or key)
        if isinstance(action, SendAgent) or (last is None if known else last != action.reason):
            if len(self._last_reasons) > 10_000:
                self._last_reasons.clear()
            self._last_reasons[known or key] = action.reason
            log.info("%s: %s%s", key, action.reason, " (the like of this task: at DEBUG)" if known else "")
        elif known:
            log.debug("%s: %s", key, action.reason)

    def close(self) -> None:
        if self._exposition is not None:
            self._exposition.close()
        if self._dashboard is not None:
            self._dashboard.close()
        if self._beats is not None:
            self._beats.close()
        if self._webhook is not None:
            self._webhook.close()
        self._probes.close()
        self._peers.close()
        self._gate.close()
        self._context.destroy(linger=200)  # the last reply goes out
        self._journal.close()
