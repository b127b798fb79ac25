"""The rendezvous store of an epoch, hosted by an agent: ``store_table`` behind a ZeroMQ ROUTER with
CURVE.

Why not torch's TCPStore: it would need torch in the agent, and is an open port without a key. The
server has no thread of its own: it lives in the agent's poll loop, so that a publish and the store
agree on what the newest epoch is. ``StoreThread`` runs one alone, for tests and for use without an
agent.
"""

from __future__ import annotations

import errno
import threading
import time

import zmq

from unicron.runtime.endpoints import numeric, port_problem
from unicron.runtime.store_table import Replies, StoreTable
from unicron.runtime.store_wire import (
    MESSAGE_BYTES_MAX,
    StoreMalformed,
    decode_request,
    encode,
)
from unicron.runtime.zap import Gatekeeper, serve_curve

ZAP_DOMAIN = "store"
REQUESTS_PER_TURN_MAX = 512
QUEUED_MESSAGES_MAX = 100_000
NOT_OURS = "this machine has no such name or address; `ip address` shows those it has, 0.0.0.0 means all of them"


def now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


class PortInUse(OSError):
    """Somebody listens there already; the text names the address."""


def bind(socket: zmq.Socket[bytes], host: str, port: int) -> str:
    """Bind and return the endpoint; port 0: a free one."""
    if problem := port_problem(port, listens=True):
        raise OSError(f"cannot listen on {host}:{port}: {problem}")
    try:
        socket.bind(f"tcp://{numeric(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use: stop what listens there or choose another port"
            ) from None
        if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
            raise OSError(f"cannot listen on {host}:{port}: {NOT_OURS}") from None
        raise OSError(f"cannot listen on {host}:{port}: {error}") from None
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}; {NOT_OURS}") from None
    return str(socket.getsockopt(zmq.LAST_ENDPOINT), "ascii").rstrip("\0")  # type: ignore[arg-type]


class StoreServer:
    """Poll ``socket`` for reading; call ``serve`` when readable and ``expire`` when
    ``next_deadline_ms`` is due.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        secret: str,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.table = StoreTable()
        self.socket = context.socket(zmq.ROUTER)
        serve_curve(self.socket, secret, ZAP_DOMAIN, message_bytes_max=MESSAGE_BYTES_MAX)
        self.socket.router_mandatory = True  # a reply to a peer that left is an error, not silence
        self.socket.sndhwm = self.socket.rcvhwm = QUEUED_MESSAGES_MAX
        self.num_refused = 0
        try:
            self.endpoint = bind(self.socket, host, port)
        except OSError:
            self.socket.close(0)
            raise

    def serve(self) -> None:
        for _ in range(REQUESTS_PER_TURN_MAX):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 2:
                self.num_refused += 1
                continue
            try:
                request = decode_request(frames[1])
            except StoreMalformed:
                self.num_refused += 1
                continue
            self._send(self.table.request(frames[0], request, now_ms()))

    def expire(self) -> None:
        self._send(self.table.expire(now_ms()))

    def announce(self, task: str, epoch: int) -> None:
        self._send(self.table.announce(task, epoch))

    def forget_task(self, task: str) -> None:
        self._send(self.table.forget_task(task))

    def next_deadline_ms(self) -> int | None:
        return self.table.next_deadline_ms()

    def _send(self, replies: Replies) -> None:
        for peer, reply in replies:
            try:
                self.socket.send_multipart((peer, encode(reply)), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                    # the peer is gone, or does not read 100000 replies: its own client's bound ends
                    # its wait
                    raise

    def close(self) -> None:
        self._send(self.table.close())
        self.socket.close(50)


class StoreThread:
    """A store on a thread of its own."""

    def __init__(self, admitted: dict[str, str], secret: str, host: str = "127.0.0.1") -> None:
        """admitted: public key -> name."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._gate = Gatekeeper(self._context)
        for public, name in admitted.items():
            self._gate.admit(ZAP_DOMAIN, public, name)
        self.server = StoreServer(self._context, secret, host)
        self.endpoint = self.server.endpoint
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unicron-store", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self.server.socket, zmq.POLLIN)
        while not self._stopping.is_set():
            due = self.server.next_deadline_ms()
            timeout = 50 if due is None else max(0, min(50, due - now_ms()))
            ready = dict(poller.poll(timeout))
            if self._gate.socket in ready:
                self._gate.serve()
            if self.server.socket in ready:
                self.server.serve()
            self.server.expire()
        self.server.close()
        self._gate.close()

    def close(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(timeout=5)
            self._context.destroy(linger=0)
