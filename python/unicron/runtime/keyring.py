"""The keys of a directory, read again when it changes: a daemon learns of rotations and revocations by itself."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from unicron.runtime import key_rotation, keys
from unicron.runtime.zap import Gatekeeper

LOOK_S = 0.5  # between two looks

log = logging.getLogger("unicron.keys")


class KeyRing:
    """``changed`` is cheap: call it in every turn."""

    def __init__(self, directory: Path, now_s: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self._now_s = now_s
        self._looked_s = now_s()
        self._seen = self._signature()

    def changed(self) -> bool:
        """True once after every change. What cannot be read is said, and changes nothing."""
        now_s = self._now_s()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        seen = self._signature()
        if seen == self._seen:
            return False
        self._seen = seen
        return True

    def _signature(self) -> tuple[tuple[str, int, int], ...]:
        found = []
        for folder in (self.directory, self.directory / key_rotation.NODES):
            try:
                entries = [*os.scandir(folder)]
            except OSError:
                continue
            for entry in entries:
                if not entry.name.startswith("."):  # a file that is being written
                    info = entry.stat()
                    found.append((entry.name, info.st_mtime_ns, info.st_ino))
        return tuple(sorted(found))


@dataclass(frozen=True)
class Caller:
    role: str
    node: str = ""  # the only one it may speak for; "": any


class Callers:
    """Who may call the coordinator, by the key that ZeroMQ says they showed."""

    def __init__(self, directory: Path, gate: Gatekeeper, domain: str) -> None:
        self._directory = directory
        self._gate = gate
        self._domain = domain
        self._callers: dict[str, Caller] = {}
        self._cut: set[str] = set()
        self.renew()

    def renew(self) -> None:
        """KeyProblem when the directory cannot be read; then everything stays as it was."""
        found = {
            key: Caller(role)
            for role in ("agent", "client")
            for key in key_rotation.publics(self._directory, role)
        }  # fmt: skip
        found |= {key: Caller("agent", node) for key, node in key_rotation.node_publics(self._directory).items()}
        self._callers = found
        self._gate.replace(self._domain, {key: key for key in found})

    def find(self, key: str) -> Caller | None:
        return self._callers.get(key)

    def cut(self, key: str, fd: int) -> None:
        """End a connection that was made before its key was refused; it is said once a key."""
        if key not in self._cut:
            self._cut.add(key)
            log.warning("refused: the key %s... is not admitted any more; its connection is cut", key[:8])
        shut(fd)


def shut(fd: int) -> None:
    """The connection under a ZeroMQ socket: its other end sees it close, and ZeroMQ itself does, too."""
    try:
        with socket.socket(fileno=os.dup(fd)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is gone already


def server_keys(directory: Path) -> list[str]:
    """The coordinator's public keys that may be met now."""
    return key_rotation.publics(directory, "coordinator")


def load_own(directory: Path, role: str) -> keys.KeyPair:
    return keys.load(directory / f"{role}.key")
