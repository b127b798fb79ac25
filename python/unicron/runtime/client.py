"""A command's line to the coordinator: one request, one reply, every wait bounded."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import zmq

from unicron.messages import MESSAGE_BYTES_MAX, MessageRefused, Reply, Request, decode, encode
from unicron.runtime import keys
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import call_curve

ANSWER_MS_MAX = 10_000


class CoordinatorSilent(Exception):
    """No answer; the text says what to look at."""


class CoordinatorRefused(Exception):
    """It answered no; the text is the coordinator's own line."""


class CoordinatorClient:
    def __init__(self, address: str, server_key: str, pair: keys.KeyPair) -> None:
        self.address = address
        self._settings = (server_key, pair)
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        server_key, pair = self._settings
        socket = process_context().socket(zmq.DEALER)
        bytes_max = MESSAGE_BYTES_MAX + 1
        call_curve(socket, server_key, pair.public, pair.secret, message_bytes_max=bytes_max)
        socket.connect(self.address)
        return socket

    def ask(self, verb: str, *, timeout_ms: int = ANSWER_MS_MAX, **arguments: Any) -> Any:
        """The result of a request that was granted."""
        self._socket.send(encode(Request(verb, arguments)))
        if not self._socket.poll(timeout_ms):
            self._socket.close(0)  # a late answer must not be taken for the next one's
            self._socket = self._connect()
            raise CoordinatorSilent(
                f"no answer from the coordinator at {self.address} in {timeout_ms} ms:"
                " is it running, and is this key one that it admits?"
            )
        try:
            reply = decode(self._socket.recv())
        except MessageRefused as error:
            raise CoordinatorSilent(f"the coordinator speaks another language: {error}") from None
        if not isinstance(reply, Reply):
            raise CoordinatorSilent(f"the coordinator sent {type(reply).__name__}")
        if not reply.ok:
            raise CoordinatorRefused(reply.error)
        return reply.result

    def wait_until_up(self, timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1000
        while True:
            left_ms = int((deadline - time.monotonic()) * 1000)
            try:
                self.ask("ping", timeout_ms=max(1, min(1000, left_ms)))
                return
            except CoordinatorSilent:
                if time.monotonic() >= deadline:
                    raise

    def close(self) -> None:
        self._socket.close(0)


def from_environment(address: str = "", key_directory: str = "") -> CoordinatorClient:
    """Address and keys from arguments, else UNICRON_COORDINATOR and UNICRON_KEYS, else the
    defaults.
    """
    address = address or os.environ.get("UNICRON_COORDINATOR", "127.0.0.1:7070")
    directory = Path(key_directory or os.environ.get("UNICRON_KEYS", "keys"))
    pair = keys.load(directory / "client.key")
    server_key = keys.load_public(str(directory / "coordinator.pub"))
    return CoordinatorClient(endpoint_of(address), server_key, pair)


def endpoint_of(address: str) -> str:
    return address if "://" in address else f"tcp://{address}"
