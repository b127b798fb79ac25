"""The agent's Unix socket: workers' control connections, and arena requests on connections of their
own.

What a connection is shows in its first message: WorkerHello makes it a worker's control connection
(one per worker, the first one the machine welcomes), ArenaRequest a single question. Anything else
is refused and closed; nothing that arrives here can end the agent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unicron.agent.events import (
    ArenaRequested,
    GpuRequested,
    WorkerDisconnected,
    WorkerJoined,
    WorkerMessage,
    WorkerSays,
)
from unicron.messages import ArenaRequest, GpuRequest, MessageRefused, WorkerHello, decode, encode
from unicron.runtime.framing import (
    MESSAGE_FRAME,
    FramedSocket,
    FrameRefused,
    listen,
    peer_pid,
    worker_payload,
)

CONNECTIONS_MAX = 1024
FIRST_MESSAGE_S_MAX = 10.0
ACCEPTS_PER_TURN_MAX = 64

log = logging.getLogger("unicron.agent")

ServerEvent = WorkerJoined | WorkerMessage | WorkerDisconnected | ArenaRequested | GpuRequested


@dataclass
class _Connection:
    link: FramedSocket
    peer_pid: int
    since: float
    worker: str = ""  # control connection of this worker, welcomed or not
    request_id: str = ""  # an arena is asked for here
    offered: tuple[int, ...] = ()  # descriptors of GPU memory that came with the request
    sizes: tuple[int, ...] = ()


class WorkerServer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._server = listen(path)
        self._connections: dict[int, _Connection] = {}
        self._control: dict[str, _Connection] = {}  # welcomed
        self._joining: dict[str, _Connection] = {}
        self._requests: dict[str, _Connection] = {}
        self._num_requests = 0

    # ------------------------------------------------------------ what arrives

    def interests(self) -> Iterator[tuple[int, bool]]:
        """(descriptor, does it also wait to write)."""
        yield self._server.fileno(), False
        for fd, connection in self._connections.items():
            yield fd, connection.link.wants_to_write

    def serve(self, fd: int) -> Iterator[ServerEvent]:
        """A descriptor of ``interests`` is ready."""
        if fd == self._server.fileno():
            self._accept()
            return
        connection = self._connections.get(fd)
        if connection is None:
            return
        try:
            connection.link.flush()
            for frame in connection.link.receive():
                event = self._take(connection, frame)
                if event is not None:
                    yield event
        except ConnectionError as error:
            if isinstance(error, FrameRefused):
                log.warning("connection of %s refused: %s", connection.worker or "?", error)
            if self._drop(connection) and connection.worker:
                yield WorkerDisconnected(connection.worker)

    def serve_last(self, worker: str) -> Iterator[ServerEvent]:
        """What a dying worker had said before: its exception explains its death, and must be heard first."""
        connection = self._control.get(worker)
        if connection is not None:
            yield from self.serve(connection.link.fileno())

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN_MAX):
            try:
                accepted, _ = self._server.accept()
            except (BlockingIOError, OSError):
                return
            if len(self._connections) >= CONNECTIONS_MAX:
                log.warning("refused: more than %d connections", CONNECTIONS_MAX)
                accepted.close()
                continue
            connection = _Connection(FramedSocket(accepted), peer_pid(accepted), time.monotonic())
            self._connections[connection.link.fileno()] = connection

    def _take(self, connection: _Connection, frame: bytes) -> ServerEvent | None:
        seen_ns = time.monotonic_ns()
        try:
            message = decode(frame)
        except MessageRefused as error:
            if not connection.worker:
                raise FrameRefused(f"{type(error).__name__}: {error}") from None
            log.warning("refused from %s: %s: %s", connection.worker, type(error).__name__, error)
            return None
        if connection.worker:
            if isinstance(message, WorkerSays) and connection.worker in self._control:
                return WorkerMessage(connection.worker, message, seen_ns)
            log.warning("refused from %s: %s", connection.worker, type(message).__name__)
            return None
        if isinstance(message, WorkerHello):
            connection.worker = message.worker
            self._joining[message.worker] = connection
            return WorkerJoined(message, connection.peer_pid)
        if isinstance(message, ArenaRequest) and not connection.request_id:
            connection.offered, connection.sizes = self._offered(connection, message), message.sizes
            return ArenaRequested(self._asked(connection), message)
        if isinstance(message, GpuRequest) and not connection.request_id:
            return GpuRequested(self._asked(connection), message)
        raise FrameRefused(f"{type(message).__name__} cannot come first")

    def _asked(self, connection: _Connection) -> str:
        self._num_requests += 1
        connection.request_id = f"a{self._num_requests}"
        self._requests[connection.request_id] = connection
        return connection.request_id

    def _offered(self, connection: _Connection, request: ArenaRequest) -> tuple[int, ...]:
        fds = [connection.link.take_fd() for _ in request.sizes]
        held = tuple(fd for fd in fds if fd is not None)
        if len(held) < len(request.sizes):
            for fd in held:
                os.close(fd)
            raise FrameRefused(f"{len(request.sizes)} GPU slabs are named, {len(held)} descriptors came")
        return held

    def take_offered(self, request_id: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(descriptors that came with an arena's request, their sizes); the caller owns them."""
        connection = self._requests.get(request_id)
        if connection is None:
            return (), ()
        fds, connection.offered = connection.offered, ()
        return fds, connection.sizes

    def drop_silent(self) -> None:
        """Connections that say nothing are not kept."""
        oldest = time.monotonic() - FIRST_MESSAGE_S_MAX
        for connection in [*self._connections.values()]:
            if not connection.worker and not connection.request_id and connection.since < oldest:
                self._drop(connection)

    # ------------------------------------------------------------ what goes out

    def welcome(self, worker: str, message: Any, pulse_fd: int) -> None:
        connection = self._joining.pop(worker, None)
        if connection is None:
            return
        self._control[worker] = connection
        self._send(connection, worker_payload(encode(message)), (pulse_fd,))

    def refuse_joining(self, worker: str) -> None:
        """The machine did not welcome it."""
        connection = self._joining.pop(worker, None)
        if connection is not None:
            connection.worker = ""
            self._drop(connection)

    def send(
        self,
        worker: str,
        message: bytes,
        *,
        kind: int = MESSAGE_FRAME,
        epoch: int = 0,
        touched: tuple[int, ...] = (),
    ) -> None:
        connection = self._control.get(worker)
        if connection is not None:
            self._send(connection, worker_payload(message, kind, epoch, touched))

    def answer(self, request_id: str, message: Any, fds: tuple[int, ...]) -> None:
        connection = self._requests.pop(request_id, None)
        if connection is not None:
            self._send(connection, worker_payload(encode(message)), fds)

    def release(self, worker: str) -> None:
        """The worker is gone: its connection goes without a word."""
        connection = self._control.get(worker) or self._joining.get(worker)
        if connection is not None:
            self._drop(connection)

    def _send(self, connection: _Connection, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        try:
            connection.link.send(payload, fds)
        except ConnectionError as error:  # its end is read, and told, in the next turn
            log.info("could not send to %s: %s", connection.worker or "a worker", error)

    def _drop(self, connection: _Connection) -> bool:
        """False: it was dropped before."""
        if self._connections.pop(connection.link.fileno(), None) is None:
            return False
        for table in (self._control, self._joining):
            if table.get(connection.worker) is connection:
                del table[connection.worker]
        self._requests.pop(connection.request_id, None)
        for fd in connection.offered:
            os.close(fd)
        connection.offered = ()
        connection.link.close()
        return True

    def close(self) -> None:
        for connection in [*self._connections.values()]:
            self._drop(connection)
        self._server.close()
        self.path.unlink(missing_ok=True)
