"""A request to a coordinator that is not there, refuses the key or does not answer: no wait without a bound."""

from __future__ import annotations

import threading
import time

import pytest
import zmq

from unicron.messages import Reply, Request, decode, encode
from unicron.runtime import client as client_module
from unicron.runtime import keys
from unicron.runtime.client import LOOKS, CoordinatorClient, CoordinatorSilent
from unicron.runtime.requests import VERBS
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import SEND_MS_MAX, Gatekeeper, call_curve, serve_curve

pytestmark = pytest.mark.timeout(30)


class Forgetful(threading.Thread):
    """A coordinator that hears the requests of these numbers and does not answer them: it was stopped, or cut off."""

    def __init__(self, deaf: range, pair: keys.KeyPair, client: keys.KeyPair) -> None:
        super().__init__()
        self.heard: list[str] = []
        self._deaf, self._ends = deaf, threading.Event()
        self._context = zmq.Context()
        self._gate = Gatekeeper(self._context)
        self._gate.admit("clients", client.public, "client")
        self._router = self._context.socket(zmq.ROUTER)
        serve_curve(self._router, pair.secret, "clients", message_bytes_max=10_000)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._gate.socket, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._ends.is_set():
            found = dict(poller.poll(20))
            if self._gate.socket in found:
                self._gate.serve()
            if self._router in found:
                identity, data = self._router.recv_multipart()
                request = decode(data)
                assert isinstance(request, Request)
                self.heard.append(request.verb)
                if len(self.heard) not in self._deaf:
                    self._router.send_multipart([identity, encode(Reply(True, result=len(self.heard)))])

    def __enter__(self) -> Forgetful:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join(10)
        self._context.destroy(linger=0)


def test_a_command_does_not_wait_long_where_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "CONNECT_S_MAX", 0.1)
    with CoordinatorClient("127.0.0.1:1", keys.generate().public, keys.generate()) as client:
        client.refused_s = 0.1
        began = time.monotonic()
        with pytest.raises(CoordinatorSilent, match=r"nothing listens there: is it running"):
            client.ask("ping", timeout_ms=20_000)
        assert time.monotonic() - began < 15


def test_a_look_is_asked_again_and_an_order_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request in flight when the leader changed waited for its whole time."""
    monkeypatch.setattr(client_module, "LOOK_AGAIN_S", 0.5)
    server, pair = keys.generate(), keys.generate()
    with (
        Forgetful(range(1, 3), server, pair) as deaf,
        CoordinatorClient(f"127.0.0.1:{deaf.port}", server.public, pair) as client,
    ):
        assert client.ask("ps") == 3 and deaf.heard == ["ps"] * 3
    with (
        Forgetful(range(2, 3), server, pair) as deaf,
        CoordinatorClient(f"127.0.0.1:{deaf.port}", server.public, pair) as client,
    ):
        assert client.ask("ping") == 1  # the line stands: what follows is sent at once, however slow this machine is
        with pytest.raises(CoordinatorSilent, match="Whether cancel was done is not known"):
            client.ask("cancel", timeout_ms=1000, task="t")
        assert client.ask("ping") == 3 and deaf.heard == ["ping", "cancel", "ping"]  # a late answer would be another's


def test_an_order_is_sent_once_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that ended a fraction of a millisecond early was followed by a second sending, or hid the first."""

    class Slow:
        @staticmethod
        def monotonic() -> float:
            return time.monotonic() / 2  # every wait ends before its time

    server, pair = keys.generate(), keys.generate()
    with (
        Forgetful(range(2, 9), server, pair) as deaf,
        CoordinatorClient(f"127.0.0.1:{deaf.port}", server.public, pair) as client,
    ):
        assert client.ask("ping") == 1
        monkeypatch.setattr(client_module, "time", Slow)
        with pytest.raises(CoordinatorSilent, match="Whether cancel was done is not known"):
            client.ask("cancel", timeout_ms=1000, task="t")
        monkeypatch.undo()
        time.sleep(0.5)
        assert deaf.heard == ["ping", "cancel"]


def test_every_request_is_a_look_or_an_order() -> None:
    assert set(VERBS) > LOOKS
    orders = {"submit", "cancel", "suspend", "resume", "reshape", "drain", "undrain", "inject", "shutdown"}
    assert set(VERBS) - LOOKS == orders


def test_a_caller_with_nothing_to_send_on_is_told() -> None:
    server, pair = keys.generate(), keys.generate()
    dealer = process_context().socket(zmq.DEALER)
    call_curve(dealer, server.public, pair.public, pair.secret, message_bytes_max=100)
    with pytest.raises(zmq.Again):
        dealer.send(b"x")
    assert 0 < dealer.sndtimeo == SEND_MS_MAX
    dealer.close(0)


def test_a_line_that_is_gone_between_the_look_and_the_send(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(zmq.Poller):
        def poll(self, timeout: float | None = None) -> list[tuple[object, int]]:
            time.sleep(0.01)
            return [(socket, zmq.POLLOUT) for socket, _ in self.sockets]

    monkeypatch.setattr(client_module.zmq, "Poller", Hasty)
    with (
        CoordinatorClient("127.0.0.1:1", keys.generate().public, keys.generate()) as client,
        pytest.raises(CoordinatorSilent, match="no answer from the coordinator"),
    ):
        client.ask("ping", timeout_ms=200)
