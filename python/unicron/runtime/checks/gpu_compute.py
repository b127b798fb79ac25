"""GPUs at work, in cupy (an extra): does a matrix product have the known digest, does memory keep a pattern, how fast
do two GPUs reach each other? They take a context and memory, so they run where no worker does.

The product is of whole numbers small enough that float32 holds every sum exactly: its bits depend neither on the order
of adding nor on the GPU, and the digest is computed here, once, by numpy on the CPU.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from unicron.runtime.checks.check import Check, Look, Reading, bad, ok, unknown, worst

SIZE = 2048
REPEATS = 8
PATTERNS = (0x00000000, 0xFFFFFFFF, 0xAAAAAAAA, 0x55555555)
MEMORY_SHARE = 0.8  # of what is free
PEER_BYTES = 256 << 20
PEER_RATIO_MIN = 0.5  # of the fastest pair

Gpu = Any  # the module cupy


@cache
def factors() -> tuple[np.ndarray, np.ndarray]:
    """Two matrices of whole numbers in -8..7: a sum of SIZE products stays below 2^24."""
    rng = np.random.default_rng(20250101)
    return tuple(rng.integers(-8, 8, (SIZE, SIZE)).astype(np.float32) for _ in range(2))  # type: ignore[return-value]


@cache
def product_digest() -> str:
    left, right = factors()
    return digest(left.astype(np.float64) @ right.astype(np.float64))


def digest(matrix: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(matrix, dtype=np.float32).tobytes()).hexdigest()


def of_each(look_at: Callable[[Gpu, int], Reading]) -> Callable[[Look], Reading]:
    def run(look: Look) -> Reading:
        gpu = _cupy()
        if isinstance(gpu, str):
            return unknown(gpu)
        return worst((_one(gpu, index) for index in range(gpu.cuda.runtime.getDeviceCount())), "no GPU")

    def _one(gpu: Gpu, index: int) -> Reading:
        try:
            with gpu.cuda.Device(index):
                return look_at(gpu, index)
        except gpu.cuda.memory.OutOfMemoryError as problem:
            return unknown(f"GPU {index} has no memory free for it: {problem}")
        except gpu.cuda.runtime.CUDARuntimeError as problem:
            return bad(f"GPU {index}: {problem}")

    return run


def _cupy() -> Gpu | str:
    """The module, or why there is none."""
    try:
        import cupy
    except ImportError:
        return "cupy is not installed: pip install 'unicron[gpu]'"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as problem:
        return f"no GPU: {problem}"
    return cupy if count else "no GPU"


def matrix_product(gpu: Gpu, index: int) -> Reading:
    left, right = (gpu.asarray(factor) for factor in factors())
    for _ in range(REPEATS):
        if digest(gpu.asnumpy(left @ right)) != product_digest():
            return bad(f"GPU {index}: a matrix product has wrong bits")
    return ok(f"GPU {index}: {REPEATS} matrix products have the right bits")


def memory_pattern(gpu: Gpu, index: int) -> Reading:
    """What is free, written and read back; each word also with its own number, so that wrong addresses show."""
    free, _ = gpu.cuda.runtime.memGetInfo()
    words = gpu.empty(int(free * MEMORY_SHARE) // 4 // (1 << 20) * (1 << 20), dtype=gpu.uint32)
    for pattern in PATTERNS:
        words.fill(pattern)
        if not bool((words == pattern).all()):
            return bad(f"GPU {index}: memory did not keep {pattern:#010x}")
    step = 1 << 26
    for first in range(0, words.size, step):
        part = words[first : first + step]
        part[:] = gpu.arange(first, first + part.size, dtype=gpu.uint32)
    for first in range(0, words.size, step):
        part = words[first : first + step]
        if not bool((part == gpu.arange(first, first + part.size, dtype=gpu.uint32)).all()):
            return bad(f"GPU {index}: memory did not keep its own numbers")
    nbytes = words.nbytes
    del words
    gpu.get_default_memory_pool().free_all_blocks()
    return ok(f"GPU {index}: {nbytes >> 30} GiB keep their patterns")


def peer_bandwidth(look: Look) -> Reading:
    """Between every two GPUs of the node; one pair far below the others is bad."""
    gpu = _cupy()
    if isinstance(gpu, str):
        return unknown(gpu)
    count = gpu.cuda.runtime.getDeviceCount()
    if count < 2:
        return unknown("one GPU has no peer")
    rates = {(a, b): _rate(gpu, a, b) for a in range(count) for b in range(count) if a != b}
    fastest = max(rates.values())
    slow = [f"{a} -> {b}: {rate:.0f} GB/s" for (a, b), rate in rates.items() if rate < fastest * PEER_RATIO_MIN]
    if slow:
        return bad(f"between GPUs {'; '.join(slow)}, where the fastest pair has {fastest:.0f}")
    return ok(f"between GPUs {min(rates.values()):.0f} to {fastest:.0f} GB/s")


def _rate(gpu: Gpu, source: int, target: int) -> float:
    """GB/s of a copy, the best of three."""
    with gpu.cuda.Device(source):
        ours = gpu.ones(PEER_BYTES // 4, dtype=gpu.float32)
    with gpu.cuda.Device(target):
        theirs = gpu.empty_like(ours)
        best = 0.0
        for _ in range(4):  # the first opens the way
            gpu.cuda.runtime.deviceSynchronize()
            begun = time.perf_counter()
            theirs.data.copy_from_device_async(ours.data, PEER_BYTES)
            gpu.cuda.runtime.deviceSynchronize()
            best = max(best, PEER_BYTES / (time.perf_counter() - begun) / 1e9)
    return best


CHECKS = (
    Check("gpu_product", of_each(matrix_product), limit_s=60.0, disturbs=True),
    Check("gpu_memory", of_each(memory_pattern), limit_s=120.0, disturbs=True),
    Check("gpu_peers", peer_bandwidth, limit_s=60.0, tries=2, disturbs=True),
)
