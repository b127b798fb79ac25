"""Probes: one of a node at a time, each with an answer."""

from __future__ import annotations

import socket
import time

import pytest

from unicron.runtime import probe
from unicron.runtime.probe import Probes


def test_a_node_is_asked_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again and again while nobody answers, a thousand silent nodes would fill the poller."""
    monkeypatch.setattr(probe, "PROBE_MS_MAX", 60_000)
    with socket.socket() as full:  # accepts nobody: its queue is as short as can be, and taken
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(address)
            fillers.append(filler)
        probes = Probes()
        for _ in range(5):
            probes.begin("n0", f"tcp://127.0.0.1:{address[1]}")
        probes.begin("n1", f"tcp://127.0.0.1:{address[1]}")
        assert len(probes.fds) == 2
        probes.close()
        for filler in fillers:
            filler.close()


def test_a_port_that_nobody_has_is_evidence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    probes = Probes()
    probes.begin("n0", f"tcp://127.0.0.1:{port}")
    found: list[tuple[str, str]] = []
    deadline = time.monotonic() + 5
    while not found and time.monotonic() < deadline:
        found += probes.finished(set(probes.fds))
    assert found == [("n0", "gone")]
    probes.close()
