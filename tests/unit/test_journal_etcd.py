"""The journal in a real etcd: in order, whole or not at all, and written by the one that leads only."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from clusters import eventually
from etcd_members import EtcdMembers, Wire
from unicron.runtime import journal_etcd
from unicron.runtime.coordinator_settings import EtcdSettings
from unicron.runtime.election import Leadership, try_to_lead
from unicron.runtime.etcd import Etcd, put
from unicron.runtime.journal_etcd import EtcdJournal, cluster_clock_ms, copy_into
from unicron.runtime.journal_problem import JournalBroken, JournalFull, LeadershipLost

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdMembers]:
    """Three members for all tests of this file; each test has a prefix of its own."""
    with EtcdMembers(tmp_path_factory.mktemp("etcd")) as members:
        yield members


@pytest.fixture
def settings(etcd: EtcdMembers, request: pytest.FixtureRequest) -> EtcdSettings:
    return etcd.settings(prefix=request.node.name)


def lead(settings: EtcdSettings) -> Leadership:
    client = Etcd(settings)
    found = try_to_lead(client, "us")
    client.close()
    assert isinstance(found, Leadership), found
    return found


def opened(settings: EtcdSettings, leadership: Leadership | None = None) -> EtcdJournal:
    return EtcdJournal(Etcd(settings), leadership or lead(settings))


def test_entries_come_back_in_order(settings: EtcdSettings) -> None:
    journal = opened(settings)
    assert journal.is_empty and list(journal.entries()) == []
    journal.append([b"a", b"b"])
    journal.append([])
    journal.append([bytes([n]) for n in range(256)] * 4)
    journal.close()
    again = opened(settings)  # the lease was given back: at once
    assert not again.is_empty
    assert list(again.entries()) == [b"a", b"b", *([bytes([n]) for n in range(256)] * 4)]
    again.close()


def test_a_step_larger_than_a_request_is_whole(settings: EtcdSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = [bytes((n * 7919 + i) % 251 for i in range(40_000)) for n in range(4)]
    monkeypatch.setattr(journal_etcd, "PART_BYTES_MAX", 100)
    journal = opened(settings)
    journal.append(noise)
    journal.append([b"next"])
    assert list(journal.entries()) == [*noise, b"next"]
    journal.close()


def test_one_leader_at_a_time(settings: EtcdSettings) -> None:
    first = lead(settings)
    client = Etcd(settings)
    assert try_to_lead(client, "another") == "us"
    first.close()
    second = try_to_lead(client, "another")
    assert isinstance(second, Leadership) and second.revision > first.revision
    with pytest.raises(LeadershipLost):
        first.require()
    second.require()
    second.close()
    client.close()


def test_who_was_followed_writes_nothing_more(settings: EtcdSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock stands still, so that it believes that it leads: the transaction itself refuses."""
    old = lead(settings)
    first = opened(settings, old)
    first.append([b"mine"])
    monkeypatch.setattr(old._term, "_until_ms", float("inf"))
    client = Etcd(settings)
    client.post("/kv/deleterange", {"key": journal_etcd.put(old.key, b"")["request_put"]["key"]})  # as if it ran out
    second = opened(settings)
    second.append([b"theirs"])
    with pytest.raises(LeadershipLost, match="not written"):
        first.append([b"stale"])
    with pytest.raises(LeadershipLost):  # it knows from then on
        old.require()
    assert list(second.entries()) == [b"mine", b"theirs"]
    for each in (second, first, client):
        each.close()


def test_an_answer_that_was_lost_is_not_written_twice(settings: EtcdSettings) -> None:
    journal = opened(settings)
    real, calls = journal._etcd.transaction, []

    def lossy(*arguments: object) -> object:
        answer = real(*arguments)  # type: ignore[arg-type]
        calls.append(answer[0])
        if len(calls) == 1:
            raise journal_etcd.EtcdProblem("the answer is lost")
        return answer

    journal._etcd.transaction = lossy  # type: ignore[method-assign, assignment]
    journal.append([b"once"])
    journal.append([b"then"])
    assert calls == [True, False, True]
    assert list(journal.entries()) == [b"once", b"then"]
    journal.close()


def test_what_a_failed_append_left_behind_does_not_count(settings: EtcdSettings) -> None:
    journal = opened(settings)
    journal.append([b"a"])
    leftover = [put(f"{settings.prefix}/journal/{2:016d}/{part:04d}", b"torn") for part in range(3)]
    journal._etcd.transaction([], leftover, [])
    assert list(journal.entries()) == [b"a"]
    journal.append([b"b"])
    assert list(journal.entries()) == [b"a", b"b"]
    journal.close()


def test_a_journal_with_a_hole_is_refused(settings: EtcdSettings) -> None:
    journal = opened(settings)
    for text in (b"a", b"b", b"c"):
        journal.append([text])
    hole = put(f"{settings.prefix}/journal/{2:016d}/0000", b"")["request_put"]["key"]
    journal._etcd.post("/kv/deleterange", {"key": hole})
    with pytest.raises(JournalBroken, match="batch 2"):
        list(journal.entries())
    journal.close()


@pytest.mark.parametrize(
    ("key", "value"),
    [("head", b"abc"), ("head", b"-1"), ("head", b"\xff"), ("head", b"9" * 400), ("journal/foo", b"x"),
     ("journal/f\udcff", b"x"), ("clock", b"noon"), ("clock", b"nan")],
)  # fmt: skip
def test_what_another_program_keeps_there_is_named(settings: EtcdSettings, key: str, value: bytes) -> None:
    settings = msgspec.structs.replace(settings, prefix=f"strangers/{key}/{value[:9]!r}")
    client = Etcd(settings)
    client.transaction([], [put(f"{settings.prefix}/{key}", value)], [])
    leadership = lead(settings)
    with pytest.raises(JournalBroken, match=r"in etcd is not unicron's .*: give another etcd.prefix"):
        with contextlib.closing(EtcdJournal(Etcd(settings), leadership)) as journal:
            list(journal.entries())
            cluster_clock_ms(client)
    leadership.close()
    client.close()


def test_a_leader_that_is_cut_off_stops_before_it_is_followed(etcd: EtcdMembers, settings: EtcdSettings) -> None:
    wires = [Wire(endpoint) for endpoint in etcd.endpoints]
    here = etcd.settings(prefix=settings.prefix, endpoints=tuple(wire.address for wire in wires))
    leadership = lead(here)
    journal = opened(here, leadership)
    journal.append([b"a"])
    for wire in wires:
        wire.cut()
    cut_s = time.monotonic()
    client = Etcd(settings)
    stopped: list[float] = []

    def write() -> None:
        try:
            journal.append([b"never"])
        except LeadershipLost:
            stopped.append(time.monotonic())

    writer = threading.Thread(target=write)
    writer.start()
    while isinstance(try_to_lead(client, "b"), str):
        assert time.monotonic() - cut_s < 30
        time.sleep(0.05)
    assert leadership.left_s <= 0  # it did not act any more
    writer.join(20)
    assert stopped
    for wire in wires:
        wire.mend()
        wire.close()
    journal.close()
    client.close()


def test_a_member_that_dies_is_passed_by(etcd: EtcdMembers, settings: EtcdSettings) -> None:
    journal = opened(settings)
    journal.append([b"a"])
    etcd.kill(0)
    try:
        journal.append([b"b"])
        assert list(journal.entries()) == [b"a", b"b"]
    finally:
        etcd.start(0)
        etcd.wait_until_up()
    journal.close()


def test_a_full_etcd_says_what_to_do(tmp_path: Path) -> None:
    with EtcdMembers(tmp_path, 1, "--quota-backend-bytes", str(1 << 20)) as small:
        journal = opened(small.settings())
        kept = 0
        with pytest.raises(JournalFull, match="compact and defragment"):
            for number in range(100):
                journal.append([random.Random(number).randbytes(200_000)])  # which do not pack
                kept += 1
        assert len(list(journal.entries())) == kept >= 1
        journal.close()


def test_copied_entries_and_the_clock_go_on(settings: EtcdSettings) -> None:
    entries = [b"%d" % number for number in range(1000)]
    assert copy_into(Etcd(settings), lead(settings), entries, "a.db") == 1000
    client = Etcd(settings)
    assert abs(cluster_clock_ms(client)) < 1000  # the times in them are of this machine's monotonic clock
    with pytest.raises(JournalBroken, match="already"):
        copy_into(Etcd(settings), lead(settings), entries, "a.db")
    journal = opened(settings)
    assert list(journal.entries()) == entries
    journal.close()
    client.close()


@pytest.mark.parametrize("batches", [0, 1, 3])  # of four
def test_a_copy_that_was_interrupted_is_no_journal_until_it_is_made_again(
    settings: EtcdSettings, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its third batch, it left a journal that a coordinator began with: 59,234 decisions were lost."""
    entries = [b"%d" % number for number in range(1000)]
    with monkeypatch.context() as patch:
        append, done = EtcdJournal.append, []

        def until_killed(journal: EtcdJournal, some: list[bytes]) -> None:
            if len(done) == batches:
                raise KeyboardInterrupt
            append(journal, some)
            done.append(some)

        patch.setattr(EtcdJournal, "append", until_killed)
        with pytest.raises(KeyboardInterrupt):
            copy_into(Etcd(settings), lead(settings), entries, "a.db")
    begins = lead(settings)
    with pytest.raises(JournalBroken, match=r"1000 entries of a\.db was interrupted: run .*--copy-from"):
        opened(settings, begins)
    begins.close()
    assert copy_into(Etcd(settings), lead(settings), entries, "a.db") == 1000
    journal = opened(settings)
    assert list(journal.entries()) == entries
    journal.close()


def test_a_leader_that_was_only_late_goes_on(etcd: EtcdMembers, settings: EtcdSettings) -> None:
    """Its own clock says that somebody may lead by now; etcd says that its lease never ran out."""
    leadership = lead(settings)
    granted_ms = leadership._term._until_ms
    eventually(lambda: leadership._term._until_ms > granted_ms, 10)  # the next refresh is a second away
    leadership._term._until_ms = 0.0
    leadership.require()
    assert leadership.left_s > 0
    leadership._etcd.revoke(leadership._lease)
    leadership._term._until_ms = 0.0
    with pytest.raises(LeadershipLost):
        leadership.require()
    leadership.close()
