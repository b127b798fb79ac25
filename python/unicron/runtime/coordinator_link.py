"""An agent's line to the coordinator: DEALER with CURVE, connected again for ever, never by
queueing into the void.

There may be several addresses: of coordinators that wait for each other, of which only the one that
decides listens; and several keys that it may have, while keys are rotated. Each pair of them is called on a socket of
its own; the first whose handshake succeeds is the line, and the others are closed. (One socket with all of them would
deal the messages out between two that listen.)

A connection that ended takes its socket with it: what was queued for it is dropped (the machine
says what counts in its next hello), so a coordinator that comes back hears the hello first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from unicron.agent.interfaces import is_loopback
from unicron.messages import MESSAGE_BYTES_MAX
from unicron.runtime.keys import KeyPair
from unicron.runtime.zap import call_curve, monitor_event

HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2_000
RECONNECT_MS = 20
RECONNECT_MS_MAX = 500
QUEUED_MESSAGES_MAX = 10_000
MESSAGES_PER_TURN_MAX = 256


@dataclass(frozen=True)
class _Line:
    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class CoordinatorLink:
    """Poll ``sockets`` for reading; they change. ``changes`` tells True (connected) and False (connection ended)
    in order.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoints: Sequence[str],
        servers: Sequence[str],
        own: KeyPair,
        source: str = "",
    ) -> None:
        """servers: public keys that the coordinator may have. source: the own address that the line comes from; '': the
        one that the route gives it."""
        self._context = context
        self._endpoints = tuple(endpoints)
        self._source = source
        self._servers, self._own = tuple(servers), own
        self.is_connected = False
        self._lines = self._call()

    def _call(self) -> list[_Line]:
        return [self._open(endpoint, server) for endpoint in self._endpoints for server in self._servers]

    def renew(self, servers: Sequence[str], own: KeyPair) -> None:
        """Other keys: for the next connection; the present one stays."""
        self._servers, self._own = tuple(servers), own
        if not self.is_connected:
            self.leave()

    def _open(self, endpoint: str, server: str) -> _Line:
        socket = self._context.socket(zmq.DEALER)
        call_curve(socket, server, self._own.public, self._own.secret, message_bytes_max=MESSAGE_BYTES_MAX + 1)
        socket.reconnect_ivl = RECONNECT_MS
        socket.reconnect_ivl_max = RECONNECT_MS_MAX
        socket.heartbeat_ivl = HEARTBEAT_MS
        socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        socket.sndhwm = socket.rcvhwm = QUEUED_MESSAGES_MAX
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        socket.connect(from_source(endpoint, self._source))
        return _Line(endpoint, socket, monitor)

    @property
    def endpoint(self) -> str:
        """Where the line goes, while it is connected."""
        return self._lines[0].endpoint

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], ...]:
        return tuple(socket for line in self._lines for socket in (line.socket, line.monitor))

    def changes(self) -> list[bool]:
        """At most one connection's beginning and end."""
        found: list[bool] = []
        for line in self._lines:
            for event in _events(line):
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.is_connected:
                    self.is_connected = True
                    self._keep(line)
                    found.append(True)
                elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
                    self.leave()
                    return [*found, False]
            if self.is_connected:
                break
        return found

    def _keep(self, line: _Line) -> None:
        for other in self._lines:
            if other is not line:
                other.close()
        self._lines = [line]

    def receive(self) -> list[bytes]:
        if not self.is_connected:
            return []
        found: list[bytes] = []
        while len(found) < MESSAGES_PER_TURN_MAX:
            try:
                frames = self._lines[0].socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                found.append(frames[0])
        return found

    def send(self, message: bytes) -> None:
        """Dropped when there is no connection, or nobody reads: the next hello says it again."""
        if self.is_connected:
            try:
                self._lines[0].socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                self.is_connected = False

    def leave(self) -> None:
        """End this connection, and call all of them again."""
        self.is_connected = False
        self.close()
        self._lines = self._call()

    def close(self) -> None:
        for line in self._lines:
            line.close()


def _events(line: _Line) -> list[int]:
    """What the monitor has to say now."""
    found: list[int] = []
    while not line.monitor.closed:
        try:
            found.append(monitor_event(line.monitor.recv_multipart(zmq.NOBLOCK))[0])
        except zmq.Again:
            break
    return found


def from_source(endpoint: str, source: str) -> str:
    """'tcp://a:1' -> 'tcp://SOURCE:0;a:1'. From loopback, which is warned of, nothing could be reached: there the route
    decides."""
    if not source or is_loopback(source):
        return endpoint
    return f"tcp://{source}:0;{endpoint.removeprefix('tcp://')}"
