"""The coordinator's journal in etcd: the same promises as journal_sqlite.py, for several coordinators.

    <prefix>/journal/<batch>/<part>   the entries of one step, in parts that fit a request
    <prefix>/head                     number of the last batch that is whole
    <prefix>/copying                  while another journal is copied: what. Nobody begins with a part of it

A batch counts from the transaction that writes its last part together with the head. Every transaction requires that
the leader key is the one this journal was opened under, and the last one that the head is the batch before: so a
leader that was replaced writes nothing more, and a write whose answer was lost can be repeated, because one that went
through is seen in the head. What an append that failed left behind lies above the head, is never read, and is
overwritten.
"""

from __future__ import annotations

import contextlib
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from unicron.coordinator.lease import refused_append
from unicron.messages import UNREADABLE
from unicron.runtime.election import Leadership
from unicron.runtime.etcd import (
    Etcd,
    EtcdFull,
    EtcdProblem,
    delete_between,
    is_absent,
    is_created_at,
    is_value,
    put,
    read,
    value_of,
)
from unicron.runtime.journal_problem import JournalBroken, JournalFull, LeadershipLost
from unicron.runtime.journal_sqlite import ENTRY_BYTES_MAX

PART_BYTES_MAX = 1 << 20  # etcd takes requests of 1.5 MiB
PACKED_BYTES_MIN = 512
PLAIN, PACKED = b"\x01", b"\x02"  # first byte of a batch: MessagePack of entries, or that packed by zlib
RETRY_S = 0.1
COPIED_TOGETHER_MAX = 256  # entries of another journal in one batch
SHOWN_MAX = 60  # of a value that is not ours

N = TypeVar("N", int, float)


class EtcdJournal:
    def __init__(self, etcd: Etcd, leadership: Leadership, copies: str = "") -> None:
        """The journal owns both from here on. copies: what is copied into it now; else JournalBroken where a copy was
        interrupted."""
        self._etcd = etcd
        self._leadership = leadership
        self._prefix = etcd.settings.prefix
        self._mine = is_created_at(leadership.key, leadership.revision)
        self._head = self._read_head()
        self._begin_copy(copies)

    def _begin_copy(self, copies: str) -> None:
        interrupted = self._read_copying()
        if interrupted and not copies:
            raise JournalBroken(
                f"under {self._prefix!r} etcd has a part of a journal only, the copy of {interrupted} was interrupted:"
                " run `unicron coordinator CONFIG --copy-from JOURNAL` again"
            )
        if self._head and copies and not interrupted:
            raise JournalBroken(
                f"etcd holds a journal under {self._prefix!r} already ({self._head} batches): if that is this copy,"
                " start the coordinators; else give another etcd.prefix"
            )
        if not copies:
            return
        journal, head = f"{self._prefix}/journal/", f"{self._prefix}/head"
        note = put(f"{self._prefix}/copying", copies.encode())
        self._commit([self._mine], [note, delete_between(journal, journal + "~"), delete_between(head, head + "\0")])
        self._head = 0

    def end_copy(self) -> None:
        copying = f"{self._prefix}/copying"
        self._commit([self._mine], [delete_between(copying, copying + "\0")])

    @property
    def is_empty(self) -> bool:
        return self._head == 0

    def entries(self) -> Iterator[bytes]:
        expected = 1
        for number, batch in self._batches():
            if number > self._head:
                break
            if number != expected:
                raise JournalBroken(f"batch {expected} of the journal in etcd is missing: restore etcd from its backup")
            expected += 1
            yield from unpack(batch)
        if expected != self._head + 1:
            raise JournalBroken(f"the journal in etcd ends at batch {expected - 1}, its head says {self._head}")

    def _batches(self) -> Iterator[tuple[int, bytes]]:
        number, parts = 0, b""
        first = f"{self._prefix}/journal/"
        try:
            for key, value in self._etcd.items(first, first + "~"):
                of = _parsed(key, key.removeprefix(first).partition("/")[0])
                if of != number and parts:
                    yield number, parts
                number, parts = of, value if of != number else parts + value
        except EtcdProblem as problem:
            raise LeadershipLost(f"cannot read the journal in etcd: {problem}") from None
        if parts:
            yield number, parts

    def append(self, entries: Sequence[bytes]) -> None:
        """All of them, durable, or JournalProblem; then nobody may decide any more."""
        if not entries:
            return
        for entry in entries:
            if len(entry) > ENTRY_BYTES_MAX:
                raise JournalBroken(f"entry of {len(entry)} bytes, limit {ENTRY_BYTES_MAX}")
        batch = pack(entries)
        parts = [batch[at : at + PART_BYTES_MAX] for at in range(0, len(batch), PART_BYTES_MAX)]
        folder = f"{self._prefix}/journal/{self._head + 1:016d}"
        for index, part in enumerate(parts[:-1]):
            self._commit([self._mine], [put(f"{folder}/{index:04d}", part)])
        last = f"{folder}/{len(parts) - 1:04d}"
        head = f"{self._prefix}/head"
        was = is_value(head, str(self._head).encode()) if self._head else is_absent(head)
        what = [put(last, parts[-1]), put(head, str(self._head + 1).encode())]
        # what an append that failed may have left of this batch's number
        self._commit([self._mine, was], [*what, delete_between(last + "\0", folder + "/~")])
        self._head += 1

    def _commit(self, compare: list[dict[str, object]], success: list[dict[str, object]]) -> None:
        """Repeated until its outcome is known, or we may not lead any more."""
        failure = [read(self._leadership.key), read(f"{self._prefix}/head")]
        while True:
            self._leadership.require()
            try:
                done, answers = self._etcd.transaction(compare, success, failure)
            except EtcdFull as problem:
                raise JournalFull(
                    f"no space in etcd for the journal ({problem}): compact and defragment it, or give it a larger"
                    " --quota-backend-bytes, disarm its alarm, and start the coordinator again; training goes on"
                ) from None
            except EtcdProblem:
                time.sleep(min(RETRY_S, max(self._leadership.left_s, 0.0)))
                continue
            if done or self._went_through(answers):
                return

    def _went_through(self, answers: list[dict[str, dict[str, list[dict[str, str]]]]]) -> bool:
        """It was refused: because it was done before (an answer was lost), or because we do not lead."""
        leader, head = (answer.get("response_range", {}).get("kvs", []) for answer in answers)
        revision = value_of(leader[0])[1] if leader else None
        found = _parsed(f"{self._prefix}/head", value_of(head[0])[0]) if head else 0
        outcome = refused_append(revision, self._leadership.revision, found, self._head)
        if outcome == "followed":
            self._leadership.lose()
            raise LeadershipLost("another coordinator leads: what was decided last was not written")
        if outcome == "broken":
            raise JournalBroken(f"the journal's head in etcd is {found}, and should be {self._head + 1} at most")
        return True

    def _read_head(self) -> int:
        try:
            found = self._etcd.get(f"{self._prefix}/head")
        except EtcdProblem as problem:
            raise LeadershipLost(f"cannot read the journal in etcd: {problem}") from None
        return _parsed(f"{self._prefix}/head", found[0]) if found else 0

    def _read_copying(self) -> str:
        try:
            found = self._etcd.get(f"{self._prefix}/copying")
        except EtcdProblem as problem:
            raise LeadershipLost(f"cannot read the journal in etcd: {problem}") from None
        return found[0].decode(errors="replace") if found else ""

    def close(self) -> None:
        self._leadership.close()
        self._etcd.close()


def pack(entries: Sequence[bytes]) -> bytes:
    data = msgspec.msgpack.encode(list(entries))
    return PLAIN + data if len(data) < PACKED_BYTES_MIN else PACKED + zlib.compress(data, 1)


def unpack(batch: bytes) -> list[bytes]:
    """JournalBroken when it is none."""
    try:
        data = zlib.decompress(batch[1:]) if batch[:1] == PACKED else batch[1:]
        if batch[:1] not in (PLAIN, PACKED):
            raise ValueError(f"batch of version {batch[:1].hex() or 'none'}")
        return msgspec.msgpack.decode(data, type=list[bytes])
    except (ValueError, zlib.error, *UNREADABLE) as error:
        raise JournalBroken(f"the journal in etcd cannot be read: {error}") from None


def _parsed(key: str, text: bytes | str, kind: type[N] = int) -> N:
    """What we keep under this key is a number: whatever else lies there is somebody else's."""
    try:
        number = kind(text)
        if math.isfinite(number) and (kind is float or number >= 0):
            return number
    except (ValueError, OverflowError):
        pass
    shown = repr(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX])
    raise JournalBroken(f"{key!r} in etcd is not unicron's ({shown} is no number of it): give another etcd.prefix")


def cluster_clock_ms(etcd: Etcd, base_ms: float | None = None) -> float:
    """What to add to our monotonic clock, so that all coordinators of the cluster read one clock, as far as their
    wall clocks agree. base_ms: where it begins, unless it began already."""
    key = f"{etcd.settings.prefix}/clock"
    base = repr(base_ms or 0.0).encode()
    _, answers = etcd.transaction([is_absent(key)], [put(key, base), read(key)], [read(key)])
    kept = _parsed(key, value_of(answers[-1]["response_range"]["kvs"][0])[0], float)
    return time.time() * 1000 - time.monotonic() * 1000 - kept


def copy_into(etcd: Etcd, leadership: Leadership, entries: Sequence[bytes], name: str) -> int:
    """The entries of another journal, called name, into one that is empty or was to be a copy; how many. Client and
    leadership are closed."""
    try:
        journal = EtcdJournal(etcd, leadership, copies=f"{len(entries)} entries of {name}")
    except BaseException:
        leadership.close()
        etcd.close()
        raise
    with contextlib.closing(journal):
        cluster_clock_ms(etcd, (time.time() - time.monotonic()) * 1000)  # goes on with the clock of this machine
        for at in range(0, len(entries), COPIED_TOGETHER_MAX):
            journal.append(entries[at : at + COPIED_TOGETHER_MAX])
        journal.end_copy()
    return len(entries)
