"""The rendezvous store's content and its waiters, without sockets or clock.

``request`` and ``expire`` return replies to send; who asked (``peer``) is opaque. Epochs older than
the newest one but ``EPOCHS_KEPT - 1`` are dropped as a whole, their waiters told so: a group that
is still being built inside a whole replica when the next epoch comes may finish with the previous
epoch's keys.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from unicron.runtime.store_wire import (
    KEY_CHARS_MAX,
    KEYS_PER_REQUEST_MAX,
    TIMEOUT_MS_MAX,
    VALUE_BYTES_MAX,
    Op,
    Status,
    StoreMalformed,
    StoreReply,
    StoreRequest,
    split_key,
)

EPOCHS_KEPT = 2
KEYS_MAX = 262_144
TOTAL_BYTES_MAX = 256 << 20
WAITERS_MAX = 65_536

Replies = list[tuple[bytes, StoreReply]]


@dataclass(slots=True)
class _Waiter:
    peer: bytes
    request: int
    with_values: bool
    keys: list[str]
    missing: set[str]
    deadline_ms: int


@dataclass
class StoreTable:
    _values: dict[str, bytes] = field(default_factory=dict)
    _epochs: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    # task -> oldest epoch that is still served
    _floor: dict[str, int] = field(default_factory=dict)
    _waiters: dict[tuple[bytes, int], _Waiter] = field(default_factory=dict)
    _waiting_for: dict[str, list[_Waiter]] = field(default_factory=dict)
    _deadlines: list[tuple[int, bytes, int]] = field(default_factory=list)
    _num_bytes: int = 0

    # ------------------------------------------------------------ what the owner does

    def request(self, peer: bytes, request: StoreRequest, now_ms: int) -> Replies:
        """Carry out one request; a waiting one is answered later, by another request or by
        ``expire``.
        """
        if request.op is Op.CANCEL:
            self._forget(self._waiters.get((peer, request.number)))
            return []
        try:
            refusal = self._check(request)
        except StoreMalformed as error:
            refusal = StoreReply(request.request, Status.REFUSED, text=str(error))
        if refusal is not None:
            return [(peer, refusal)]
        if request.op in (Op.GET, Op.WAIT):
            return self._wait(peer, request, now_ms)
        written, reply = self._apply(request)
        answered = [answer for key in written for answer in self._wake(key)]
        return [*answered, (peer, reply)]

    def announce(self, task: str, epoch: int) -> Replies:
        """A new epoch stands: drop those before the previous one."""
        floor = epoch - EPOCHS_KEPT + 1
        if floor <= self._floor.get(task, 0):
            return []
        self._floor[task] = floor
        for known in [e for e in self._epochs if e[0] == task and e[1] < floor]:
            for key in self._epochs.pop(known):
                self._num_bytes -= len(key) + len(self._values.pop(key))
        stale = [w for w in self._waiters.values() if any(self._is_stale(k) for k in w.keys)]
        return [self._end(w, Status.STALE, "the epoch of this key was dropped") for w in stale]

    def forget_task(self, task: str) -> Replies:
        """The task ended; nothing of it is needed."""
        replies = self.announce(task, 1 << 62)
        del self._floor[task]
        return replies

    def expire(self, now_ms: int) -> Replies:
        replies: Replies = []
        while self._deadlines and self._deadlines[0][0] <= now_ms:
            _, peer, number = heapq.heappop(self._deadlines)
            waiter = self._waiters.get((peer, number))
            if waiter is not None:
                missing = min(waiter.missing)
                replies.append(self._end(waiter, Status.TIMEOUT, f"nobody set {missing}"))
        return replies

    def close(self) -> Replies:
        return [self._end(w, Status.CLOSED, "the store closes") for w in [*self._waiters.values()]]

    def next_deadline_ms(self) -> int | None:
        """When ``expire`` is due (entries of answered waiters may make this early, never late)."""
        while self._deadlines and self._deadlines[0][1:] not in self._waiters:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    @property
    def num_keys(self) -> int:
        return len(self._values)

    @property
    def num_waiters(self) -> int:
        return len(self._waiters)

    # ------------------------------------------------------------ single operations

    def _check(self, request: StoreRequest) -> StoreReply | None:
        number, num_keys = request.request, len(request.keys)
        if not 1 <= num_keys <= KEYS_PER_REQUEST_MAX:
            raise StoreMalformed(f"{num_keys} keys in one request, limit {KEYS_PER_REQUEST_MAX}")
        if any(len(key) > KEY_CHARS_MAX for key in request.keys):
            raise StoreMalformed(f"a key is longer than {KEY_CHARS_MAX} characters")
        if any(len(value) > VALUE_BYTES_MAX for value in request.values):
            raise StoreMalformed(f"a value is larger than {VALUE_BYTES_MAX} bytes")
        values_needed = {Op.SET: num_keys, Op.APPEND: num_keys, Op.COMPARE_SET: 2 * num_keys}
        if len(request.values) != values_needed.get(request.op, 0):
            raise StoreMalformed(f"{len(request.values)} values do not fit {request.op.name}")
        keys = request.keys
        if request.op is Op.NUM_KEYS:
            keys = [key + "*" for key in keys]  # a prefix need not name more than the epoch
        # every key is looked at: all must be well formed
        if [key for key in keys if self._is_stale(key)]:
            return StoreReply(number, Status.STALE, text="the epoch of this key was dropped")
        growing = request.op in (Op.SET, Op.ADD, Op.COMPARE_SET, Op.APPEND)
        if growing and (len(self._values) >= KEYS_MAX or self._num_bytes >= TOTAL_BYTES_MAX):
            return StoreReply(number, Status.FULL, text="the store is full")
        return None

    def _apply(self, request: StoreRequest) -> tuple[list[str], StoreReply]:
        """(keys that were written, reply) of an operation that does not wait."""
        number, keys, values = request.request, request.keys, request.values
        ok = Status.OK
        match request.op:
            case Op.SET:
                for key, value in zip(keys, values, strict=True):
                    self._put(key, value)
                return keys, StoreReply(number, ok)
            case Op.ADD:
                try:
                    total = int(self._values.get(keys[0], b"0")) + request.number
                except ValueError:
                    return [], StoreReply(number, Status.REFUSED, text=f"{keys[0]} is no number")
                self._put(keys[0], str(total).encode())
                return keys[:1], StoreReply(number, ok, number=total)
            case Op.CHECK:
                there = all(key in self._values for key in keys)
                return [], StoreReply(number, ok, number=int(there))
            case Op.COMPARE_SET:
                return self._compare_set(number, keys[0], *values[:2])
            case Op.DELETE:
                return [], StoreReply(number, ok, number=int(self._drop(keys[0])))
            case Op.NUM_KEYS:
                held = self._epochs.get(split_key(keys[0] + "*"), set())
                return [], StoreReply(number, ok, number=sum(k.startswith(keys[0]) for k in held))
            case Op.APPEND:
                for key, value in zip(keys, values, strict=True):
                    joined = self._values.get(key, b"") + value
                    if len(joined) > VALUE_BYTES_MAX:
                        return [], StoreReply(number, Status.FULL, text=f"{key} would be too large")
                    self._put(key, joined)
                return keys, StoreReply(number, ok)
        raise AssertionError(f"unhandled operation {request.op}")

    def _compare_set(self, number: int, key: str, expected: bytes, desired: bytes) -> tuple[list[str], StoreReply]:
        """torch's rule: an absent key is set when nothing is expected; the value that then stands
        is returned.
        """
        current = self._values.get(key)
        if current == expected or (current is None and not expected):
            self._put(key, desired)
            return [key], StoreReply(number, Status.OK, [desired])
        return [], StoreReply(number, Status.OK, [expected if current is None else current])

    # ------------------------------------------------------------ waiting

    def _wait(self, peer: bytes, request: StoreRequest, now_ms: int) -> Replies:
        with_values = request.op is Op.GET
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return [(peer, self._found(request.request, request.keys, with_values))]
        if len(self._waiters) >= WAITERS_MAX:
            text = f"more than {WAITERS_MAX} requests wait"
            return [(peer, StoreReply(request.request, Status.FULL, text=text))]
        if request.timeout_ms <= 0:
            text = f"{min(missing)} is not set"
            return [(peer, StoreReply(request.request, Status.TIMEOUT, text=text))]
        deadline = now_ms + min(request.timeout_ms, TIMEOUT_MS_MAX)
        waiter = _Waiter(peer, request.request, with_values, request.keys, missing, deadline)
        self._waiters[peer, request.request] = waiter
        heapq.heappush(self._deadlines, (deadline, peer, request.request))
        if len(self._deadlines) > 2 * len(self._waiters) + 1024:  # entries of answered waiters
            self._deadlines = [(w.deadline_ms, *known) for known, w in self._waiters.items()]
            heapq.heapify(self._deadlines)
        for key in missing:
            self._waiting_for.setdefault(key, []).append(waiter)
        return []

    def _wake(self, key: str) -> Replies:
        replies: Replies = []
        for waiter in self._waiting_for.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                del self._waiters[waiter.peer, waiter.request]
                found = self._found(waiter.request, waiter.keys, waiter.with_values)
                replies.append((waiter.peer, found))
        return replies

    def _found(self, number: int, keys: list[str], with_values: bool) -> StoreReply:
        absent = [key for key in keys if key not in self._values]
        if absent:  # deleted while waiting for another one of the same request
            return StoreReply(number, Status.TIMEOUT, text=f"{absent[0]} was deleted")
        return StoreReply(number, Status.OK, [self._values[k] for k in keys] if with_values else [])

    def _end(self, waiter: _Waiter, status: Status, text: str) -> tuple[bytes, StoreReply]:
        self._forget(waiter)
        return waiter.peer, StoreReply(waiter.request, status, text=text)

    def _forget(self, waiter: _Waiter | None) -> None:
        if waiter is None:
            return
        del self._waiters[waiter.peer, waiter.request]
        for key in waiter.missing:
            others = self._waiting_for.get(key)
            if others is not None:
                others.remove(waiter)
                if not others:
                    del self._waiting_for[key]

    # ------------------------------------------------------------ content

    def _is_stale(self, key: str) -> bool:
        task, epoch = split_key(key)
        return epoch < self._floor.get(task, 0)

    def _put(self, key: str, value: bytes) -> None:
        old = self._values.get(key)
        if old is None:
            self._epochs.setdefault(split_key(key), set()).add(key)
            self._num_bytes += len(key)
        self._num_bytes += len(value) - len(old or b"")
        self._values[key] = value

    def _drop(self, key: str) -> bool:
        value = self._values.pop(key, None)
        if value is None:
            return False
        self._num_bytes -= len(key) + len(value)
        self._epochs[split_key(key)].discard(key)
        return True
