"""An agent's line to the coordinator: DEALER with CURVE, connected again for ever, never by
queueing into the void.

A connection that ended takes its socket with it: what was queued for it is dropped (the machine
says what counts in its next hello), so a coordinator that comes back hears the hello first.
"""

from __future__ import annotations

import zmq

from unicron.messages import MESSAGE_BYTES_MAX
from unicron.runtime.zap import call_curve, monitor_event

HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2_000
RECONNECT_MS = 20
RECONNECT_MS_MAX = 500
QUEUED_MESSAGES_MAX = 10_000
MESSAGES_PER_TURN_MAX = 256


class CoordinatorLink:
    """Poll ``sockets`` for reading. ``changes`` tells True (connected) and False (connection ended)
    in order.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: tuple[str, str, str]) -> None:
        """curve: the coordinator's public key, our public one, our secret one."""
        self._context = context
        self._endpoint = endpoint
        self._curve = curve
        self.is_connected = False
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        call_curve(self.socket, *self._curve, message_bytes_max=MESSAGE_BYTES_MAX + 1)
        self.socket.reconnect_ivl = RECONNECT_MS
        self.socket.reconnect_ivl_max = RECONNECT_MS_MAX
        self.socket.heartbeat_ivl = HEARTBEAT_MS
        self.socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self.socket.sndhwm = self.socket.rcvhwm = QUEUED_MESSAGES_MAX
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self.monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(self._endpoint)

    @property
    def sockets(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        return self.socket, self.monitor

    def changes(self) -> list[bool]:
        found: list[bool] = []
        while True:
            try:
                event = monitor_event(self.monitor.recv_multipart(zmq.NOBLOCK))[0]
            except zmq.Again:
                return found
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED and not self.is_connected:
                self.is_connected = True
                found.append(True)
            elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
                self.is_connected = False
                found.append(False)
                self._shut()
                self._open()
                return found

    def receive(self) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < MESSAGES_PER_TURN_MAX:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(frames) == 1:
                found.append(frames[0])
        return found

    def send(self, message: bytes) -> None:
        """Dropped when there is no connection, or nobody reads: the next hello says it again."""
        if self.is_connected:
            try:
                self.socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                self.is_connected = False

    def _shut(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)

    def close(self) -> None:
        self._shut()
