"""Who has no key, an old one, says again what was said, says too much, or another version: refused, logged once, and
nobody else waits for it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from clusters import eventually, happened, plain_job, running
from unicron.messages import MESSAGE_BYTES_MAX, PROTOCOL_VERSION, Request, encode
from unicron.runtime import keys
from unicron.runtime.client import CoordinatorClient
from unicron.runtime.local_cluster import LocalCluster
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import call_curve
from wire_fuzz import Sockets, fuzz

pytestmark = pytest.mark.timeout(120)
TRIES = 20


class Recorder:
    """Between a client and the coordinator: what the client sent can be sent again."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self.sent = target, bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        near, _ = self._server.accept()
        with near, socket.create_connection(self._target) as far:
            back = threading.Thread(target=self._copy, args=(far, near, bytearray()))
            back.start()
            self._copy(near, far, self.sent)
            back.join(10)

    def _copy(self, source: socket.socket, target: socket.socket, into: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                into += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._thread.join(10)
        self._server.close()


@contextlib.contextmanager
def line(cluster: LocalCluster, pair: keys.KeyPair) -> Iterator[zmq.Socket[bytes]]:
    dealer = process_context().socket(zmq.DEALER)
    server = keys.load(cluster.state / "keys" / "coordinator.key").public
    call_curve(dealer, server, pair.public, pair.secret, message_bytes_max=MESSAGE_BYTES_MAX)
    dealer.connect(f"tcp://{cluster.address}")
    try:
        yield dealer
    finally:
        dealer.close(0)


def test_strangers_are_refused_and_slow_nobody(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=1_000_000))
    running(cluster, task)
    pids = {worker.pid for worker in cluster.workers(task)}
    log = cluster.log_dir / "coordinator.log"
    host, _, port = cluster.address.rpartition(":")
    client, rng = keys.load(cluster.state / "keys" / "client.key"), random.Random(1)

    # without a key of ours
    stranger = keys.generate()
    for _ in range(TRIES):
        # refused before it speaks, it has nothing left to send on
        with line(cluster, stranger) as dealer, contextlib.suppress(zmq.Again):
            dealer.send(encode(Request("shutdown", {})), zmq.NOBLOCK)
            time.sleep(0.02)
    eventually(lambda: f"key {stranger.public[:8]}" in log.read_text())
    # without any protocol of ours
    for _ in range(TRIES):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + rng.randbytes(500))
    # with a key, and too much or another version: an answer, or the end of its own connection
    with line(cluster, client) as dealer:
        for _ in range(TRIES):
            dealer.send(bytes((PROTOCOL_VERSION + 9,)) + encode(Request("ping", {}))[1:])
        assert dealer.poll(5000) and b"upgrade one version at a time" in dealer.recv()
        dealer.send(bytes(MESSAGE_BYTES_MAX + 2))
    # what was said before, byte for byte
    recorder = Recorder((host, int(port)))
    server = keys.load(cluster.state / "keys" / "coordinator.key").public
    with CoordinatorClient(recorder.address, server, client) as through:
        through.ask("ping")
    recorder.close()
    for _ in range(TRIES):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as again:
            again.sendall(recorder.sent)
            again.settimeout(0.05)
            again.recv(4096)

    eventually(lambda: cluster.ask("ping")["term"] == 1)
    text = log.read_text()
    assert text.count(f"key {stranger.public[:8]}") == 1 and text.count("UnknownVersion") == 1, text[-2000:]
    assert "Traceback" not in text and happened(cluster) == []
    assert {worker.pid for worker in cluster.workers(task)} == pids


@pytest.mark.timeout(120)
def test_bytes_that_nobody_should_send(tmp_path: Path) -> None:
    """A moment of `make fuzz`."""
    sockets = Sockets(tmp_path)
    try:
        kept = fuzz(7, time.monotonic(), sockets)
    finally:
        left = sockets.close()
    assert kept.findings == [] and left == []
