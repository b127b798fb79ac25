"""Alerts reach a real HTTP server; one that is slow, broken or away costs alerts and nothing else."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron.coordinator.incident import Incident
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.files import FileProblem, load_yaml
from unicron.runtime.webhook import QUEUED_MAX, Webhook, WebhookSettings
from unicron.types import Method, Outcome, Severity

pytestmark = pytest.mark.timeout(30)

OPEN = Incident(
    id="i1", task="gpt", fault="node lost", severity=Severity.SEV1, node="n3", rank=5, method=Method.CONNECTION,
    opened_ms=1.0, cause="its store endpoint refuses connections",
)  # fmt: skip


class Server:
    """Answers with the codes it is given, then 200; keeps what came."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.headers.append(dict(self.headers))
                outer.bodies.append(json.loads(body))
                self.send_response(outer.codes.pop(0) if outer.codes else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/alerts"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def wait(self, count: int) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 15
        while len(self.bodies) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.bodies

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def test_an_incident_is_told_when_it_opens_rises_and_ends(server: Server) -> None:
    hook = Webhook(WebhookSettings(server.url, headers={"Authorization": "Bearer s"}), pause_s=0.01)
    try:
        hook.note(msgspec.structs.replace(OPEN, severity=Severity.SEV2))  # not grave enough
        hook.note(OPEN)
        hook.note(msgspec.structs.replace(OPEN, decide_ms=4.0))  # nothing that people must know
        hook.note(msgspec.structs.replace(OPEN, severity=Severity.FATAL))
        hook.note(msgspec.structs.replace(OPEN, severity=Severity.FATAL, outcome=Outcome.STOPPED))
        bodies = server.wait(3)
    finally:
        hook.close()
    assert [(b["severity"], b["state"]) for b in bodies] == [("SEV1", "open"), ("FATAL", "open"), ("FATAL", "stopped")]
    assert "node lost on n3, task gpt" in bodies[0]["text"] and bodies[0]["rank"] == 5
    assert server.headers[0]["Authorization"] == "Bearer s"


def test_a_server_in_trouble_is_tried_again_and_one_that_refuses_is_not(server: Server) -> None:
    server.codes = [503, 429, 200, 404]
    hook = Webhook(WebhookSettings(server.url), pause_s=0.01)
    try:
        hook.note(OPEN)
        server.wait(3)
        hook.note(msgspec.structs.replace(OPEN, id="i2"))
        server.wait(4)
        hook.note(msgspec.structs.replace(OPEN, id="i3"))
        ids = [body["id"] for body in server.wait(5)]
    finally:
        hook.close()
    assert ids == ["i1", "i1", "i1", "i2", "i3"] and hook.num_dropped == 1


def test_nobody_there_costs_alerts_and_no_time() -> None:
    with socket.socket() as silent:  # accepts, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        hook = Webhook(WebhookSettings(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2), pause_s=0.01)
        begun = time.monotonic()
        for number in range(QUEUED_MAX + 10):
            hook.note(msgspec.structs.replace(OPEN, id=f"i{number}"))
        assert time.monotonic() - begun < 0.2 * QUEUED_MAX / 4  # four times less than waiting for each
        assert hook.num_dropped >= 9
        hook.close()


def test_settings_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.yaml"
    path.write_text("webhook: {url: 'ftp://127.0.0.1'}\n")
    with pytest.raises(FileProblem, match="http"):
        load_yaml(path, CoordinatorSettings)
    path.write_text("webhook: {url: 'http://127.0.0.1', severity: SEV2}\n")
    settings = load_yaml(path, CoordinatorSettings)
    assert settings.webhook is not None and settings.webhook.severity is Severity.SEV2
