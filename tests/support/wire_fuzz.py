"""Bytes that nobody should send, at every decoder and at the real sockets of a running cluster.

    python -m wire_fuzz --minutes 60 --seed 1      (tests/support in PYTHONPATH; `make fuzz` does it)

A case is a message of a random type with random fields, valid, then changed: bits flipped, cut, grown, spliced with
another one, a field replaced by one of another type, another version. A decoder has two legal answers: a message that
survives being written and read again, or the refusal it declares; anything else is a finding, with its seed. At the
sockets (the coordinator's with an admitted client's and agent's key, and without any; an agent's Unix socket; its
store) the cluster must go on answering, training, and know of no incident.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import socket
import sys
import tempfile
import time
import types
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import zmq

from clusters import eventually, make_cluster, plain_job, running
from unicron import messages
from unicron.coordinator import journal
from unicron.runtime import keys, processes, store_wire
from unicron.runtime.journal_etcd import pack, unpack
from unicron.runtime.journal_problem import JournalBroken
from unicron.runtime.local_cluster import LocalCluster
from unicron.runtime.zap import call_curve

DEPTH_MAX = 4
CASES_TOGETHER = 2_000  # of decoders, between two turns at the sockets
SENT_TOGETHER = 200
ANSWER_S_MAX = 20.0


# ---------------------------------------------------------------- valid messages


def kinds(union: Any) -> list[type[msgspec.Struct]]:
    return [each for each in get_args(union) or (union,) if isinstance(each, type)]


ALL_MESSAGES = [
    each
    for each in vars(messages).values()
    if isinstance(each, type) and issubclass(each, msgspec.Struct) and each.__struct_config__.tag is not None
    and not each.__name__.startswith("_")
]  # fmt: skip


def value(kind: Any, rng: random.Random, depth: int = 0) -> Any:
    """Of this type, however odd."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return value(rng.choice(inner), rng, depth)
    if origin is typing.Literal:
        return rng.choice(inner)
    if origin in (tuple, list, set, frozenset):
        return _many(origin, inner, rng, depth)
    if origin is dict:
        count = 0 if depth > DEPTH_MAX else rng.randrange(3)
        return {value(inner[0], rng, depth + 1): value(inner[1], rng, depth + 1) for _ in range(count)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return rng.choice([*kind])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return instance(kind, rng, depth + 1)
    return _plain(kind, rng)


def _many(origin: Any, inner: tuple[Any, ...], rng: random.Random, depth: int) -> Any:
    if origin is tuple and not (len(inner) == 2 and inner[1] is ...):
        return tuple(value(each, rng, depth + 1) for each in inner)
    count = 0 if depth > DEPTH_MAX else rng.randrange(3)
    return origin(value(inner[0], rng, depth + 1) for _ in range(count))


def _plain(kind: Any, rng: random.Random) -> Any:
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.choice([0, 1, -1, 7, rng.randrange(-(2**63), 2**63), 2**64 - 1, rng.randrange(1000)])
    if kind is float:
        return rng.choice([0.0, -1.5, 1e308, float("inf"), float("nan"), rng.random()])
    if kind is str:
        return rng.choice(["", "t", "n0", "n0.w0", "\0", "🦄" * 5, "a/b", "x" * rng.randrange(300)])
    if kind is bytes:
        return rng.randbytes(rng.randrange(40))
    if kind is type(None):
        return None
    return rng.choice([None, 1, "a", [], {}, {"job": {}}, {"task": "t"}])  # Any


hints_of = functools.cache(get_type_hints)
fields_of = functools.cache(msgspec.structs.fields)


def instance(kind: type[msgspec.Struct], rng: random.Random, depth: int = 0) -> Any:
    hints, fields = hints_of(kind), fields_of(kind)
    chosen = {
        field.name: value(hints[field.name], rng, depth)
        for field in fields
        if field.required or rng.random() < 0.5
    }  # fmt: skip
    return kind(**chosen)


# ---------------------------------------------------------------- and what becomes of them


def changed(data: bytes, other: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0 if found:
                found[at % len(found)] ^= 1 << rng.randrange(8)
            case 1:
                del found[at:]
            case 2:
                found[at:at] = rng.randbytes(rng.randrange(1, 16))
            case 3:
                del found[at : at + rng.randrange(8)]
            case 4:
                found[at:] = other[rng.randrange(len(other) + 1) :]
            case 5:
                found = bytearray(_retyped(bytes(found), rng))
            case 6 if found:
                found[0] = rng.randrange(256)
    return bytes(found)


def _retyped(data: bytes, rng: random.Random) -> bytes:
    """One field of another type, or one more."""
    try:
        content = msgspec.msgpack.decode(data[1:])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return data
    if isinstance(content, dict) and content:
        name = rng.choice([*content, "more"])
        content[name] = rng.choice([None, -1, 2**63, "x", [[[]]], {"a": {}}, b"\xff", 1.5, True])
    return data[:1] + msgspec.msgpack.encode(content)


def nested(rng: random.Random) -> bytes:
    """Deeper than any stack, where anything may stand."""
    request = messages.encode(messages.Request("submit", {"job": None}))
    return request.removesuffix(b"\xc0") + b"\x91" * rng.randrange(100, 200_000) + b"\xc0"


class Decoder(typing.NamedTuple):
    new: Callable[[random.Random], bytes]
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    refusals: tuple[type[Exception], ...]


def _entry(rng: random.Random) -> bytes:
    return journal.encode_entry(instance(rng.choice(kinds(journal.Entry)), rng))


def _store(rng: random.Random) -> bytes:
    return store_wire.encode(instance(store_wire.StoreRequest, rng))


def _message(rng: random.Random) -> bytes:
    return nested(rng) if rng.random() < 0.001 else messages.encode(instance(rng.choice(ALL_MESSAGES), rng))


DECODERS = {
    "message": Decoder(_message, messages.decode, messages.encode, (messages.MessageRefused,)),
    "journal": Decoder(_entry, journal.decode_entry, journal.encode_entry, (journal.JournalUnreadable,)),
    "store": Decoder(_store, store_wire.decode_request, store_wire.encode, (store_wire.StoreMalformed,)),
    "batch": Decoder(lambda rng: pack([_entry(rng) for _ in range(rng.randrange(4))]), unpack, pack, (JournalBroken,)),
}


def try_decoders(rng: random.Random, count: int) -> list[str]:
    """Findings. Every case can be had again by its seed."""
    found = []
    for _ in range(count):
        seed = rng.getrandbits(63)
        case = random.Random(seed)
        name = case.choice([*DECODERS])
        decoder = DECODERS[name]
        data = changed(decoder.new(case), decoder.new(case), case)
        try:
            read = decoder.read(data)
            again = decoder.read(decoder.write(read))
            if again != read and "nan" not in repr(read):
                found.append(f"{name} case {seed}: {read!r} is not what it was: {again!r}")
        except decoder.refusals:
            pass
        except BaseException as error:
            found.append(f"{name} case {seed}: {type(error).__name__}: {error}")
    return found


# ---------------------------------------------------------------- real sockets


class Sockets:
    """A running cluster, and lines to it that say what they should not."""

    def __init__(self, folder: Path) -> None:
        self.cluster = make_cluster(folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self.cluster.start(40)
            self.task = self.cluster.submit(plain_job("t", folder, iterations=10_000_000))
            running(self.cluster, self.task)
        except BaseException:
            self.close()
            raise
        self._keys = self.cluster.state / "keys"
        self.pids = {worker.pid for worker in self.cluster.workers(self.task)}
        self._iteration = -1

    def close(self) -> list[int]:
        self._context.destroy(linger=0)
        return self.cluster.stop()

    def turn(self, rng: random.Random) -> None:
        store = next(n for n in self.cluster.ask("nodes") if n["node"] == "n0")["store"]
        coordinator = f"tcp://{self.cluster.address}"
        self._curve(coordinator, "coordinator", "client", rng, [_message, _store])
        self._curve(coordinator, "coordinator", "agent", rng, [_strange_agent, _store])
        self._curve(store, "agent", "worker", rng, [_store, _message])
        self._plain(coordinator, rng)
        self._plain(store, rng)
        self._unix(self.cluster.directory / "n0", rng)
        self.look()

    def _curve(
        self, address: str, server: str, role: str, rng: random.Random, new: list[Callable[[random.Random], bytes]]
    ) -> None:
        own, of = keys.load(self._keys / f"{role}.key"), keys.load(self._keys / f"{server}.key")
        dealer = self._context.socket(zmq.DEALER)
        call_curve(dealer, of.public, own.public, own.secret, message_bytes_max=messages.MESSAGE_BYTES_MAX)
        dealer.connect(address)
        try:
            for _ in range(SENT_TOGETHER):
                data = changed(rng.choice(new)(rng), rng.choice(new)(rng), rng)
                if _is_harmless(data):
                    frames = [data, b""] if rng.random() < 0.02 else [data]
                    with contextlib.suppress(zmq.Again):
                        dealer.send_multipart(frames, zmq.NOBLOCK)
            dealer.poll(200)
        finally:
            dealer.close(200)

    def _plain(self, address: str, rng: random.Random) -> None:
        """A stranger: no keys, and no ZeroMQ."""
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + rng.choice([b"NULL", b"CURVE", b"PLAIN"]).ljust(20, b"\0")
        for _ in range(10):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=2) as line:
                line.settimeout(0.05)
                line.sendall(changed(greeting.ljust(64, b"\0") + rng.randbytes(rng.randrange(2000)), greeting, rng))
                line.recv(4096)

    def _unix(self, folder: Path, rng: random.Random) -> None:
        """A worker's socket, from a process that is no worker."""
        for path in [each for each in folder.rglob("*") if each.is_socket()]:
            for _ in range(20):
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                    line.settimeout(0.05)
                    line.connect(str(path))
                    data = changed(_message(rng), _message(rng), rng)
                    length = rng.choice([len(data), len(data), rng.randrange(1 << 32)])
                    line.sendall(length.to_bytes(4, "little") + data)
                    line.recv(4096)

    def look(self) -> None:
        """It answers, trains with the same processes, and nothing failed."""
        before = self._iteration

        def goes_on() -> bool:
            view = self.cluster.task(self.task)
            members = [w for w in view["workers"] if w["is_member"] and w["phase"] == "ready"]
            self._iteration = min((int(w["iteration"]) for w in members), default=-1)
            return view["phase"] == "running" and len(members) == 2 and self._iteration > before

        eventually(goes_on, ANSWER_S_MAX)
        assert {w.pid for w in self.cluster.workers(self.task)} == self.pids
        incidents = [i for i in self.cluster.incidents(self.task) if i["severity"] != "INFO"]  # slow: only told
        assert incidents == [], incidents[0]["cause"]


def _strange_agent(rng: random.Random) -> bytes:
    """What an agent may say; a node that is really there keeps its name to itself."""
    spoken = instance(rng.choice(kinds(messages_of_agents())), rng)
    return messages.encode(spoken)


def messages_of_agents() -> Any:
    from unicron.coordinator.events import AgentSays

    return AgentSays


def _is_harmless(data: bytes) -> bool:
    """Not what an admitted peer may rightly say: to end the coordinator, to be the node n0."""
    try:
        message = messages.decode(data)
    except messages.MessageRefused:
        return True
    if isinstance(message, messages.Request):
        return message.verb not in ("shutdown", "cancel", "suspend", "drain", "inject", "reshape")
    return getattr(message, "node", "") not in ("n0", "n1")


# ---------------------------------------------------------------- hours of it


class Kept(msgspec.Struct):
    seeds: list[int] = []
    cases: int = 0
    sent: int = 0
    seconds: float = 0.0
    findings: list[str] = []


def fuzz(seed: int, until_s: float, sockets: Sockets | None, say: Callable[[str], None] = print) -> Kept:
    """One seed's, until that moment; decoders and sockets by turns."""
    began_s, rng, kept = time.monotonic(), random.Random(seed), Kept([seed])
    while True:
        kept.findings += try_decoders(rng, CASES_TOGETHER)
        kept.cases += CASES_TOGETHER
        if sockets is not None:
            try:
                sockets.turn(rng)
            except (AssertionError, Exception) as problem:
                kept.findings.append(f"seed {seed} after {kept.cases} cases, at the sockets: {problem!r}"[:2000])
            kept.sent += 3 * SENT_TOGETHER
        kept.seconds = time.monotonic() - began_s
        if kept.findings or time.monotonic() >= until_s:
            return kept


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m wire_fuzz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--record", type=Path, help="what was done is added up there; the next run takes the next seed")
    options = parser.parse_args()
    known = options.record is not None and options.record.is_file()
    kept = msgspec.json.decode(options.record.read_bytes(), type=Kept) if known else Kept()
    seed = max([options.seed - 1, *kept.seeds]) + 1
    with tempfile.TemporaryDirectory(prefix="unicron-fuzz-") as folder:
        sockets = Sockets(Path(folder))
        try:
            new = fuzz(seed, time.monotonic() + 60 * options.minutes, sockets)
        finally:
            left = sockets.close()
            left += processes.find(sockets.cluster.directory)
        if new.findings:
            print(_end_of_logs(sockets.cluster))
    assert left == [], left
    total = Kept(
        [*kept.seeds, seed], kept.cases + new.cases, kept.sent + new.sent, kept.seconds + new.seconds,
        [*kept.findings, *new.findings],
    )  # fmt: skip
    if options.record is not None:
        options.record.write_bytes(msgspec.json.format(msgspec.json.encode(total), indent=1) + b"\n")
    done = f"{new.cases} cases, {new.sent} messages sent, {new.seconds:.0f} s"
    print(f"seed {seed}: {done}, {len(new.findings)} findings")
    print("\n".join(new.findings))
    return 1 if new.findings else 0


def _end_of_logs(cluster: LocalCluster) -> str:
    texts = [path.read_text()[-3000:] for path in sorted(cluster.log_dir.glob("*.log")) if path.is_file()]
    return "\n".join(texts)


if __name__ == "__main__":
    sys.exit(main())
