"""Frames on Unix sockets: ``u32 length | payload``, little endian, bounded both ways, with
descriptors beside them.

``FramedSocket`` never blocks: it keeps what arrived and what has not gone out yet, and its owner
polls. Descriptors travel as SCM_RIGHTS with the first byte of the frame they belong to; a stream
keeps their order, so ``take_fds`` hands them out in the order of the frames that announced them.
``call`` is the blocking opposite for small clients.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from unicron import messages
from unicron.types import Rank

FRAME_BYTES_MAX = messages.MESSAGE_BYTES_MAX + 4096
QUEUED_BYTES_MAX = 32 << 20  # a peer that reads nothing while this much waits for it is given up
FDS_PER_FRAME_MAX = 250  # the kernel takes 253; an arena of the largest GPU has fewer slabs (csrc/state/gpu_arena.h)
FDS_HELD_MAX = 256
READ_BYTES = 1 << 16
BACKLOG = 256
SOCKET_PATH_BYTES_MAX = 107  # sun_path, without the byte that ends it

PLAN_FRAME = 1  # agent -> worker: an epoch's plan, with the touched ranks for the native monitor
MESSAGE_FRAME = 2  # agent -> worker: any other message

_length = struct.Struct("<I")
_worker_prefix = struct.Struct("<BQH")


class PeerClosed(ConnectionError):
    """The other end is gone."""


class FrameRefused(ConnectionError):
    """Not a frame: too long, or more descriptors than any message carries. The connection is given
    up.
    """


class SocketInUse(OSError):
    """A living process listens on that path."""


def pack(payload: bytes) -> bytes:
    if len(payload) > FRAME_BYTES_MAX:
        raise FrameRefused(f"frame of {len(payload)} bytes, limit {FRAME_BYTES_MAX}")
    return _length.pack(len(payload)) + payload


def worker_payload(message: bytes, kind: int = MESSAGE_FRAME, epoch: int = 0, touched: tuple[Rank, ...] = ()) -> bytes:
    """What the native monitor of a worker reads in front of a message
    (csrc/monitor/worker_monitor.h).
    """
    head = _worker_prefix.pack(kind, epoch, len(touched))
    return head + struct.pack(f"<{len(touched)}I", *touched) + message


def worker_message(payload: bytes) -> bytes:
    """The message in a worker_payload."""
    _, _, num_touched = _worker_prefix.unpack_from(payload)
    return payload[_worker_prefix.size + 4 * num_touched :]


class FramedSocket:
    """One non-blocking connection. Owner: poll ``fileno``; call ``receive`` when readable,
    ``flush`` when writable.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._incoming = bytearray()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._queued_bytes = 0
        self._fds: deque[int] = deque()
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def wants_to_write(self) -> bool:
        return bool(self._outgoing)

    def send(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        """Queue and try to write. ``fds`` are duplicated here: the caller keeps its own."""
        if self.closed:
            raise PeerClosed("the connection was closed")
        if self._queued_bytes > QUEUED_BYTES_MAX:
            raise FrameRefused(f"the peer has not read {self._queued_bytes} bytes")
        data = pack(payload)
        held = tuple(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in fds)
        self._outgoing.append((memoryview(data), held))
        self._queued_bytes += len(data)
        self.flush()

    def flush(self) -> None:
        while self._outgoing:
            data, fds = self._outgoing[0]
            try:
                if fds:
                    num_sent = socket.send_fds(self._socket, [data], list(fds), socket.MSG_NOSIGNAL)
                else:
                    num_sent = self._socket.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerClosed(os.strerror(error.errno or 0)) from None
            for fd in fds:
                os.close(fd)
            self._queued_bytes -= num_sent
            if num_sent == len(data):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = (data[num_sent:], ())

    def receive(self) -> Iterator[bytes]:
        """Frames that are complete. Raises PeerClosed after the last one when the other end is
        gone.
        """
        gone: ConnectionError | None = None
        while gone is None:
            try:
                data, fds, flags, _ = socket.recv_fds(
                    self._socket, READ_BYTES, FDS_PER_FRAME_MAX, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                break
            except OSError as error:
                gone = PeerClosed(os.strerror(error.errno or 0))
                break
            self._fds.extend(fds)
            if len(self._fds) > FDS_HELD_MAX or flags & socket.MSG_CTRUNC:
                gone = FrameRefused("more descriptors than any message carries")
            elif not data:
                gone = PeerClosed("the other end closed the connection")
            self._incoming += data
            yield from self._take_frames()
        if gone is not None:
            raise gone

    def _take_frames(self) -> Iterator[bytes]:
        while len(self._incoming) >= _length.size:
            (num_bytes,) = _length.unpack_from(self._incoming)
            if num_bytes > FRAME_BYTES_MAX:
                raise FrameRefused(f"frame of {num_bytes} bytes, limit {FRAME_BYTES_MAX}")
            end = _length.size + num_bytes
            if len(self._incoming) < end:
                return
            frame = bytes(self._incoming[_length.size : end])
            del self._incoming[:end]
            yield frame

    def take_fd(self) -> int | None:
        """Next descriptor that arrived; the caller owns it."""
        return self._fds.popleft() if self._fds else None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for fd in self._fds:
            os.close(fd)
        for _, fds in self._outgoing:
            for fd in fds:
                os.close(fd)
        self._fds.clear()
        self._outgoing.clear()
        self._socket.close()


# ---------------------------------------------------------------- listening


def peer_pid(connection: socket.socket) -> int:
    """The process at the other end of a Unix socket when it was connected, as the kernel says."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("iII", credentials)[0])


def path_problem(path: Path) -> str:
    """The kernel's bound on the name of a Unix socket, in words; '' where it is kept."""
    size = len(os.fsencode(path))
    if size <= SOCKET_PATH_BYTES_MAX:
        return ""
    return f"{size} bytes with /{path.name}, {SOCKET_PATH_BYTES_MAX} at most"


def listen(path: Path) -> socket.socket:
    """A Unix socket 0600. A stale file (nobody listens) is replaced; a living owner is a clear
    error.
    """
    if problem := path_problem(path):
        raise OSError(errno.ENAMETOOLONG, f"cannot listen on {path}: its path is too long ({problem})")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    remove_stale(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    mask = os.umask(0o177)  # the file is private from the first moment on
    try:
        server.bind(str(path))
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise SocketInUse(f"{path} is in use by a living process") from None
        raise OSError(error.errno, f"cannot listen on {path}: {error.strerror or error}") from None
    finally:
        os.umask(mask)
    server.setblocking(False)
    return server


def remove_stale(path: Path) -> None:
    """A socket that nobody listens on; SocketInUse where somebody does."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(errno.EEXIST, f"{path} exists and is not a socket: move it away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # a full backlog or a timeout: somebody owns it
    raise SocketInUse(f"{path} is in use by a living process: stop it")


def connect(path: str | Path, timeout_ms: int) -> socket.socket:
    """Connect, waiting for the listener to appear; TimeoutError names the path."""
    deadline = time.monotonic() + timeout_ms / 1000
    while True:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            client.connect(str(path))
            return client
        except (ConnectionRefusedError, FileNotFoundError):
            client.close()
        except OSError:
            client.close()
            raise
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody listens on {path} after {timeout_ms} ms")
        time.sleep(0.005)


# ---------------------------------------------------------------- blocking, for small clients


def send_blocking(connection: socket.socket, payload: bytes, fds: Sequence[int] = ()) -> None:
    data = pack(payload)
    num_sent = socket.send_fds(connection, [data], list(fds)) if fds else 0
    connection.sendall(data[num_sent:])


def receive_blocking(connection: socket.socket, timeout_ms: int) -> tuple[bytes, list[int]]:
    """One frame and the descriptors that came with it."""
    connection.settimeout(timeout_ms / 1000)
    fds: list[int] = []
    data = b""
    needed = _length.size
    while len(data) < needed:
        got, more, _, _ = socket.recv_fds(connection, needed - len(data), FDS_PER_FRAME_MAX, socket.MSG_CMSG_CLOEXEC)
        fds += more
        if not got:
            raise PeerClosed("the other end closed the connection")
        data += got
        if len(data) == _length.size == needed:
            needed += _length.unpack(data)[0]
            if needed > FRAME_BYTES_MAX + _length.size:
                raise FrameRefused(f"frame of {needed} bytes, limit {FRAME_BYTES_MAX}")
    return data[_length.size :], fds
