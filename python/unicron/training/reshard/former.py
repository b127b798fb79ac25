"""What a process keeps of the layout it leaves: its arena, mapped for reading, and what lies where in it.

The model, its groups and its optimizer go; the arena stays as it is (the agent keeps it too), so that the process can
serve its slices, and go back to it when the change is called off. What is no state (gradients, staging, undo) is given
back to the system meanwhile: between iterations it holds nothing, and two layouts' worth of it would be the peak.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

import numpy as np

from unicron.messages import ChangeLayout
from unicron.training.reshard.atlas import NotDescribed, atlas_of
from unicron.training.reshard.boxes import Piece
from unicron.types import Layout, Rank

PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01  # fallocate(2)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)


class Former:
    """rank, layout: of the role that is left. pieces: () and error where the state cannot be described."""

    def __init__(self, engine: Any, order: ChangeLayout) -> None:
        """engine: training.engine.Engine, at an iteration boundary."""
        memory = engine.memory
        self.order = order
        self.rank: Rank = engine.rank
        self.layout: Layout = engine.layout
        self.iteration: int = engine.machine.record.iteration
        self.extra: bytes = engine.stepper.extra_state()
        self.nbytes: int = memory.nbytes
        self.error = ""
        self.pieces: tuple[Piece, ...] = ()
        try:
            self.pieces = atlas_of(engine.model, engine.stepper.optimizer, memory.place_of)
        except NotDescribed as error:
            self.error = f"{type(error).__name__}: {error}"
        self._fd = os.dup(memory.fd)
        self._give_back(memory.index)
        self._map: mmap.mmap | None = mmap.mmap(self._fd, self.nbytes, prot=mmap.PROT_READ)

    def _give_back(self, index: list[tuple[str, int, int]]) -> None:
        for name, offset, nbytes in index:
            passing = name.endswith("grad_data") or name in ("unicron.staging", "unicron.undo")
            if passing and nbytes >= mmap.PAGESIZE:
                # Whole pages only; where the kernel refuses, the change merely needs more memory.
                _libc.fallocate(self._fd, PUNCH_HOLE_KEEP_SIZE, offset, nbytes // mmap.PAGESIZE * mmap.PAGESIZE)

    @property
    def bytes_view(self) -> np.ndarray:
        assert self._map is not None
        return np.frombuffer(self._map, np.uint8)

    def take_fd(self) -> int:
        """A descriptor of the arena, for who goes back to it."""
        return os.dup(self._fd)

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a view is alive: the mapping goes with it
                self._map.close()
            self._map = None
            os.close(self._fd)
