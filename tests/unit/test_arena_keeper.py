"""GPU memory reaches its keeper as descriptors beside an arena's request, and an adopter with its grant."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from unicron.agent.events import ArenaRequested
from unicron.messages import ArenaGrant, ArenaRequest, decode, encode
from unicron.runtime import framing
from unicron.runtime.arena_keeper import ArenaKeeper
from unicron.runtime.worker_server import WorkerServer


def memory(text: bytes) -> int:
    fd = os.memfd_create("slab")
    os.write(fd, text)
    return fd


def serve(server: WorkerServer) -> list[ArenaRequested]:
    found = []
    for fd, _ in [*server.interests()]:
        found += [event for event in server.serve(fd) if isinstance(event, ArenaRequested)]
    return found


@pytest.fixture
def server(tmp_path: Path) -> WorkerServer:
    return WorkerServer(tmp_path / "agent.sock")


def ask(server: WorkerServer, sizes: tuple[int, ...], fds: list[int]) -> socket.socket:
    line = framing.connect(server.path, 1000)
    serve(server)  # accepted
    framing.send_blocking(line, encode(ArenaRequest("t", "w", 0, 4096, "digest", False, sizes)), fds)
    return line


@pytest.mark.parametrize("num_slabs", [0, 1, 200])
def test_slabs_come_with_the_request_and_go_with_the_grant(server: WorkerServer, num_slabs: int) -> None:
    texts = [b"slab %d" % number for number in range(num_slabs)]
    fds = [memory(text) for text in texts]
    sizes = tuple(range(1, num_slabs + 1))
    line = ask(server, sizes, fds)
    (event,) = serve(server)
    for fd in fds:
        os.close(fd)
    keeper = ArenaKeeper()
    offered, told = server.take_offered(event.request_id)
    assert told == sizes and server.take_offered(event.request_id) == ((), sizes)
    kept = keeper.create("a", 4096, offered, told)
    server.answer(event.request_id, ArenaGrant(4096, True, "", kept.sizes), (kept.fd, *kept.gpu_fds))
    payload, got = framing.receive_blocking(line, 2000)
    grant = decode(framing.worker_message(payload))
    assert isinstance(grant, ArenaGrant) and grant.sizes == sizes and len(got) == num_slabs + 1
    for fd, text in zip(got[1:], texts, strict=True):
        assert os.pread(fd, 100, 0) == text
    for fd in got:
        os.close(fd)
    keeper.close()
    for fd in offered:
        with pytest.raises(OSError):
            os.fstat(fd)
    line.close()
    server.close()


def test_slabs_without_descriptors_are_refused(server: WorkerServer) -> None:
    fd = memory(b"one")
    line = ask(server, (1, 2), [fd])
    assert serve(server) == []
    line.settimeout(2)
    assert line.recv(1) == b""  # the connection is closed
    line.close()
    os.close(fd)
    server.close()


def test_slabs_that_nobody_takes_are_closed_with_their_connection(server: WorkerServer) -> None:
    reading, writing = os.pipe()
    line = ask(server, (1,), [writing])
    os.close(writing)
    assert len(serve(server)) == 1
    line.close()
    serve(server)
    assert os.read(reading, 1) == b""  # nobody holds the other end any more
    os.close(reading)
    server.close()
