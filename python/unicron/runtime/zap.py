"""Who may connect: the ZAP handler (ZeroMQ RFC 27) of one context, served from the owner's own poll
loop.

Every server socket names a domain; a domain is a set of public keys, each with the name it is known
by. A peer whose key is not in it never gets a connection. Rejected:
``zmq.auth.ThreadAuthenticator``, a thread and an event loop more in every agent, for a question
that is a dictionary's look-up.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
REQUESTS_PER_TURN_MAX = 256
REFUSED_KEPT_MAX = 1000
# Of a caller: a server that refuses its key leaves it nothing to send on, and a send would never end.
SEND_MS_MAX = 1000

log = logging.getLogger("unicron.keys")


class Gatekeeper:
    """Answers the handshakes of one context. Poll ``socket`` for reading and call ``serve`` when it
    is readable.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._names: dict[bytes, dict[bytes, str]] = {}
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ENDPOINT)
        self.num_refused = 0
        self._refused: set[bytes] = set()  # keys whose refusal was said

    def replace(self, domain: str, names: Mapping[str, str]) -> None:
        """{public key: name}: these and no others may connect from now on."""
        self._names[domain.encode()] = {z85.decode(key.encode()): name for key, name in names.items()}

    def admit(self, domain: str, public: str, name: str) -> None:
        """Let the owner of this public key in; messages from it carry ``name`` as their User-Id."""
        self._names.setdefault(domain.encode(), {})[z85.decode(public.encode())] = name

    def serve(self) -> None:
        for _ in range(REQUESTS_PER_TURN_MAX):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.socket.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request_id = frames[0], frames[1]
        domain = frames[2]
        mechanism = frames[5]
        name = None
        if version == b"1.0" and mechanism == b"CURVE" and len(frames) == 7:
            name = self._names.get(domain, {}).get(frames[6])
        if name is None:
            self.num_refused += 1
            self._say_once(frames)
            return [b"1.0", request_id, b"400", b"key not admitted", b"", b""]
        return [b"1.0", request_id, b"200", b"OK", name.encode(), b""]

    def _say_once(self, frames: list[bytes]) -> None:
        """It tries again and again."""
        key = frames[6] if len(frames) == 7 else b""
        if key not in self._refused and len(self._refused) < REFUSED_KEPT_MAX:
            self._refused.add(key)
            shown = z85.encode(key).decode()[:8] + "..." if len(key) == 32 else "none"
            log.warning("refused: key %s from %s is not admitted", shown, frames[3].decode(errors="replace"))

    def close(self) -> None:
        self.socket.close(0)


def serve_curve(socket: zmq.Socket[bytes], secret: str, domain: str, *, message_bytes_max: int) -> None:
    """Options of a listening socket, before it is bound."""
    socket.linger = 0
    socket.curve_server = True
    socket.curve_secretkey = secret.encode()
    socket.zap_domain = domain.encode()
    socket.maxmsgsize = message_bytes_max


def call_curve(socket: zmq.Socket[bytes], server_key: str, public: str, secret: str, *, message_bytes_max: int) -> None:
    """Options of a connecting socket, before it is connected."""
    socket.linger = 0
    socket.sndtimeo = SEND_MS_MAX
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey = public.encode()
    socket.curve_secretkey = secret.encode()
    socket.maxmsgsize = message_bytes_max


def monitor_event(frames: list[bytes]) -> tuple[int, int]:
    """(event, value) of a socket monitor's message. pyzmq's own parser imports asyncio: 60 ms a
    daemon.
    """
    event, value = struct.unpack_from("=hi", frames[0])
    return event, value
