"""Alerts to a webhook: incidents of some severity, as JSON by HTTP POST, beside the coordinator's loop.

Sent when an incident is opened, when its severity rises, and when it is over. One thread with a bounded queue: a server
that is slow or away costs alerts (counted, and logged), never a decision. Each alert is tried a few times; what the
server refuses (4xx) is not tried again. urllib, because a POST is all there is to it.
"""

from __future__ import annotations

import logging
import queue
import threading
import urllib.error
import urllib.request
from typing import Any

import msgspec

from unicron.coordinator.incident import Incident
from unicron.types import Severity

QUEUED_MAX = 1_000
TRIES_MAX = 4
PAUSE_S = 1.0  # doubled after every try
LOUD = (Severity.FATAL, Severity.SEV1, Severity.SEV2, Severity.SEV3, Severity.INFO)  # the gravest first

log = logging.getLogger("unicron.webhook")


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    url: str  # http:// or https://
    severity: Severity = Severity.SEV1  # this and graver
    timeout_s: float = 5.0
    headers: dict[str, str] = {}  # Authorization ...

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"webhook url {self.url!r} does not begin with http:// or https://")
        if not 0 < self.timeout_s <= 60:
            raise ValueError(f"webhook timeout_s {self.timeout_s:g} is not in (0, 60]")


class Webhook:
    def __init__(self, settings: WebhookSettings, pause_s: float = PAUSE_S) -> None:
        self._settings, self._pause_s = settings, pause_s
        self._queue: queue.Queue[Incident] = queue.Queue(QUEUED_MAX)
        self._told: dict[str, tuple[Severity, bool]] = {}  # incident -> (severity, is over) as it was told
        self._stop = threading.Event()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name="unicron-webhook", daemon=True)
        self._thread.start()

    def note(self, incident: Incident) -> None:
        """Never blocks."""
        if LOUD.index(incident.severity) > LOUD.index(self._settings.severity):
            return
        told = (incident.severity, not incident.is_open)
        if self._told.get(incident.id) == told:
            return
        if len(self._told) > 2 * QUEUED_MAX:
            self._told.clear()
        self._told[incident.id] = told
        try:
            self._queue.put_nowait(incident)
        except queue.Full:
            self._drop(incident, "too many alerts wait")

    def _drop(self, incident: Incident, why: str) -> None:
        self.num_dropped += 1
        log.error("alert of %s (%s) is not told: %s", incident.id, incident.fault, why)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                incident = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            self._tell(incident)

    def _tell(self, incident: Incident) -> None:
        why = ""
        for attempt in range(TRIES_MAX):
            if attempt and self._stop.wait(self._pause_s * 2 ** (attempt - 1)):
                break
            try:
                request = urllib.request.Request(
                    self._settings.url, msgspec.json.encode(alert(incident)), method="POST",
                    headers={"Content-Type": "application/json", **self._settings.headers},
                )  # fmt: skip
                with urllib.request.urlopen(request, timeout=self._settings.timeout_s):
                    return
            except urllib.error.HTTPError as problem:
                why = f"the server answers {problem.code}"
                problem.close()
                if 400 <= problem.code < 500 and problem.code != 429:
                    break
            except (OSError, ValueError) as problem:
                why = str(problem)
        self._drop(incident, why)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(self._settings.timeout_s + 1.0)


def alert(incident: Incident) -> dict[str, Any]:
    """`text` is what chat systems show; the rest is for programs."""
    where = f" on {incident.node}" if incident.node else ""
    task = f", task {incident.task}" if incident.task else ""
    cause = incident.meaning or incident.cause or incident.text
    state = "open" if incident.is_open else str(incident.outcome)
    return {
        "text": f"{incident.severity}: {incident.fault}{where}{task}: {cause} ({incident.id}, {state})"[:1000],
        "id": incident.id,
        "severity": incident.severity,
        "fault": incident.fault,
        "state": state,
        "task": incident.task,
        "node": incident.node,
        "rank": incident.rank,
        "cause": incident.cause[:1000],
        "category": incident.category,
        "meaning": incident.meaning,
    }
