"""What an heir pays for its predecessor's state: one mmap over its region, or reading the same bytes from a file.

The file is memory-backed (a memfd), so storage does not count against it. An heir's region lies over a scratch arena
whose pages it has touched, as training/memory.py lays it. `map_fixed and read all` includes the page faults that a
mapping postpones. Sizes take turns, so that a busy neighbour meets all of them.
"""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

import common
from unicron import _core

HEADER = _core.ARENA_HEADER_BYTES


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_shared(fd: int, nbytes: int) -> int:
    """mmap() without Python's: that one keeps a descriptor of its own, and with it the memory."""
    address: int = LIBC.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return address


def timed_ms(action: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - began) / 1e6


class Predecessor:
    """State of one size, as an arena and as the files that a checkpoint would be."""

    def __init__(self, mebibytes: int) -> None:
        self.nbytes = mebibytes << 20
        self.arena_fd = _core.create_arena(self.nbytes)
        arena = mmap.mmap(self.arena_fd, HEADER + self.nbytes)
        content = np.frombuffer(arena, dtype=np.float32, offset=HEADER)
        content[:] = np.arange(content.size, dtype=np.float32)
        header = _core.ArenaHeader(self.arena_fd)
        header.format("bench", self.nbytes)
        self.digest = _core.checksum(content)
        self.array_fd = os.memfd_create("array")
        with io.FileIO(self.array_fd, "w", closefd=False) as file:
            np.save(file, content)
        self.torch_fd = self._save_with_torch(content)

    def _save_with_torch(self, content: np.ndarray) -> int:
        try:
            import torch
        except ImportError:
            return -1
        fd = os.memfd_create("torch")
        with io.FileIO(fd, "w", closefd=False) as file:
            torch.save({"state": torch.from_numpy(content)}, file)
        return fd

    def close(self) -> None:
        for fd in (self.arena_fd, self.array_fd, self.torch_fd):
            if fd >= 0:
                os.close(fd)


class Heir:
    """A region over a scratch arena, filled as after building the model (training/memory.py)."""

    def __init__(self, state: Predecessor) -> None:
        self.state = state
        self.scratch_fd = _core.create_arena(state.nbytes)
        self.address = map_shared(self.scratch_fd, HEADER + state.nbytes)
        region = memoryview((ctypes.c_char * (HEADER + state.nbytes)).from_address(self.address))
        self.content = np.frombuffer(region, dtype=np.float32, offset=HEADER)
        self.content[:] = 0

    def adopt(self) -> None:
        refused = _core.ArenaHeader(self.state.arena_fd).check("bench", self.state.nbytes)
        assert not refused, refused
        _core.map_fixed(self.address, self.state.arena_fd, HEADER + self.state.nbytes)

    def adopt_and_read(self) -> None:
        self.adopt()
        self.content[:: mmap.PAGESIZE // 4].sum()

    def load_array(self) -> None:
        os.lseek(self.state.array_fd, 0, os.SEEK_SET)
        with io.FileIO(self.state.array_fd, closefd=False) as file:
            self.content[:] = np.load(file)

    def load_torch(self) -> None:
        import torch

        os.lseek(self.state.torch_fd, 0, os.SEEK_SET)
        with io.FileIO(self.state.torch_fd, closefd=False) as file:
            self.content[:] = torch.load(file, weights_only=True)["state"].numpy()

    def digest(self) -> None:
        _core.checksum(self.content)

    def free_scratch(self) -> None:
        """What is left to do after an adoption, off the critical path: the scratch arena's pages go back."""
        os.close(self.scratch_fd)

    def close(self) -> None:
        LIBC.munmap(self.address, HEADER + self.state.nbytes)


def measure(state: Predecessor) -> dict[str, float]:
    ways: dict[str, Callable[[Heir], None]] = {
        "map_fixed": Heir.adopt,
        "map_fixed and read all": Heir.adopt_and_read,
        "numpy.load and copy": Heir.load_array,
    }
    if state.torch_fd >= 0:
        ways["torch.load and copy"] = Heir.load_torch
    found = {}
    for name, way in ways.items():
        heir = Heir(state)
        found[name] = timed_ms(lambda way=way, heir=heir: way(heir))  # type: ignore[misc]
        assert _core.checksum(heir.content) == state.digest, f"{name} brought other bytes"
        if name == "map_fixed":
            found["checksum"] = timed_ms(heir.digest)
        free_ms = timed_ms(heir.free_scratch)
        if name == "map_fixed":
            found["freeing the scratch arena"] = free_ms
        heir.close()
    return found


def main() -> None:
    parser = common.parser("What an heir pays for its predecessor's state.", runs=7)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 256, 1024], help="sizes of the state")
    arguments = parser.parse_args()
    bench = common.Bench("adopting a dead worker's state", "ms", configuration={"file": "memory-backed (memfd)"})
    states = {size: Predecessor(size) for size in arguments.mebibytes}
    found: dict[int, list[dict[str, float]]] = {size: [] for size in states}
    for _ in range(arguments.runs):
        for size, state in states.items():
            found[size].append(measure(state))
    for size, runs in found.items():
        for name in runs[0]:
            samples = [run[name] for run in runs]
            ratio = statistics.median(samples) / statistics.median(run["map_fixed"] for run in runs)
            bench.add(f"{size} MiB: {name}", samples, **{"x map_fixed": ratio})
    bench.finish(arguments)
    for state in states.values():
        state.close()


if __name__ == "__main__":
    main()
