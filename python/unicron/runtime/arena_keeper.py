"""The memfds of this node's workers, held open so that training state outlives its process.

Which arena is given to whom is the machine's decision; here are only descriptors, by the machine's
id.
"""

from __future__ import annotations

import os

from unicron import _core


class ArenaKeeper:
    def __init__(self) -> None:
        self._fds: dict[str, int] = {}

    def create(self, arena: str, nbytes: int) -> int:
        fd = _core.create_arena(nbytes)
        self.drop(arena)
        self._fds[arena] = fd
        return fd

    def get(self, arena: str) -> int | None:
        return self._fds.get(arena)

    def drop(self, arena: str) -> None:
        fd = self._fds.pop(arena, None)
        if fd is not None:
            os.close(fd)

    @property
    def num_arenas(self) -> int:
        return len(self._fds)

    def close(self) -> None:
        for arena in [*self._fds]:
            self.drop(arena)
