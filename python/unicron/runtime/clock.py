"""The monotonic clock, and whose it is: times of two processes are compared only when they read the same one."""

from __future__ import annotations

import os
import time
from pathlib import Path


def now_ms() -> float:
    return time.monotonic_ns() / 1e6


def clock_id() -> str:
    """Equal for processes that read one monotonic clock: same boot of a kernel, same time namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    try:
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:  # kernels before 5.6 have none
        namespace = ""
    return f"{boot} {namespace}".strip()
