"""A small HTTP server in a thread of a daemon: for what others only look at."""

from __future__ import annotations

import socketserver
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from unicron.runtime.loop_questions import LOOK_S_MAX, LoopQuestions

SHUT_POLL_S = 0.05
CONNECTIONS_MAX = 64  # at once; more are closed unread
TEXT = ("Content-Type", "text/plain; charset=utf-8")


class HttpServer(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._places = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(*arguments, **named)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._places.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def server_bind(self) -> None:
        """Without the standard library's look at the name server, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class HttpHandler(WSGIRequestHandler):
    timeout = 10  # seconds a client may take

    def log_message(self, *_: Any) -> None:
        """A scrape is no news."""

    def address_string(self) -> str:
        return str(self.client_address[0])


class LoopServer:
    """A server in a thread of its own, and its questions to the daemon's loop."""

    def __init__(self, host: str, port: int, application: Any, name: str) -> None:
        """Raises OSError where the address cannot be used."""
        self._server = make_server(host, port, application, HttpServer, HttpHandler)
        self.questions = LoopQuestions()
        self.address = f"{host}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(SHUT_POLL_S,), name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def shut(self) -> None:
        """Who asks is told; the questions stay open until every thread that may ask has ended."""
        self.questions.refuse()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(LOOK_S_MAX)


def say(start_response: Any, status: str, text: str) -> list[bytes]:
    start_response(status, [TEXT])  # a list of its own: wsgiref adds the length to it
    return [text.encode() + b"\n"]
