"""The rendezvous store: table alone (no clock, no socket), then over CURVE."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from unicron.runtime import keys
from unicron.runtime.store_client import (
    Cancelled,
    StaleEpoch,
    StoreClient,
    StoreError,
    StoreTimeout,
)
from unicron.runtime.store_server import PortInUse, StoreServer, StoreThread
from unicron.runtime.store_table import KEYS_MAX, StoreTable
from unicron.runtime.store_wire import Op, Status, StoreRequest

pytestmark = pytest.mark.timeout(30)


# type: ignore[no-untyped-def]
def ask(table: StoreTable, op: Op, keys: list[str], values=(), **more: int):
    request = StoreRequest(op, more.pop("request", 1), keys, list(values), **more)
    return table.request(b"p", request, 0)


def test_waiters_are_answered_when_the_last_key_arrives() -> None:
    table = StoreTable()
    assert ask(table, Op.GET, ["t/1/a", "t/1/b"], request=7, timeout_ms=1000) == []
    assert [r.request for _, r in ask(table, Op.SET, ["t/1/a"], [b"A"], request=8)] == [8]
    replies = ask(table, Op.SET, ["t/1/b"], [b"B"], request=9)
    assert [(r.request, r.values) for _, r in replies] == [(7, [b"A", b"B"]), (9, [])]
    assert table.num_waiters == 0


def test_waiting_is_bounded() -> None:
    table = StoreTable()
    ask(table, Op.WAIT, ["t/1/a"], timeout_ms=100)
    assert table.next_deadline_ms() == 100
    assert table.expire(99) == []
    assert [r.status for _, r in table.expire(100)] == [Status.TIMEOUT]
    assert table.next_deadline_ms() is None


def test_old_epochs_are_dropped_and_their_waiters_told() -> None:
    table = StoreTable()
    ask(table, Op.SET, ["t/1/a"], [b"x"])
    ask(table, Op.SET, ["other/1/a"], [b"x"])
    ask(table, Op.GET, ["t/1/b"], timeout_ms=1000)
    assert table.announce("t", 2) == []  # the previous epoch still serves what is being built
    assert [r.status for _, r in table.announce("t", 3)] == [Status.STALE]
    assert table.num_keys == 1
    assert ask(table, Op.SET, ["t/1/a"], [b"x"])[0][1].status is Status.STALE
    assert ask(table, Op.SET, ["t/2/a"], [b"x"])[0][1].status is Status.OK


def test_add_compare_set_check_delete_append_num_keys() -> None:
    table = StoreTable()
    assert ask(table, Op.ADD, ["t/1/n"], number=3)[0][1].number == 3
    assert ask(table, Op.ADD, ["t/1/n"], number=-1)[0][1].number == 2
    assert ask(table, Op.COMPARE_SET, ["t/1/c"], [b"", b"new"])[0][1].values == [b"new"]
    assert ask(table, Op.COMPARE_SET, ["t/1/c"], [b"other", b"x"])[0][1].values == [b"new"]
    assert ask(table, Op.CHECK, ["t/1/n", "t/1/c"])[0][1].number == 1
    assert ask(table, Op.NUM_KEYS, ["t/1/"])[0][1].number == 2
    assert ask(table, Op.DELETE, ["t/1/n"])[0][1].number == 1
    assert ask(table, Op.CHECK, ["t/1/n"])[0][1].number == 0
    ask(table, Op.APPEND, ["t/1/c"], [b"!"])
    assert ask(table, Op.GET, ["t/1/c"])[0][1].values == [b"new!"]


@pytest.mark.parametrize("key", ["a", "t/x/a", "t/1/", "/1/a", "t/1/" + "k" * 2000])
def test_bad_keys_are_refused_by_name(key: str) -> None:
    assert ask(StoreTable(), Op.SET, [key], [b""])[0][1].status is Status.REFUSED


def test_a_full_store_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KEYS_MAX > 1000
    monkeypatch.setattr("unicron.runtime.store_table.KEYS_MAX", 1)
    table = StoreTable()
    ask(table, Op.SET, ["t/1/a"], [b"x"])
    assert ask(table, Op.SET, ["t/1/b"], [b"x"])[0][1].status is Status.FULL


# ---------------------------------------------------------------- over ZeroMQ


SERVER, WORKER = keys.generate(), keys.generate()


@pytest.fixture
def store() -> Iterator[StoreThread]:
    thread = StoreThread({WORKER.public: "worker"}, SERVER.secret)
    yield thread
    thread.close()


@pytest.fixture
def client(store: StoreThread) -> Iterator[StoreClient]:
    client = StoreClient(store.endpoint, SERVER.public, WORKER.public, WORKER.secret)
    yield client
    client.close()


def test_round_trip(client: StoreClient) -> None:
    client.set("t/1/a", b"A")
    assert client.get("t/1/a", 1000) == b"A"
    assert client.add("t/1/n", 5) == 5
    assert client.check(["t/1/a", "t/1/n"]) and not client.check(["t/1/b"])
    assert client.compare_set("t/1/a", b"A", b"B") == b"B"
    assert client.num_keys("t/1/") == 2
    assert client.delete("t/1/a") and not client.delete("t/1/a")


def test_a_waiting_thread_does_not_keep_another_from_setting(client: StoreClient) -> None:
    got: list[bytes] = []
    waiter = threading.Thread(target=lambda: got.append(client.get("t/1/late", 5000)))
    waiter.start()
    time.sleep(0.05)
    client.set("t/1/late", b"here")
    waiter.join(5)
    assert got == [b"here"]


def test_a_wait_can_be_broken_off(client: StoreClient, store: StoreThread) -> None:
    start = time.monotonic()
    with pytest.raises(Cancelled):
        client.get("t/1/never", 10_000, lambda: time.monotonic() - start > 0.05)
    assert time.monotonic() - start < 9
    client.check(["t/1/a"])  # in order behind the cancellation
    assert store.server.table.num_waiters == 0


def test_timeout_and_stale_are_named(client: StoreClient, store: StoreThread) -> None:
    with pytest.raises(StoreTimeout, match="t/1/never"):
        client.wait(["t/1/never"], 50)
    store.server.table.announce("t", 5)
    with pytest.raises(StaleEpoch):
        client.get("t/1/never", 1000)
    client.set("t/1/old", b"")
    with pytest.raises(StaleEpoch, match="earlier set"):
        for _ in range(100):
            client.check(["t/5/a"])


def test_a_key_that_is_not_admitted_gets_nothing(store: StoreThread) -> None:
    stranger = keys.generate()
    client = StoreClient(store.endpoint, SERVER.public, stranger.public, stranger.secret)
    for _ in range(3):  # once the handshake is refused nothing can be sent any more, which is no other error
        with pytest.raises(StoreTimeout):
            client.ping(200)
    client.close()


def test_garbage_does_not_hurt(store: StoreThread, client: StoreClient) -> None:
    for frames in ([b""], [b"\x01"], [b"\x09abc"], [b"a", b"b", b"c"], [b"\x01" + b"\xff" * 100]):
        client._socket.send_multipart(frames)
    client.set("t/1/a", b"A")
    assert client.get("t/1/a", 1000) == b"A"
    assert store.server.num_refused == 5


def test_a_closed_store_ends_waits_in_time(store: StoreThread, client: StoreClient) -> None:
    threading.Timer(0.1, store.close).start()
    with pytest.raises(StoreError):
        client.get("t/1/never", 5000)


def test_port_in_use_is_named() -> None:
    context: zmq.Context = zmq.Context()
    first = StoreServer(context, SERVER.secret)
    port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(PortInUse, match=str(port)):
        StoreServer(context, SERVER.secret, port=port)
    first.close()
    context.term()
