"""A message to a server that is not there, or refuses the key: no send waits for ever."""

from __future__ import annotations

import time

import pytest
import zmq

from unicron.runtime import client as client_module
from unicron.runtime import keys
from unicron.runtime.client import CoordinatorClient, CoordinatorSilent
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import SEND_MS_MAX, call_curve

pytestmark = pytest.mark.timeout(30)


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
