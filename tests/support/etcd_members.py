"""A real etcd of three members, and wires to it that can be cut."""

from __future__ import annotations

import contextlib
import select
import socket
import socketserver
import subprocess
import threading
import time
from pathlib import Path
from typing import Self

import msgspec

from servers import Server, program
from unicron.runtime.coordinator_settings import EtcdSettings
from unicron.runtime.etcd import Etcd, EtcdProblem

MEMBERS = 3
UP_S_MAX = 30.0


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


class EtcdMembers:
    """``with EtcdMembers(folder) as etcd``: every member is up, and they agree."""

    def __init__(self, folder: Path, members: int = MEMBERS, *more: str) -> None:
        self._binary = program("etcd")
        self._folder, self._more = folder, more
        ports = free_ports(2 * members)
        self.endpoints = tuple(f"127.0.0.1:{port}" for port in ports[:members])
        self._peers = [f"http://127.0.0.1:{port}" for port in ports[members:]]
        self._servers: dict[int, Server] = {}
        for member in range(members):
            self.start(member)
        try:
            self.wait_until_up()
        except BaseException:
            self.close()
            raise

    def start(self, member: int) -> None:
        """First time, or again after it was killed: with its data."""
        peers = ",".join(f"m{index}={url}" for index, url in enumerate(self._peers))
        client, peer = f"http://{self.endpoints[member]}", self._peers[member]
        command = [
            self._binary, "--name", f"m{member}", "--data-dir", str(self._folder / f"m{member}"),
            "--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer,
            "--initial-advertise-peer-urls", peer, "--initial-cluster", peers, *self._more,
        ]  # fmt: skip
        self._servers[member] = Server(command, self._folder / f"m{member}.log")

    def kill(self, member: int) -> None:
        self._servers[member].close()

    def settings(self, **fields: object) -> EtcdSettings:
        usual = {"endpoints": self.endpoints, "lease_s": 5, "request_s": 1.0}
        return msgspec.convert({**usual, **fields}, EtcdSettings)

    def wait_until_up(self) -> None:
        """Every member that lives answers a read that needs the others."""
        deadline = time.monotonic() + UP_S_MAX
        for member, server in self._servers.items():
            if server.process.poll() is None:
                client = Etcd(self.settings(endpoints=(self.endpoints[member],)))
                try:
                    while not answers(client):
                        assert time.monotonic() < deadline and server.process.poll() is None, server.log.read_text()[
                            -900:
                        ]
                        time.sleep(0.05)
                finally:
                    client.close()

    def control(self, *words: str) -> str:
        """etcdctl, for what people do by hand."""
        ended = subprocess.run(
            [program("etcdctl"), f"--endpoints={','.join(self.endpoints)}", *words],
            env={"ETCDCTL_API": "3"}, capture_output=True, text=True, timeout=20,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers(client: Etcd) -> bool:
    try:
        client.get("up")
    except EtcdProblem:
        return False
    return True


class Wire:
    """A way to one address that can be cut: then connections stay, and nothing passes any more."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._is_cut = threading.Event()
        self._is_over = threading.Event()
        wire = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                wire.carry(self.request)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def carry(self, near: socket.socket) -> None:
        try:
            far = socket.create_connection(self._target, 5)
        except OSError:
            return  # as refused there
        with far:
            was_cut = False
            while not self._is_over.is_set():
                if self._is_cut.is_set():
                    was_cut = True
                    self._is_over.wait(0.02)
                    continue
                if was_cut:
                    return  # what was in flight is lost
                for source in select.select([near, far], [], [], 0.02)[0]:
                    if self._is_cut.is_set():
                        break
                    try:
                        data = source.recv(1 << 16)
                        if not data:
                            return
                        (far if source is near else near).sendall(data)
                    except OSError:
                        return

    def cut(self) -> None:
        self._is_cut.set()

    def mend(self) -> None:
        self._is_cut.clear()

    def close(self) -> None:
        self._is_over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
