"""Frames on Unix sockets: bounded, in order, with descriptors; sockets private, stale ones
replaced.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

import pytest

from unicron.runtime import framing
from unicron.runtime.framing import FramedSocket, FrameRefused, PeerClosed

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pair():  # type: ignore[no-untyped-def]
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    framed = FramedSocket(left)
    yield framed, right
    framed.close()
    right.close()


def test_frames_in_pieces(pair) -> None:  # type: ignore[no-untyped-def]
    framed, peer = pair
    data = framing.pack(b"one") + framing.pack(b"") + framing.pack(b"x" * 100_000)
    got = []
    for start in range(0, len(data), 777):
        peer.sendall(data[start : start + 777])
        got += list(framed.receive())
    assert got == [b"one", b"", b"x" * 100_000]
    peer.sendall(framing.pack(b"last")[:5])
    peer.close()
    with pytest.raises(PeerClosed):
        list(framed.receive())


def test_frames_before_the_end_are_delivered(pair) -> None:  # type: ignore[no-untyped-def]
    framed, peer = pair
    peer.sendall(framing.pack(b"last words"))
    peer.close()
    got = []
    with pytest.raises(PeerClosed):
        for frame in framed.receive():
            got.append(frame)
    assert got == [b"last words"]


def test_too_long_is_refused(pair) -> None:  # type: ignore[no-untyped-def]
    framed, peer = pair
    peer.sendall(struct.pack("<I", 0xFFFFFFFF) + b"garbage")
    with pytest.raises(FrameRefused, match="4294967295"):
        list(framed.receive())
    with pytest.raises(FrameRefused):
        framed.send(b"x" * (framing.FRAME_BYTES_MAX + 1))


def test_descriptors_travel_with_their_frame(pair) -> None:  # type: ignore[no-untyped-def]
    framed, peer = pair
    fd = os.memfd_create("test")
    os.write(fd, b"content")
    framed.send(b"before")
    framed.send(b"here", (fd,))
    assert framing.receive_blocking(peer, 1000) == (b"before", [])
    payload, fds = framing.receive_blocking(peer, 1000)
    assert payload == b"here" and os.pread(fds[0], 7, 0) == b"content"
    socket.send_fds(peer, [framing.pack(b"back")], [fds[0]])
    assert list(framed.receive()) == [b"back"]
    taken = framed.take_fd()
    assert taken is not None and os.pread(taken, 7, 0) == b"content"
    assert framed.take_fd() is None
    for each in (fd, taken, *fds):
        os.close(each)


# type: ignore[no-untyped-def]
def test_a_peer_that_does_not_read_is_bounded(pair, monkeypatch) -> None:
    framed, _ = pair
    monkeypatch.setattr(framing, "QUEUED_BYTES_MAX", 1 << 20)
    with pytest.raises(FrameRefused, match="has not read"):
        for _ in range(100):
            framed.send(b"x" * 100_000)
    assert framed.wants_to_write


def test_too_many_descriptors_are_refused(pair) -> None:  # type: ignore[no-untyped-def]
    framed, peer = pair
    fd = os.memfd_create("test")
    with pytest.raises(FrameRefused):
        for _ in range(100):
            socket.send_fds(peer, [framing.pack(b"")], [fd] * 4)
            list(framed.receive())
    os.close(fd)


def test_socket_file_is_private_and_stale_ones_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = framing.listen(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(framing.SocketInUse, match="living process"):
        framing.listen(path)
    server.close()  # the file stays: stale
    framing.listen(path).close()
    path.unlink()
    path.write_text("a file")
    with pytest.raises(OSError, match="not a socket"):
        framing.listen(path)


def test_connect_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="nobody listens"):
        framing.connect(tmp_path / "none", 50)


def test_worker_payload_layout() -> None:
    payload = framing.worker_payload(b"msg", framing.PLAN_FRAME, 7, (3, 9))
    assert payload == struct.pack("<BQHII", 1, 7, 2, 3, 9) + b"msg"
