"""Is somebody listening there? Bounded, non-blocking connects, polled by the owner's loop.

A refused connection is the kernel of the other machine saying that the process is gone: positive
evidence. No answer is "unknown", never "gone".
"""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import dataclass
from typing import Literal

from unicron.runtime.endpoints import parse_endpoint

PROBE_MS_MAX = 300
PROBES_MAX = 4096

Answer = Literal["alive", "gone", "unknown"]


@dataclass(slots=True)
class _Probe:
    node: str
    socket: socket.socket
    deadline: float


class Probes:
    """``begin`` one; poll ``fds`` for writing; ``finished`` gives (node, answer) of those that are
    over.
    """

    def __init__(self) -> None:
        self._probes: dict[int, _Probe] = {}
        self._ready: list[tuple[str, Answer]] = []

    def begin(self, node: str, endpoint: str) -> None:
        """Nothing where one of this node is under way: its answer comes."""
        if any(probe.node == node for probe in self._probes.values()):
            return
        if len(self._probes) >= PROBES_MAX:
            self._ready.append((node, "unknown"))
            return
        try:
            address = parse_endpoint(endpoint)
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        except OSError:
            self._ready.append((node, "unknown"))
            return
        connection.setblocking(False)
        try:
            code = connection.connect_ex(address)
        except OSError:  # a name that cannot be resolved
            code = errno.EHOSTUNREACH
        if code in (0, errno.EINPROGRESS):
            deadline = time.monotonic() + PROBE_MS_MAX / 1000
            self._probes[connection.fileno()] = _Probe(node, connection, deadline)
            return
        connection.close()
        self._ready.append((node, _answer_of(code)))

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(self._probes)

    @property
    def is_pending(self) -> bool:
        return bool(self._probes or self._ready)

    def finished(self, writable: set[int]) -> list[tuple[str, Answer]]:
        done, self._ready = self._ready, []
        now = time.monotonic()
        for fd, probe in [*self._probes.items()]:
            if fd in writable:
                code = probe.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                done.append((probe.node, _answer_of(code)))
            elif now >= probe.deadline:
                done.append((probe.node, "unknown"))
            else:
                continue
            probe.socket.close()
            del self._probes[fd]
        return done

    def close(self) -> None:
        for probe in self._probes.values():
            probe.socket.close()
        self._probes.clear()


def _answer_of(code: int) -> Answer:
    if code == 0:
        return "alive"
    if code == errno.ECONNREFUSED:
        return "gone"
    return "unknown"
