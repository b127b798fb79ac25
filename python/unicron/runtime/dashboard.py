"""The dashboard: a page that shows the cluster as it is, served by the coordinator that decides.

    GET /          the page (runtime/web), which asks for nothing else
    GET /events    server-sent events: `state` with everything, then `change` with what differs, `stale` when the loop
                   does not answer

It only shows; nothing can be ordered here. On loopback everybody who is on the machine may look, but no page of
another site that a browser was led to (the Host must be loopback's). At any other address a token is wanted, as
`Authorization: Bearer` or once as `/?token=...`, which becomes a cookie. It is not encrypted: outside your own network
put it behind a proxy that is.

One thread looks for all viewers, as often as something changed, and spends a twentieth of the time at most; without a
viewer there is none.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import queue
import stat
import threading
import time
from collections.abc import Callable, Iterator
from http.cookies import CookieError, SimpleCookie
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec

from unicron.runtime.dashboard_settings import DashboardSettings
from unicron.runtime.dashboard_view import Snapshot, difference
from unicron.runtime.endpoints import parse_endpoint
from unicron.runtime.http_server import SHUT_POLL_S, LoopServer, say
from unicron.runtime.loop_questions import LOOK_S_MAX, LoopBusy

VIEWERS_MAX = 32
WAITING_MAX = 64  # messages that one viewer has not taken yet; then it is left, and comes back for a whole state
LOOK_S_MIN = 0.2  # between two looks
QUIET_S = 1.0  # a look although nothing was said to have changed: iterations go on
SHARE_MAX = 0.05  # of the time that looks may take
ALIVE_S = 2.0  # a line to a viewer at least so often, so that one that left is noticed
TOKEN_CHARS_MIN = 16
COOKIE = "unicron_dashboard"
TYPES = {"index.html": "text/html", "dashboard.js": "text/javascript", "dashboard.css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
SAFE = [
    ("Content-Security-Policy", POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]

log = logging.getLogger("unicron.dashboard")


class DashboardProblem(OSError):
    """It cannot be served; one line that says what to do."""


class Dashboard:
    """Poll ``fileno`` for reading and call ``serve`` when it is readable; ``changed`` after what was decided."""

    def __init__(self, settings: DashboardSettings, look: Callable[[], Snapshot]) -> None:
        """look: called in the loop."""
        host, port = parse_endpoint(settings.listen, "dashboard.listen", listens=True)
        self._token = _read_token(settings, host)
        self._look = look
        self._pages = {name: (resources.files("unicron.runtime") / "web" / name).read_bytes() for name in TYPES}
        self._viewers: dict[int, queue.Queue[bytes]] = {}
        self._lock = threading.Lock()
        self._publisher: threading.Thread | None = None
        self._changed = threading.Event()
        self._refused: set[str] = set()  # who was told so in the log
        self._is_open = True
        self._last: Snapshot | None = None
        try:
            self._server = LoopServer(host, port, self._application, "dashboard")
        except (OSError, UnicodeError) as error:
            raise DashboardProblem(
                f"cannot serve the dashboard at {settings.listen}: {getattr(error, 'strerror', None) or error}:"
                " give dashboard.listen another address, or set `dashboard: null` for none"
            ) from None
        self._questions = self._server.questions
        self.address = self._server.address
        log.info("dashboard at http://%s/", self.address)
        self._server.start()

    # ------------------------------------------------------------ the loop's side

    def fileno(self) -> int:
        return self._questions.fileno()

    def serve(self) -> None:
        self._questions.serve()

    def changed(self) -> None:
        if self._viewers and not self._changed.is_set():
            self._changed.set()

    def close(self) -> None:
        self._is_open = False
        self._changed.set()
        self._server.shut()
        publisher = self._publisher
        if publisher is not None:
            publisher.join(LOOK_S_MAX)
        self._questions.close()

    # ------------------------------------------------------------ one thread for all viewers

    def _publish(self) -> None:
        spent_s = 0.0
        while self._is_open:
            self._changed.wait(QUIET_S)
            self._changed.clear()
            with self._lock:
                if not self._viewers:
                    self._publisher = None
                    return
            began_s = time.monotonic()
            try:
                spent_s, now = self._questions.look(self._timed_look)
            except Exception as problem:  # the next look may be good again
                text = str(problem) if isinstance(problem, LoopBusy) else f"cannot look: {problem!r}"
                self._send(event("stale", {"why": text}))
                continue
            last, self._last = self._last, now
            change = difference(last, now) if last is not None else now
            if change:
                clock = {"now_ms": now["cluster"]["now_ms"]}
                self._send(event("change" if last is not None else "state", {**change, **clock}))
            self._pause(max(LOOK_S_MIN, spent_s / SHARE_MAX) - (time.monotonic() - began_s))

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while self._is_open and time.monotonic() < until_s:
            time.sleep(min(SHUT_POLL_S, max(0.0, until_s - time.monotonic())))

    def _timed_look(self) -> tuple[float, Snapshot]:
        began_s = time.monotonic()
        found = self._look()
        return time.monotonic() - began_s, found

    def _send(self, data: bytes) -> None:
        with self._lock:
            for viewer, waiting in [*self._viewers.items()]:
                try:
                    waiting.put_nowait(data)
                except queue.Full:
                    del self._viewers[viewer]

    def _enter(self) -> int | None:
        """A viewer's number. It begins with everything: as all others saw it last, or anew."""
        with self._lock:
            if len(self._viewers) >= VIEWERS_MAX or not self._is_open:
                return None
            number = max(self._viewers, default=0) + 1
            waiting: queue.Queue[bytes] = queue.Queue(WAITING_MAX)
            if self._publisher is None:
                self._last = None
                self._publisher = threading.Thread(target=self._publish, name="dashboard-look", daemon=True)
                self._publisher.start()
            elif self._last is not None:
                waiting.put_nowait(event("state", self._last))
            self._viewers[number] = waiting
            self._changed.set()
            return number

    def _events(self, number: int) -> Iterator[bytes]:
        waiting = self._viewers[number]
        silent_s = 0.0
        try:
            yield b"retry: 1000\n\n"
            while self._is_open and self._viewers.get(number) is waiting:
                try:
                    yield waiting.get(timeout=QUIET_S)
                    silent_s = 0.0
                except queue.Empty:
                    silent_s += QUIET_S
                    if silent_s >= ALIVE_S:
                        silent_s = 0.0
                        yield b": alive\n\n"
        finally:
            with self._lock:
                if self._viewers.get(number) is waiting:
                    del self._viewers[number]

    # ------------------------------------------------------------ HTTP

    def _application(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD") != "GET":
            return say(start_response, "405 Method Not Allowed", "here one can only look")
        refused = self._refusal(environ)
        if refused:
            self._tell_once(str(environ.get("REMOTE_ADDR")), refused)
            return say(start_response, "403 Forbidden", refused)
        if path == "/" and self._token and environ.get("QUERY_STRING"):
            cookie = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            start_response("303 See Other", [*SAFE, ("Location", "/"), ("Set-Cookie", cookie)])
            return [b""]
        if path == "/events":
            number = self._enter()
            if number is None:
                return say(start_response, "503 Service Unavailable", f"{VIEWERS_MAX} viewers are here already")
            start_response("200 OK", [*SAFE, ("Content-Type", "text/event-stream")])
            return self._events(number)
        name = "index.html" if path == "/" else path.removeprefix("/")
        if name not in self._pages:
            return say(start_response, "404 Not Found", "there is /")
        start_response("200 OK", [*SAFE, ("Content-Type", f"{TYPES[name]}; charset=utf-8")])
        return [self._pages[name]]

    def _refusal(self, environ: dict[str, Any]) -> str:
        """Why this request may not look; '' when it may."""
        if not self._token:
            host = str(environ.get("HTTP_HOST", "")).rpartition(":")[0] or str(environ.get("HTTP_HOST", ""))
            if not is_loopback(host.strip("[]")):
                return f"without a token it is served as http://{self.address}/ only"
            return ""
        shown = str(environ.get("HTTP_AUTHORIZATION", "")).removeprefix("Bearer ").strip()
        shown = shown or _cookie(str(environ.get("HTTP_COOKIE", "")))
        shown = shown or parse_qs(str(environ.get("QUERY_STRING", ""))).get("token", [""])[0]
        if hmac.compare_digest(shown.encode(), self._token.encode()):
            return ""
        return "a token is wanted: open /?token=..., with what stands in the coordinator's dashboard.token_file"

    def _tell_once(self, who: str, why: str) -> None:
        if who not in self._refused and len(self._refused) < 1000:
            self._refused.add(who)
            log.warning("refused %s: %s", who, why)


def event(name: str, data: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _cookie(text: str) -> str:
    try:
        found = SimpleCookie(text).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _read_token(settings: DashboardSettings, host: str) -> str:
    if not settings.token_file:
        if not is_loopback(host):
            raise DashboardProblem(
                f"dashboard.listen is {settings.listen}, which others reach: give dashboard.token_file (a file that"
                " only you can read, with a long random line), or listen on 127.0.0.1"
            )
        return ""
    path = Path(settings.token_file)
    try:
        mode, token = path.stat().st_mode, path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise DashboardProblem(f"dashboard.token_file {path}: {error.strerror}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        raise DashboardProblem(f"dashboard.token_file {path} can be read by others: chmod 600 {path}")
    if len(token) < TOKEN_CHARS_MIN or not token.isascii() or not token.isalnum():
        raise DashboardProblem(
            f"dashboard.token_file {path} must hold {TOKEN_CHARS_MIN} letters and digits at least: openssl rand -hex 24"
        )
    return token
