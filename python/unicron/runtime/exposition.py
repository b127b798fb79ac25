"""/metrics, /healthz and /readyz of a daemon, in the form that Prometheus reads.

A thread of its own serves HTTP; what it shows of the machine's state is looked up by the daemon's loop, between two
turns, so that no look sees half a step and a loop that stands still is seen: its /healthz is an error. A daemon that
nobody asks spends nothing. There is no authentication, therefore loopback by default, and no secret in it: names,
numbers, phases.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, disable_created_metrics, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric

from unicron.runtime.endpoints import parse_endpoint
from unicron.runtime.http_server import LoopServer, say
from unicron.runtime.loop_questions import LoopBusy

log = logging.getLogger("unicron.metrics")


disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, that nobody asks for


class ExpositionProblem(OSError):
    """The address cannot be used; one line that says what to do."""


def _unusable(address: str, error: Exception) -> ExpositionProblem:
    why = getattr(error, "strerror", None) or error
    return ExpositionProblem(
        f"cannot serve metrics at {address}: {why}: give another address, or an empty one for none"
    )


def require_free(address: str) -> None:
    """ExpositionProblem where it cannot be served at: for whoever would find out only after a long start."""
    try:
        socket.create_server(parse_endpoint(address, listens=True)).close()
    except (OSError, UnicodeError) as error:
        raise _unusable(address, error) from None


class Exposition:
    """Poll ``fileno`` for reading and call ``serve`` when it is readable. ``watch`` says what is shown."""

    def __init__(self, address: str) -> None:
        """address: host:port; port 0: any, and ``address`` says which."""
        self.registry = CollectorRegistry()
        self._families: Callable[[], Iterable[Metric]] = lambda: ()
        self._unready: Callable[[], str] = lambda: "starting"
        self._metrics = make_wsgi_app(self.registry)
        try:
            host, port = parse_endpoint(address, listens=True)
            self._server = LoopServer(host, port, self._application, "metrics")
        except (OSError, UnicodeError) as error:
            raise _unusable(address, error) from None
        self._questions = self._server.questions
        self.address = self._server.address
        log.info("metrics at %s", self.address)
        self.registry.register(_LoopCollector(self))
        self._server.start()

    def watch(self, families: Callable[[], Iterable[Metric]], unready: Callable[[], str]) -> None:
        """families: called in the loop at every look; unready: why the daemon is of no use yet, '' when it is."""
        self._families, self._unready = families, unready

    # ------------------------------------------------------------ the loop's side

    def fileno(self) -> int:
        return self._questions.fileno()

    def serve(self) -> None:
        self._questions.serve()

    def close(self) -> None:
        self._server.shut()
        self._questions.close()

    # ------------------------------------------------------------ the thread's side

    def look(self, what: Callable[[], Any]) -> Any:
        return self._questions.look(what)

    def families(self) -> list[Metric]:
        return list(self.look(lambda: list(self._families())))

    def _application(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ.get("PATH_INFO", "/")
        try:
            if path == "/metrics":
                return self._metrics(environ, start_response)
            if path == "/healthz":
                self.look(lambda: None)
                return say(start_response, "200 OK", "alive")
            if path == "/readyz":
                unready = self.look(self._unready)
                return say(start_response, "503 Service Unavailable" if unready else "200 OK", unready or "ready")
        except LoopBusy as problem:
            return say(start_response, "503 Service Unavailable", str(problem))
        return say(start_response, "404 Not Found", "there are /metrics, /healthz and /readyz")


class _LoopCollector:
    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._exposition.families()


def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"unicron_{name}", text, labels=labels)


def number(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    return GaugeMetricFamily(f"unicron_{name}", text, value=value)
