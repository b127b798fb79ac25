"""Is this machine fit for unicron, and what would heal here how fast: facts looked up and small
things measured.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

FUTEX_WAITV = (5, 16)
FILES_MIN = 1024
SHARED_BYTES_MIN = 64 << 20


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # ok | note | bad
    value: str
    meaning: str = ""


def examine() -> list[Finding]:
    found: list[Finding] = []
    for check in (_core, _kernel, _python, _files, _nice, _clock, _disk, _shared_memory, _trainers):
        try:
            found += check()
        except Exception as error:
            name = check.__name__.strip("_").replace("_", " ")
            found.append(Finding(name, "bad", f"{type(error).__name__}: {error}", "cannot be used"))
    if all(f.state != "bad" for f in found):
        found += _deaths()
    return found


def _core() -> list[Finding]:
    from unicron import _core

    return [Finding("native core", "ok", f"{_core.__version__}, cuda {_core.cuda}")]


def _kernel() -> list[Finding]:
    release = platform.release()
    version = tuple(int(p) for p in release.split("-")[0].split(".")[:2])
    if version >= FUTEX_WAITV:
        return [Finding("kernel", "ok", release, "one thread waits for all deaths (futex_waitv)")]
    return [Finding("kernel", "note", release, "before 5.16: one waiting thread per worker")]


def _python() -> list[Finding]:
    return [Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")]


def _files() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < FILES_MIN:
        return [Finding("open files", "note", f"{soft}", f"raise it: ulimit -n {min(hard, 65536)}")]
    return [Finding("open files", "ok", str(soft))]


def _nice() -> list[Finding]:
    low, _ = resource.getrlimit(resource.RLIMIT_NICE)
    may = os.geteuid() == 0 or low >= 30
    text = "the agent runs before its workers" if may else "a busy machine delays the agent"
    return [Finding("priority", "ok" if may else "note", f"nice -10 {'' if may else 'not '}permitted", text)]


def _clock() -> list[Finding]:
    resolution = time.get_clock_info("monotonic").resolution
    return [Finding("clock", "ok" if resolution <= 1e-6 else "bad", f"{resolution * 1e9:.0f} ns")]


def _disk() -> list[Finding]:
    from unicron.runtime.journal_sqlite import SqliteJournal

    with tempfile.TemporaryDirectory(prefix="unicron-doctor-", dir=os.getcwd()) as directory:
        journal = SqliteJournal(Path(directory) / "journal.db")
        times = []
        for _ in range(10):
            start = time.perf_counter()
            journal.append([b"x" * 500])
            times.append((time.perf_counter() - start) * 1000)
        journal.close()
    median = sorted(times)[len(times) // 2]
    state = "ok" if median < 50 else "note"
    return [Finding("journal", state, f"{median:.1f} ms", "a decision on the disk, in this folder")]


def _shared_memory() -> list[Finding]:
    fd = os.memfd_create("unicron-doctor")
    os.ftruncate(fd, 1 << 20)
    os.close(fd)
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
    note = free < SHARED_BYTES_MIN
    return [
        Finding("memfd", "ok", "yes", "training state can outlive its process"),
        Finding("/dev/shm", "note" if note else "ok", f"{free >> 20} MiB free", "data loaders use it"),
    ]


def _trainers() -> list[Finding]:
    found = []
    for name in ("torch", "megatron.core"):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            text = "scripts without it are supervised and restarted only"
            found.append(Finding(name, "note", "not installed", text))
        else:
            found.append(Finding(name, "ok", str(Path(spec.origin or "").parent)))
    return found


def _deaths() -> list[Finding]:
    """A child takes its robust mutex and is killed: how long until we know?"""
    from unicron import _core

    times = [_one_death(_core) for _ in range(5)]
    known = sorted(t for t in times if t is not None)
    if not known:
        return [Finding("death seen", "bad", "never", "the robust mutex does not work here")]
    median = known[len(known) // 2]
    return [Finding("death seen", "ok", f"{median:.2f} ms", "from SIGKILL to the agent, median of 5")]


def _one_death(_core) -> float | None:  # type: ignore[no-untyped-def]
    import select
    import socket
    import subprocess

    fd = _core.create_pulse_pages(1)
    supervisor = _core.Supervisor()
    ours, theirs = socket.socketpair()
    code = (
        "import sys, time\n"
        "from unicron import _core\n"
        "page = _core.PulsePage(int(sys.argv[1]), 0)\n"
        "monitor = _core.WorkerMonitor(int(sys.argv[2]), page)\n"
        "time.sleep(10)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(fd), str(theirs.fileno())], pass_fds=(fd, theirs.fileno())
    )
    try:
        page = _core.PulsePage(fd, 0)
        supervisor.watch(page, 0)
        deadline = time.monotonic() + 10
        while page.owner_pid == 0:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.005)
        start = time.monotonic_ns()
        os.kill(child.pid, signal.SIGKILL)
        if not select.select([supervisor.fileno()], [], [], 2.0)[0]:
            return None
        return (time.monotonic_ns() - start) / 1e6
    finally:
        child.kill()
        child.wait(5)
        supervisor.close()
        ours.close()
        theirs.close()
        os.close(fd)
