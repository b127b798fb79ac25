"""Behind the last iteration all leave or all meet, in a real store."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from unicron.runtime import keys
from unicron.runtime.store_client import StoreClient
from unicron.runtime.store_server import StoreThread
from unicron.training import ending

OURS, THEIRS = keys.generate(), keys.generate()
TASK, EPOCH = "t", 3
RANKS = (0, 1, 2)
MS_MAX = 20_000


class Member:
    def __init__(self, store: StoreThread, rank: int, ms_max: int = MS_MAX) -> None:
        self.rank, self.ms_max = rank, ms_max
        self.client = StoreClient(store.endpoint, OURS.public, THEIRS.public, THEIRS.secret)
        self.client.ping()
        self.newer = threading.Event()
        self.leaves: bool | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.leaves = ending.all_leave(self.client, TASK, EPOCH, self.rank, RANKS, self.newer.is_set, self.ms_max)

    def start(self) -> Member:
        self.thread.start()
        return self

    def ended(self) -> bool | None:
        self.thread.join(25.0)
        assert not self.thread.is_alive()
        self.client.close()
        return self.leaves

    def waits(self, seconds: float = 0.3) -> bool:
        self.thread.join(seconds)
        return self.thread.is_alive()


@pytest.fixture
def store() -> Iterator[StoreThread]:
    thread = StoreThread({THEIRS.public: "w"}, OURS.secret)
    yield thread
    thread.close()


def test_all_leave_when_all_have_come(store: StoreThread) -> None:
    members = [Member(store, rank) for rank in RANKS]
    for member in members[:2]:
        assert member.start().waits()
    members[2].start()
    assert [member.ended() for member in members] == [True, True, True]


def test_who_died_while_it_waited_is_not_taken_for_present(store: StoreThread) -> None:
    """Its key is there; the last one comes before an heir is ready."""
    members = [Member(store, rank) for rank in RANKS]
    members[0].client.set("t/3/end/over/0", b"1")
    assert members[0].client.check(["t/3/end/over/0"])
    members[0].client.close()  # killed
    assert members[1].start().waits() and members[2].start().waits()
    for member in members[1:]:
        member.newer.set()
    assert [member.ended() for member in members[1:]] == [False, False]


def test_who_is_broken_off_when_others_left_leaves_too(store: StoreThread) -> None:
    late = Member(store, 1)
    late.client.set("t/3/end/over/1", b"1")
    late.client.set("t/3/end/seen/1", b"1")
    others = [Member(store, rank).start() for rank in (0, 2)]
    assert [member.ended() for member in others] == [True, True]
    late.newer.set()
    assert late.start().ended()


def test_where_one_meets_a_newer_plan_nobody_leaves(store: StoreThread) -> None:
    first = Member(store, 1)
    first.newer.set()
    assert first.start().ended() is False
    late = Member(store, 2, ms_max=300)  # its bound is over before it hears of the plan
    assert late.start().waits(0.6)
    late.newer.set()
    assert late.ended() is False


def test_who_waited_in_vain_leaves_with_all_that_come_later(store: StoreThread) -> None:
    early = Member(store, 0, ms_max=300)
    assert early.start().ended()
    late = Member(store, 1)
    late.newer.set()
    assert late.start().ended()


@pytest.mark.parametrize("comes", [False, True])
def test_without_a_store_a_plan_is_waited_for(monkeypatch: pytest.MonkeyPatch, comes: bool) -> None:
    monkeypatch.setattr(ending, "COMES_S_MAX", 20.0 if comes else 0.5)
    thread = StoreThread({THEIRS.public: "w"}, OURS.secret)
    member = Member(thread, 0).start()
    assert member.waits()
    thread.close()
    if comes:
        assert member.waits()
        member.newer.set()
    assert member.ended() is not comes


def heir(store: StoreThread) -> StoreClient:
    client = StoreClient(store.endpoint, OURS.public, THEIRS.public, THEIRS.secret)
    client.ping()
    return client


@pytest.mark.parametrize("missed", [0, 1, 3])
def test_an_heir_finds_that_all_have_left(store: StoreThread, missed: int) -> None:
    """missed: epochs that came one after the other, and that nobody acted on."""
    members = [Member(store, rank).start() for rank in RANKS]
    assert all(member.ended() for member in members)
    client = heir(store)
    store.server.table.announce(TASK, EPOCH + 1 + missed)
    assert ending.left_in(client, TASK) == EPOCH
    client.close()


def test_an_heir_of_who_is_met_finds_nothing(store: StoreThread) -> None:
    members = [Member(store, rank).start() for rank in RANKS[:2]]
    assert members[0].waits()
    for member in members:
        member.newer.set()
    assert [member.ended() for member in members] == [False, False]
    client = heir(store)
    assert ending.left_in(client, TASK) is None
    client.close()


def test_an_end_before_everybody_went_back_is_none(store: StoreThread) -> None:
    """All left in epoch 3, all were taken back to a checkpoint in 4, and one is lost there."""
    members = [Member(store, rank).start() for rank in RANKS]
    assert all(member.ended() for member in members)
    client = heir(store)
    ending.tell_met(client, TASK, EPOCH + 1)
    assert ending.left_in(client, TASK) is None
    client.close()


def test_a_store_that_is_gone_knows_nothing(store: StoreThread) -> None:
    client = heir(store)
    client.close()
    assert ending.left_in(client, TASK) is None
