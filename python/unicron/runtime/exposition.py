"""/metrics, /healthz and /readyz of a daemon, in the form that Prometheus reads.

A thread of its own serves HTTP; what it shows of the machine's state is looked up by the daemon's loop, between two
turns, so that no look sees half a step and a loop that stands still is seen: its /healthz is an error. A daemon that
nobody asks spends nothing. There is no authentication, therefore loopback by default, and no secret in it: names,
numbers, phases.
"""

from __future__ import annotations

import logging
import os
import socketserver
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric

from unicron.runtime.probe import parse_endpoint

LOOK_S_MAX = 5.0
QUESTIONS_MAX = 64
SHUT_POLL_S = 0.05
log = logging.getLogger("unicron.metrics")
TEXT = ("Content-Type", "text/plain; charset=utf-8")


disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, that nobody asks for


class ExpositionProblem(OSError):
    """The address cannot be used; one line that says what to do."""


@dataclass
class _Question:
    look: Callable[[], Any]
    answer: Future[Any]


class LoopBusy(Exception):
    """The daemon's loop did not answer in time."""


class Exposition:
    """Poll ``fileno`` for reading and call ``serve`` when it is readable. ``watch`` says what is shown."""

    def __init__(self, address: str) -> None:
        """address: host:port; port 0: any, and ``address`` says which."""
        self.registry = CollectorRegistry()
        self._families: Callable[[], Iterable[Metric]] = lambda: ()
        self._unready: Callable[[], str] = lambda: "starting"
        self._questions: deque[_Question] = deque(maxlen=QUESTIONS_MAX)
        self._is_open = True
        self._metrics = make_wsgi_app(self.registry)
        try:
            host, port = parse_endpoint(address)
            self._server = make_server(host, port, self._application, _Server, _Handler)
        except (OSError, OverflowError, ValueError) as error:
            raise ExpositionProblem(
                f"cannot serve metrics at {address}: {getattr(error, 'strerror', None) or error}:"
                " give another address, or an empty one for none"
            ) from None
        self.address = f"{host}:{self._server.server_port}"
        log.info("metrics at %s", self.address)
        self._awake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.registry.register(_LoopCollector(self))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(SHUT_POLL_S,), name="metrics", daemon=True
        )
        self._thread.start()

    def watch(self, families: Callable[[], Iterable[Metric]], unready: Callable[[], str]) -> None:
        """families: called in the loop at every look; unready: why the daemon is of no use yet, '' when it is."""
        self._families, self._unready = families, unready

    # ------------------------------------------------------------ the loop's side

    def fileno(self) -> int:
        return self._awake

    def serve(self) -> None:
        os.read(self._awake, 4096)
        while self._questions:
            question = self._questions.popleft()
            if question.answer.set_running_or_notify_cancel():
                try:
                    question.answer.set_result(question.look())
                except Exception as error:  # a look that fails is the asker's, never the loop's, end
                    question.answer.set_exception(error)

    def close(self) -> None:
        self._is_open = False
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LOOK_S_MAX)
        while self._questions:
            self._questions.popleft().answer.cancel()
        os.close(self._awake)
        os.close(self._waker)

    # ------------------------------------------------------------ the thread's side

    def look(self, what: Callable[[], Any]) -> Any:
        """Its value, looked up by the loop; LoopBusy after LOOK_S_MAX."""
        question = _Question(what, Future())
        self._questions.append(question)
        if not self._is_open:
            raise LoopBusy("the daemon ends")
        os.write(self._waker, b"?")
        try:
            return question.answer.result(LOOK_S_MAX)
        except TimeoutError:
            question.answer.cancel()
            raise LoopBusy(f"the daemon's loop did not answer in {LOOK_S_MAX:g} s") from None

    def families(self) -> list[Metric]:
        return list(self.look(lambda: list(self._families())))

    def _application(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "/")
        try:
            if path == "/metrics":
                return self._metrics(environ, start_response)
            if path == "/healthz":
                self.look(lambda: None)
                return _say(start_response, "200 OK", "alive")
            if path == "/readyz":
                unready = self.look(self._unready)
                return _say(start_response, "503 Service Unavailable" if unready else "200 OK", unready or "ready")
        except LoopBusy as problem:
            return _say(start_response, "503 Service Unavailable", str(problem))
        return _say(start_response, "404 Not Found", "there are /metrics, /healthz and /readyz")


class _LoopCollector:
    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._exposition.families()


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def server_bind(self) -> None:
        """Without the standard library's look at the name server, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds a client may take

    def log_message(self, *_: Any) -> None:
        """A scrape is no news."""

    def address_string(self) -> str:
        return str(self.client_address[0])


def _say(start_response: Any, status: str, text: str) -> list[bytes]:
    start_response(status, [TEXT])  # a list of its own: wsgiref adds the length to it
    return [text.encode() + b"\n"]


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"unicron_{name}", text, labels=labels)


def number(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    return GaugeMetricFamily(f"unicron_{name}", text, value=value)
