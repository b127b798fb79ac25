"""The machine without its accelerators: disk, shared memory, host memory, clock."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import time

from unicron.runtime.checks.check import Check, Look, Reading, bad, ok, unknown, worst

DISK_BYTES = 4 << 20
DISK_FREE_MIN = 256 << 20
DISK_S_MAX = 5.0
SHARED_BYTES = 16 << 20
SHARED_FREE_MIN = 64 << 20
CLOCK_READS = 20_000
CLOCK_ERROR_US_MAX = 1_000_000
UNSYNCHRONISED = 5  # adjtimex: TIME_ERROR


def disk(look: Look) -> Reading:
    """Can this node keep its files: written, on the disk, and read back as they were?"""
    free = shutil.disk_usage(look.folder).free
    if free < DISK_FREE_MIN:
        return bad(f"{free >> 20} MiB are free in {look.folder}, less than {DISK_FREE_MIN >> 20}")
    data = os.urandom(DISK_BYTES)
    begun = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=look.folder) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            same = file.read() == data
    except OSError as problem:
        if problem.errno in (errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT):
            return bad(f"{look.folder}: {problem.strerror}")
        return unknown(f"{look.folder}: {problem.strerror}")
    took_s = time.monotonic() - begun
    if not same:
        return bad(f"{look.folder} gave back other bytes than were written")
    if took_s > DISK_S_MAX:
        return bad(f"{DISK_BYTES >> 20} MiB took {took_s:.1f} s to the disk and back in {look.folder}")
    return ok(f"{DISK_BYTES >> 20} MiB to the disk and back in {took_s * 1000:.0f} ms, {free >> 30} GiB free")


def shared_memory(look: Look) -> Reading:
    """Training state lies in memory files; data loaders use /dev/shm."""
    try:
        fd = os.memfd_create("unicron-check")
        try:
            os.ftruncate(fd, SHARED_BYTES)
            with mmap.mmap(fd, SHARED_BYTES) as memory:
                pattern = os.urandom(4096)
                memory[:] = pattern * (SHARED_BYTES // 4096)
                same = memory[:] == pattern * (SHARED_BYTES // 4096)
        finally:
            os.close(fd)
    except OSError as problem:
        return bad(f"no memory file of {SHARED_BYTES >> 20} MiB: {problem.strerror}")
    if not same:
        return bad("memory gave back other bytes than were written")
    if not os.path.isdir("/dev/shm"):
        return ok("memory files work; there is no /dev/shm")
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_FREE_MIN:
        return unknown(f"{free >> 20} MiB are free in /dev/shm: data loaders may fail; mount a larger one")
    return ok(f"{SHARED_BYTES >> 20} MiB written and read back, {free >> 20} MiB free in /dev/shm")


def host_memory(look: Look) -> Reading:
    """What the memory controllers counted. An uncorrected error is news once: since the last look, or the boot."""
    counters = {}
    for controller in sorted((look.sys / "devices/system/edac/mc").glob("mc[0-9]*")):
        for kind in ("ue_count", "ce_count"):
            try:
                counters[f"{controller.name} {kind}"] = int((controller / kind).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue
    if not counters:
        return unknown("the kernel counts no memory errors here (no EDAC)")
    first = "host_memory" not in look.before
    grown = look.growth("host_memory", counters)
    uncorrected = {n: v for n, v in (counters if first else grown).items() if n.endswith("ue_count") and v}
    if uncorrected:
        return bad(f"uncorrected memory errors: {', '.join(f'{n} {v}' for n, v in uncorrected.items())}")
    return ok(f"no uncorrected memory errors, {sum(counters.values())} corrected")


class _Timex(ctypes.Structure):
    """The head of struct timex, and room for the rest of it."""

    _fields_ = (
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long), ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long), ("status", ctypes.c_int), ("rest", ctypes.c_char * 256),
    )  # fmt: skip


def clock(look: Look) -> Reading:
    """Everything is measured with the monotonic clock; the wall clock is what people read in logs."""
    last = time.monotonic_ns()
    for _ in range(CLOCK_READS):
        now = time.monotonic_ns()
        if now < last:
            return bad(f"the monotonic clock went back by {last - now} ns")
        last = now
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    source = look.sys / "devices/system/clocksource/clocksource0/current_clocksource"
    name = source.read_text(encoding="utf-8").strip() if source.is_file() else "unknown"
    readings = [ok(f"never went back in {CLOCK_READS} readings of {name}")]
    if state == UNSYNCHRONISED:
        return ok(f"{readings[0].reason}; nothing keeps the wall clock in step")
    if state >= 0 and timex.maxerror > CLOCK_ERROR_US_MAX:
        return ok(f"{readings[0].reason}; the wall clock may be {timex.maxerror / 1e6:.1f} s off")
    return worst(readings, "")


CHECKS = (
    Check("disk", disk, limit_s=30.0, tries=3),
    Check("shared_memory", shared_memory),
    Check("host_memory", host_memory),
    Check("clock", clock, tries=3, pause_s=0.0),
)
