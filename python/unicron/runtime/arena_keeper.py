"""The memfds and GPU memory of this node's workers, held open so that training state outlives its process.

Which arena is given to whom is the machine's decision; here are only descriptors, by the machine's id. A descriptor of
GPU memory keeps that memory alive; the agent has no CUDA context and needs none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from unicron import _core


@dataclass(frozen=True)
class Kept:
    fd: int  # the memfd: header and host state
    gpu_fds: tuple[int, ...]
    sizes: tuple[int, ...]


class ArenaKeeper:
    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def create(self, arena: str, nbytes: int, gpu_fds: tuple[int, ...] = (), sizes: tuple[int, ...] = ()) -> Kept:
        """gpu_fds belong to the keeper from here on, unless this raises."""
        kept = Kept(_core.create_arena(nbytes), gpu_fds, sizes)
        self.drop(arena)
        self._kept[arena] = kept
        return kept

    def get(self, arena: str) -> Kept | None:
        return self._kept.get(arena)

    def drop(self, arena: str) -> None:
        kept = self._kept.pop(arena, None)
        if kept is not None:
            for fd in (kept.fd, *kept.gpu_fds):
                os.close(fd)

    @property
    def num_arenas(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        for arena in [*self._kept]:
            self.drop(arena)
