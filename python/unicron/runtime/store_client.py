"""The rendezvous store as a worker sees it: plain synchronous calls, usable from any thread.

One DEALER per client. Requests carry numbers and replies are sorted by them, so a thread that waits
in ``get`` does not keep another one from ``set``. Waiting is done on the socket's descriptor
outside the lock, in slices: a wait can be broken off (``cancelled``) when the epoch it belongs to
is over. Imports zmq and msgspec only, starts no thread of its own before the first client (ZeroMQ's
own I/O thread belongs to the process that made it: never build one before a fork).
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

import zmq

from unicron.runtime.store_wire import (
    MESSAGE_BYTES_MAX,
    Op,
    Status,
    StoreMalformed,
    StoreReply,
    StoreRequest,
    decode_reply,
    encode,
)
from unicron.runtime.zap import call_curve

SLICE_MS = 10  # how often a wait looks at `cancelled`
# for operations that do not wait: a store that does not answer by then is gone
ANSWER_MS_MAX = 10_000
CLOSE_MS = 200  # what was set last still goes out
POSTED_MAX = 1024
GRACE_MS = 1_000  # the server's own bound ends a wait; the client's follows this much later


class StoreError(Exception):
    """The store refused or could not do it; the text says why."""


class StoreTimeout(StoreError, TimeoutError):
    """Nobody set the key in time, or the store did not answer."""


class StaleEpoch(StoreError):
    """The epoch of the key is over."""


class Cancelled(StoreError):
    """The caller's own ``cancelled`` said so."""


_ERRORS: dict[Status, type[StoreError]] = {
    Status.TIMEOUT: StoreTimeout,
    Status.STALE: StaleEpoch,
}


def _error(reply: StoreReply, what: str) -> StoreError:
    return _ERRORS.get(reply.status, StoreError)(what + reply.text)


Numbers = set[int]
_context_lock = threading.Lock()
_context: tuple[int, zmq.Context[zmq.Socket[bytes]]] | None = None


def process_context() -> zmq.Context[zmq.Socket[bytes]]:
    """One ZeroMQ context per process; a forked child gets its own."""
    global _context
    with _context_lock:
        if _context is None or _context[0] != os.getpid():
            _context = (os.getpid(), zmq.Context())
        return _context[1]


class StoreClient:
    def __init__(self, endpoint: str, server_key: str, public: str, secret: str) -> None:
        self.endpoint = endpoint
        self._lock = threading.Lock()
        self._replies: dict[int, StoreReply] = {}
        self._expected: Numbers = set()
        self._posted: Numbers = set()  # sent, answer not waited for
        self._refused: StoreReply | None = None  # answer to one of those, not yet raised
        self._last_request = 0
        self._closed = False
        self._socket = process_context().socket(zmq.DEALER)
        call_curve(self._socket, server_key, public, secret, message_bytes_max=MESSAGE_BYTES_MAX)
        self._socket.reconnect_ivl = 5
        self._socket.reconnect_ivl_max = 100
        self._socket.connect(endpoint)
        self._descriptor = int(self._socket.fd)

    # ------------------------------------------------------------ operations

    def set(self, key: str, value: bytes) -> None:
        """Does not wait for the store's answer: order is kept, and a refusal is raised by the next
        operation.
        """
        self._post(Op.SET, [key], [value])

    def multi_set(self, values: dict[str, bytes]) -> None:
        self._post(Op.SET, list(values), list(values.values()))

    def append(self, key: str, value: bytes) -> None:
        self._call(Op.APPEND, [key], [value])

    def get(self, key: str, timeout_ms: int, cancelled: Callable[[], bool] | None = None) -> bytes:
        """The key's value, as soon as somebody set it."""
        return self.multi_get([key], timeout_ms, cancelled)[0]

    def multi_get(self, keys: list[str], timeout_ms: int, cancelled: Callable[[], bool] | None = None) -> list[bytes]:
        return self._call(Op.GET, keys, timeout_ms=timeout_ms, cancelled=cancelled).values

    def wait(self, keys: list[str], timeout_ms: int, cancelled: Callable[[], bool] | None = None) -> None:
        self._call(Op.WAIT, keys, timeout_ms=timeout_ms, cancelled=cancelled)

    def add(self, key: str, n: int) -> int:
        return self._call(Op.ADD, [key], number=n).number

    def check(self, keys: list[str]) -> bool:
        return self._call(Op.CHECK, keys).number == 1

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Set to desired if it is expected (or absent and nothing is expected); the value that then
        stands.
        """
        return self._call(Op.COMPARE_SET, [key], [expected, desired]).values[0]

    def delete(self, key: str) -> bool:
        return self._call(Op.DELETE, [key]).number == 1

    def num_keys(self, prefix: str) -> int:
        """How many keys begin with this prefix; it must name task and epoch ("task/epoch/")."""
        return self._call(Op.NUM_KEYS, [prefix]).number

    def ping(self, timeout_ms: int = ANSWER_MS_MAX) -> None:
        """Connected and admitted, or StoreTimeout. Worth calling ahead: the handshake is then not
        on the healing path.
        """
        self._call(Op.CHECK, ["-/0/ping"], answer_ms=timeout_ms)

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._socket.close(CLOSE_MS)

    # ------------------------------------------------------------ one request and its reply

    def _post(self, op: Op, keys: list[str], values: list[bytes]) -> None:
        with self._lock:
            self._check_open()
            self._raise_refused()
            full = len(self._posted) >= POSTED_MAX
            if not full:
                self._send(self._posted, op, keys, values)
        if full:
            self._call(op, keys, values)

    def _send(
        self,
        group: Numbers,
        op: Op,
        keys: list[str],
        values: list[bytes],
        number: int = 0,
        timeout_ms: int = 0,
    ) -> int:
        self._last_request += 1
        group.add(self._last_request)
        message = StoreRequest(op, self._last_request, keys, values, number, timeout_ms)
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            group.discard(self._last_request)
            raise StoreTimeout(
                f"the store at {self.endpoint} takes nothing: it did not admit this key, or is far behind"
            ) from None
        self._take_replies()
        return self._last_request

    def _call(
        self,
        op: Op,
        keys: list[str],
        values: list[bytes] = [],  # noqa: B006  (never written to)
        *,
        number: int = 0,
        timeout_ms: int = 0,
        answer_ms: int = ANSWER_MS_MAX,
        cancelled: Callable[[], bool] | None = None,
    ) -> StoreReply:
        with self._lock:
            self._check_open()
            self._raise_refused()
            request = self._send(self._expected, op, keys, values, number, timeout_ms)
        bound = timeout_ms + GRACE_MS if op in (Op.GET, Op.WAIT) else answer_ms
        try:
            reply = self._await(request, bound, cancelled)
        except BaseException:
            self._abandon(request, waits=op in (Op.GET, Op.WAIT))
            raise
        if reply.status is Status.OK:
            return reply
        raise _error(reply, f"{op.name} {keys[0] if keys else ''}: ")

    def _await(self, request: int, bound_ms: int, cancelled: Callable[[], bool] | None) -> StoreReply:
        deadline = time.monotonic() + bound_ms / 1000
        poller = select.poll()  # not select(): a worker may have more than 1024 descriptors
        poller.register(self._descriptor, select.POLLIN)
        while True:
            with self._lock:
                reply = self._replies.pop(request, None)
                if reply is None:
                    self._check_open()
                    self._take_replies()
                    reply = self._replies.pop(request, None)
                if reply is not None:
                    self._expected.discard(request)
                    return reply
            if cancelled is not None and cancelled():
                raise Cancelled("the wait was broken off")
            left = deadline - time.monotonic()
            if left <= 0:
                raise StoreTimeout(f"the store at {self.endpoint} did not answer in {bound_ms} ms")
            # Edge-triggered descriptor: whoever holds the lock drains, so a reply not yet taken
            # means "readable"; one taken by another thread for us is found after at most a slice.
            poller.poll(min(left * 1000, SLICE_MS))

    def _take_replies(self) -> None:
        while int(self._socket.events) & zmq.POLLIN:
            try:
                reply = decode_reply(self._socket.recv(zmq.NOBLOCK))
            except (zmq.Again, StoreMalformed):
                continue
            if reply.request in self._posted:
                self._posted.discard(reply.request)
                if reply.status is not Status.OK:
                    self._refused = reply
            elif reply.request in self._expected:
                self._replies[reply.request] = reply

    def _abandon(self, request: int, *, waits: bool) -> None:
        with self._lock:
            self._expected.discard(request)
            self._replies.pop(request, None)
            if waits and not self._closed:
                message = StoreRequest(Op.CANCEL, 0, number=request)
                with contextlib.suppress(zmq.Again):  # then there is nobody whom it could spare anything
                    self._socket.send(encode(message), zmq.NOBLOCK)

    def _raise_refused(self) -> None:
        reply, self._refused = self._refused, None
        if reply is not None:
            raise _error(reply, "an earlier set: ")

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("this store client is closed")
