"""Words of the rendezvous store: one request, one reply, matched by number.

Keys are ``task/epoch/rest``: the store drops whole epochs, and a request for a dropped one is
refused as stale instead of waiting for somebody who will never come.
"""

from __future__ import annotations

import enum

import msgspec

from unicron.messages import UNREADABLE

STORE_VERSION = 1
VALUE_BYTES_MAX = 1 << 20
MESSAGE_BYTES_MAX = 4 << 20
KEY_CHARS_MAX = 1024
KEYS_PER_REQUEST_MAX = 4096
TIMEOUT_MS_MAX = 3_600_000


class Op(enum.IntEnum):
    SET = 1
    GET = 2  # waits until the keys are there, then gives their values
    WAIT = 3
    ADD = 4
    CHECK = 5
    COMPARE_SET = 6
    DELETE = 7
    NUM_KEYS = 8  # keys that begin with keys[0]
    APPEND = 9
    CANCEL = 10  # number: the request whose waiting ends; no reply


class Status(enum.IntEnum):
    OK = 0
    TIMEOUT = 1
    STALE = 2  # the epoch was dropped
    REFUSED = 3  # bad request: text says which way
    FULL = 4  # a bound of the store is reached
    CLOSED = 5  # the store goes away


class StoreRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    op: Op
    request: int
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0
    timeout_ms: int = 0


class StoreReply(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request: int
    status: Status
    values: list[bytes] = []
    number: int = 0
    text: str = ""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(StoreRequest)
_replies = msgspec.msgpack.Decoder(StoreReply)
_version = bytes((STORE_VERSION,))


class StoreMalformed(ValueError):
    pass


def encode(message: StoreRequest | StoreReply) -> bytes:
    return _version + _encoder.encode(message)


def _body(data: bytes) -> memoryview:
    if len(data) > MESSAGE_BYTES_MAX:
        raise StoreMalformed(f"store message of {len(data)} bytes, limit {MESSAGE_BYTES_MAX}")
    if not data or data[0] != STORE_VERSION:
        raise StoreMalformed("store message of another version")
    return memoryview(data)[1:]


def decode_request(data: bytes) -> StoreRequest:
    try:
        return _requests.decode(_body(data))
    except UNREADABLE as error:
        raise StoreMalformed(str(error)) from None


def decode_reply(data: bytes) -> StoreReply:
    try:
        return _replies.decode(_body(data))
    except UNREADABLE as error:
        raise StoreMalformed(str(error)) from None


def split_key(key: str) -> tuple[str, int]:
    """(task, epoch) of a key; StoreMalformed when it has none."""
    task, _, rest = key.partition("/")
    epoch, _, name = rest.partition("/")
    if not task or not name or not epoch.isdecimal():
        raise StoreMalformed(f"key {key[:80]!r} is not task/epoch/name")
    return task, int(epoch)
