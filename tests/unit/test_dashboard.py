"""The dashboard's server: who may look, what is pushed, and that only changes are."""

from __future__ import annotations

import http.client
import json
import queue
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusters import eventually
from several import Cluster
from unicron.messages import WorkerStatus
from unicron.runtime.dashboard import COOKIE, VIEWERS_MAX, Dashboard, DashboardProblem
from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.dashboard_view import SLICE, Looks, Snapshot, difference
from unicron.types import Stage

TOKEN = "0123456789abcdef0123456789"


def new_snapshot(**parts: Any) -> Snapshot:
    return {"cluster": {"now_ms": 1.0, "flop": 2.0, "waf": 0.0}, "tasks": {}, "nodes": {}, "incidents": {}, **parts}


class Loop:
    """A daemon's loop that serves nothing else."""

    def __init__(self, settings: DashboardSettings) -> None:
        self.now = new_snapshot(nodes={"n0": ["up", 2, [], 0, ""]})
        self.stands = False
        self.num_looks = 0
        self.dashboard = Dashboard(settings, self._look)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    def _look(self) -> Snapshot:
        self.num_looks += 1
        if self.stands:
            raise RuntimeError("the look fails")
        return self.now

    def _turn(self) -> None:
        while not self._is_over.is_set():
            if select.select([self.dashboard.fileno()], [], [], 0.02)[0]:
                self.dashboard.serve()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(5)
        self.dashboard.close()

    # ------------------------------------------------------------ a browser's side

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        line = http.client.HTTPConnection(self.dashboard.address, timeout=10)
        try:
            line.request("GET", path, headers=headers)
            answer = line.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            line.close()

    @contextmanager
    def events(self) -> Iterator[queue.Queue[tuple[str, Any]]]:
        line = http.client.HTTPConnection(self.dashboard.address, timeout=20)
        line.request("GET", "/events")
        sock = line.sock  # the answer takes it over
        answer = line.getresponse()
        assert answer.status == 200 and answer.getheader("Content-Type") == "text/event-stream"
        found: queue.Queue[tuple[str, Any]] = queue.Queue()

        def read() -> None:
            name = ""
            while text := answer.readline():
                word, _, value = text.decode().strip().partition(": ")
                if word == "event":
                    name = value
                elif word == "data":
                    found.put((name, json.loads(value)))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield found
        finally:
            sock.shutdown(2)
            reader.join(5)
            answer.close()
            line.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop(DashboardSettings("127.0.0.1:0"))
    yield made
    made.close()


def test_a_viewer_gets_everything_and_then_what_changed(loop: Loop) -> None:
    with loop.events() as events:
        name, state = events.get(timeout=10)
        assert name == "state" and state["nodes"] == {"n0": ["up", 2, [], 0, ""]}
        loop.now = new_snapshot(nodes={"n0": ["lost", 2, [], 0, ""], "n1": ["up", 2, [], 0, ""]})
        loop.dashboard.changed()
        name, change = events.get(timeout=10)
        assert name == "change" and set(change["nodes"]) == {"n0", "n1"} and "tasks" not in change
        with loop.events() as others:  # who comes later gets all of it at once
            name, state = others.get(timeout=10)
            assert name == "state" and state["nodes"]["n0"][0] == "lost"
        loop.stands = True
        name, said = events.get(timeout=10)
        assert name == "stale" and "the look fails" in said["why"]
        loop.stands = False
        loop.now = new_snapshot(nodes={})
        loop.dashboard.changed()
        while name != "change":
            name, change = events.get(timeout=10)
        assert change["nodes"] == {"n0": None, "n1": None}


def test_without_a_viewer_nobody_looks(loop: Loop) -> None:
    with loop.events() as events:
        events.get(timeout=10)
    eventually(lambda: loop.dashboard._publisher is None, 20)
    looks = loop.num_looks
    loop.dashboard.changed()
    assert loop.get("/")[0] == 200 and loop.num_looks == looks


def test_the_page_and_its_limits(loop: Loop) -> None:
    status, headers, body = loop.get("/")
    assert status == 200 and b"dashboard.js" in body and "default-src 'none'" in headers["Content-Security-Policy"]
    assert loop.get("/dashboard.js")[0] == loop.get("/dashboard.css")[0] == 200
    assert loop.get("/../dashboard.py")[0] == loop.get("/metrics")[0] == 404
    assert loop.get("/", Host="attacker.example")[0] == 403  # a page of another site that resolves to us
    assert loop.get("/", Host="localhost:1")[0] == 200
    line = http.client.HTTPConnection(loop.dashboard.address, timeout=10)
    line.request("POST", "/", body=b"x")
    assert line.getresponse().status == 405
    line.close()


def test_more_viewers_than_there_are_places_are_told(loop: Loop) -> None:
    loop.dashboard._viewers = {number: queue.Queue() for number in range(VIEWERS_MAX)}
    assert loop.get("/events")[0] == 503
    loop.dashboard._viewers = {}


def test_outside_loopback_a_token_is_wanted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    loop = Loop(DashboardSettings("127.0.0.1:0", str(path)))
    try:
        for _ in range(3):
            assert loop.get("/")[0] == loop.get("/events")[0] == 403
        assert loop.get("/?token=wrong")[0] == loop.get("/", Authorization="Bearer wrong")[0] == 403
        assert caplog.text.count("a token is wanted") == 1 and TOKEN not in caplog.text  # said once
        assert loop.get("/", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = loop.get(f"/?token={TOKEN}")
        assert status == 303 and headers["Location"] == "/" and "HttpOnly" in headers["Set-Cookie"]
        assert loop.get("/", Cookie=f"{COOKIE}={TOKEN}", Host="cluster.example")[0] == 200
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("listen", "token", "mode", "said"),
    [
        ("0.0.0.0:0", None, 0, "which others reach"),
        ("127.0.0.1:0", TOKEN, 0o644, "chmod 600"),
        ("127.0.0.1:0", "short", 0o600, "16 letters and digits at least"),
    ],
)
def test_what_would_be_open_is_refused(tmp_path: Path, listen: str, token: str | None, mode: int, said: str) -> None:
    path = tmp_path / "token"
    if token is not None:
        path.write_text(token)
        path.chmod(mode)
    with pytest.raises(DashboardProblem, match=said):
        Dashboard(DashboardSettings(listen, str(path) if token is not None else ""), new_snapshot)
    with pytest.raises(DashboardProblem, match="No such file"):
        Dashboard(DashboardSettings("127.0.0.1:0", str(tmp_path / "none")), new_snapshot)


def test_the_view_of_a_cluster() -> None:
    cluster = Cluster(nodes=2, slots=2)
    cluster.run("a", 3)
    state = cluster.machine.state
    worker = state.tasks["a"].plan.members[0].worker  # type: ignore[union-attr]
    seen = {worker: WorkerStatus("a", worker, 1, 9, 0, False, True, 1, Stage.COMPUTE, 7, loss=1.5)}
    looks = Looks()
    first = looks.look(state, seen, 10.0)
    assert sum(len(node[2]) for node in first["nodes"].values()) == 3
    assert {tuple(slot[::2]) for node in first["nodes"].values() for slot in node[2]} == {("a", "training")}
    assert sorted(slot[1] for node in first["nodes"].values() for slot in node[2]) == [0, 1, 2]
    assert first["tasks"]["a"]["loss"] == 1.5 and first["tasks"]["a"]["slots"] == 3
    json.dumps(first)
    assert difference(first, {**looks.look(state, seen, 10.0), "cluster": {**first["cluster"], "now_ms": 11.0}}) == {}
    cluster.lose("n1")
    second = looks.look(state, seen, 12.0)
    change = difference(first, second)
    assert change["nodes"]["n1"][0] == "lost" and change["incidents"] and change["cluster"]["slots"] == 2
    assert next(iter(second["incidents"].values()))["timeline"]


def test_nodes_of_a_large_cluster_come_in_slices() -> None:
    cluster = Cluster(nodes=2, slots=2)
    cluster.run("a", 2)
    state = cluster.machine.state
    for index in range(3 * SLICE):
        state.nodes[f"m{index}"] = replace(state.nodes["n0"], name=f"m{index}")
    looks = Looks()
    seen = [len(looks.look(state, {}, 1.0)["nodes"]) for _ in range(5)]
    assert seen == [0, 0, 0, 3 * SLICE + 2, 3 * SLICE + 2]
    assert looks.look(state, {}, 1.0)["tasks"]["a"]["slots"] == 2
