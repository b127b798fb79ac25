"""A command's line to the coordinator: one request, one reply, every wait bounded."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from socket import create_connection
from typing import Any, Self

import zmq

from unicron.messages import MESSAGE_BYTES_MAX, MessageRefused, Reply, Request, decode, encode
from unicron.runtime import key_rotation, keys
from unicron.runtime.coordinator_link import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from unicron.runtime.endpoints import EndpointProblem, endpoints_of, parse_endpoint, require_names
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import call_curve

ANSWER_MS_MAX = 10_000
LOOKS = frozenset({"ps", "describe", "incidents", "nodes", "cluster", "plan", "ping"})  # may be asked twice
LOOK_AGAIN_S = 2.5  # the one that was asked may have stopped being the one that decides; then twice that, and so on
CONNECT_S_MAX = 0.5
REFUSED_S = 2.0  # that a command waits for a coordinator where nothing listens: it may be on its way up
REFUSED_S_OF_SEVERAL = 5.0  # a change of the leader takes two to three
LABEL_MS_MAX = 500  # of asking a cluster what it trains, only to name it
DEFAULT_ADDRESS = "127.0.0.1:7070"
DEFAULT_KEYS = "keys"
ADDRESS_VARIABLE = "UNICRON_COORDINATOR"
LOCAL_PREFIX = "unicron-"  # of a local cluster's directory, in the folder for temporary files
ADDRESS_FILE = "coordinator.address"
OWNER_FILE = "owner"  # beside it: the command whose cluster this is, in a line


class CoordinatorSilent(Exception):
    """No answer; the text says what to look at."""


class CoordinatorRefused(Exception):
    """It answered no; the text is the coordinator's own line."""


class RequestUnfit(Exception):
    """What is asked is nothing that a message could hold: it was not sent."""


def _why_unfit(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} is no text in UTF-8: give the name as `unicron ps` or `unicron nodes` shows it"
    if isinstance(error, OverflowError):
        return "a number in the request has more than 64 bits: give a smaller one"
    return f"{error}: give less"


def _result(data: bytes) -> Any:
    try:
        reply = decode(data)
    except MessageRefused as error:
        raise CoordinatorSilent(f"the coordinator speaks another language: {error}") from None
    if not isinstance(reply, Reply):
        raise CoordinatorSilent(f"the coordinator sent {type(reply).__name__}")
    if not reply.ok:
        raise CoordinatorRefused(reply.error)
    return reply.result


def _why_silent(address: str) -> str:
    if _listens(address):
        return "something listens there: is this key one that it admits, and is it not stopped?"
    return "nothing listens there: is it running, and is this its address?"


def _unknown(verb: str, was_sent: bool) -> str:
    if verb in LOOKS or not was_sent:
        return ""
    return f" Whether {verb} was done is not known: look before you ask for it again."


class CoordinatorClient:
    def __init__(self, address: str, server_keys: str | Sequence[str], pair: keys.KeyPair) -> None:
        """address: host:port, or several with commas between; whichever listens is the one that decides. server_keys:
        the public keys that it may have."""
        self.address = address
        self.refused_s = float("inf")  # so long nobody needs to listen at any of them
        self._server_keys = (server_keys,) if isinstance(server_keys, str) else tuple(server_keys)
        self._pair = pair
        self._sockets = self._connect()

    def _connect(self) -> list[zmq.Socket[bytes]]:
        return [self._open(key) for key in self._server_keys]

    def _open(self, server_key: str) -> zmq.Socket[bytes]:
        socket = process_context().socket(zmq.DEALER)
        bytes_max = MESSAGE_BYTES_MAX + 1
        call_curve(socket, server_key, self._pair.public, self._pair.secret, message_bytes_max=bytes_max)
        socket.immediate = True  # what is asked goes to one that is there, not to one that may come
        socket.heartbeat_ivl = HEARTBEAT_MS  # one that froze is not asked again
        socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        for endpoint in endpoints_of(self.address):
            socket.connect(endpoint)
        return socket

    def ask(self, verb: str, *, timeout_ms: int = ANSWER_MS_MAX, **arguments: Any) -> Any:
        """The result of a request that was granted. One that only looks is asked again where no answer comes: a
        request in flight while the leader changes is lost. What changes something is sent once.

        RequestUnfit: it was not sent. CoordinatorSilent: no answer in timeout_ms. CoordinatorRefused: it was not
        granted."""
        try:
            request = encode(Request(verb, arguments))
        except (MessageRefused, OverflowError, UnicodeEncodeError) as error:
            raise RequestUnfit(_why_unfit(error)) from None
        begun = time.monotonic()
        deadline = begun + timeout_ms / 1000
        again_s = LOOK_AGAIN_S if verb in LOOKS else timeout_ms / 1000
        while True:
            socket = self._send(request, min(deadline, time.monotonic() + self.refused_s))
            if socket is None and time.monotonic() < deadline and _listens(self.address):
                socket = self._send(request, deadline)
            left_s = min(deadline - time.monotonic(), again_s)
            if socket is not None and socket.poll(max(0, int(left_s * 1000))):
                return _result(socket.recv())
            self.close()  # a late answer must not be taken for the next one's
            self._sockets = self._connect()
            # A poll may end before its time by what a millisecond rounds off: the clock alone must not send twice.
            if socket is None or verb not in LOOKS or time.monotonic() >= deadline:
                waited_ms = min(timeout_ms, round(1000 * (time.monotonic() - begun)))
                raise CoordinatorSilent(
                    f"no answer from the coordinator at {self.address} in {waited_ms} ms: {_why_silent(self.address)}"
                    f"{_unknown(verb, socket is not None)}"
                )
            again_s *= 2

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

    def _send(self, request: bytes, deadline: float) -> zmq.Socket[bytes] | None:
        """The line that took the request. One that a poll calls ready can be gone when it is used, and a send that
        waits for the next waits for ever where none comes."""
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLOUT)
        while (left_s := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(max(1, int(left_s * 1000))):
                if isinstance(socket, zmq.Socket):
                    with contextlib.suppress(zmq.Again):
                        socket.send(request, zmq.NOBLOCK)
                        return socket
        return None

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def from_environment(address: str = "", key_directory: str = "", *, adds_tasks: bool = False) -> CoordinatorClient:
    """Address and keys from arguments, UNICRON_COORDINATOR and UNICRON_KEYS, the one local cluster
    that runs on this machine (`unicron run`), or the defaults, in this order.

    adds_tasks: whoever has a cluster for his own task (`unicron run`, the demo) must be named to get another one."""
    where = "--coordinator" if address else ADDRESS_VARIABLE
    address = address or os.environ.get(ADDRESS_VARIABLE, "")
    key_directory = key_directory or os.environ.get("UNICRON_KEYS", "")
    if not address and not key_directory and not Path(DEFAULT_KEYS).is_dir():
        address, key_directory = _local_cluster(adds_tasks)
        if not address:
            raise CoordinatorSilent(
                "no cluster of this user runs on this machine; of a run that is over the logs are where it said "
                "(--log-dir FOLDER of `unicron logs` and `unicron incidents`). For a cluster elsewhere say "
                "--coordinator and --keys; a new one begins with `unicron run`, or with `unicron keys`"
            )
    if address:
        require_names(endpoints_of(address, where), where)
    directory = Path(key_directory or DEFAULT_KEYS)
    if not directory.is_dir() and address and not _listens(address):
        raise CoordinatorSilent(
            f"no cluster is at {address} any more: {directory} is gone, too; a run that has ended left its logs where"
            " it said"
        )
    pair = keys.load(directory / "client.key")
    client = CoordinatorClient(address or DEFAULT_ADDRESS, key_rotation.publics(directory, "coordinator"), pair)
    client.refused_s = REFUSED_S if "," not in client.address else REFUSED_S_OF_SEVERAL
    return client


def _local_cluster(adds_tasks: bool) -> tuple[str, str]:
    """(address, key directory) of the only `unicron run` of this user; ('', '') when there is none. Who was killed so
    hard that its folder stayed does not count."""
    found = [
        path
        for path in Path(tempfile.gettempdir()).glob(f"{LOCAL_PREFIX}*/{ADDRESS_FILE}")
        if path.stat().st_uid == os.getuid() and _listens(path.read_text(encoding="utf-8"))
    ]
    if len(found) > 1:
        choices = "".join(f"\n  {_flags(path)}  # {_label(path)}" for path in sorted(found))
        raise CoordinatorSilent(f"several clusters run here, choose one of:{choices}")
    if not found:
        return "", ""
    if adds_tasks and (owner := _owner(found[0])):
        raise CoordinatorSilent(
            f"the cluster that runs here belongs to `{owner}`: start one of your own (`unicron coordinator --help`), or"
            f" say that you mean that one: {_flags(found[0])}"
        )
    return found[0].read_text(encoding="utf-8"), str(found[0].parent / "keys")


def _flags(path: Path) -> str:
    return f"--coordinator {path.read_text(encoding='utf-8').removeprefix('tcp://')} --keys {path.parent}/keys"


def _owner(path: Path) -> str:
    try:
        return (path.parent / OWNER_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _label(path: Path) -> str:
    """Whose cluster it is, or what it trains, and since when."""
    owner = _owner(path)
    if not owner:
        tasks = _tasks(path)
        owner = f"trains {', '.join(tasks)}" if tasks else "no name and no tasks: a test or a bench"
    try:
        return f"{owner}, {_age(time.time() - (path.parent / OWNER_FILE).stat().st_mtime)} old"
    except OSError:
        return owner


def _tasks(path: Path) -> list[str]:
    """() where it does not answer soon."""
    directory = path.parent / "keys"
    try:
        pair = keys.load(directory / "client.key")
        with CoordinatorClient(
            path.read_text(encoding="utf-8"), key_rotation.publics(directory, "coordinator"), pair
        ) as client:
            return [row["task"] for row in client.ask("ps", timeout_ms=LABEL_MS_MAX)]
    except (CoordinatorSilent, CoordinatorRefused, keys.KeyProblem, OSError):
        return []


def _age(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _listens(address: str) -> bool:
    """One of them does."""
    try:
        endpoints = endpoints_of(address)
    except EndpointProblem:  # a file that is being written
        return False
    for endpoint in endpoints:
        with contextlib.suppress(OSError, UnicodeError), create_connection(parse_endpoint(endpoint), CONNECT_S_MAX):
            return True
    return False
