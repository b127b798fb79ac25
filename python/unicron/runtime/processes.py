"""Processes of one cluster on this machine: found by a mark in their environment, ended for good.

Everything a local cluster starts carries ``UNICRON_CLUSTER=<directory>`` from its exec on; forked
workers show the template's environment in /proc. So whatever happens, what belongs to a cluster can
be found without a list of pids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "UNICRON_CLUSTER"
TITLE_MARK = b"unicron worker "  # child.TITLE
WORKER_MARK = b"UNICRON_WORKER="
# Of a template and all that it forked, the path of its socket: clusters of one machine name their workers alike.
TEMPLATE_MARK = "UNICRON_TEMPLATE"


def find(directory: Path) -> list[int]:
    """Living processes (no zombies) of the cluster in this directory."""
    mark = f"{MARK}={directory}"
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]
    return [pid for pid in pids if has_mark(pid, mark) and is_alive(pid)]


def children() -> list[int]:
    """Of this process, orphans that it adopted included."""
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            found += map(int, Path(f"/proc/self/task/{task}/children").read_text(encoding="utf-8").split())
    return found


def worker_of(pid: int) -> str:
    """The worker that this process is, or that started it; '' for any other.

    A worker's forks have its title, and what it executed has its environment.
    """
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    if title.startswith(TITLE_MARK):
        return title[len(TITLE_MARK) :].partition(b":")[0].decode(errors="replace")
    marked = (word for word in environment.split(b"\0") if word.startswith(WORKER_MARK))
    return next(marked, WORKER_MARK)[len(WORKER_MARK) :].decode(errors="replace")


def end_of_workers(workers: Iterable[str], template: Path) -> list[int]:
    """SIGKILL to all that these workers of this template started; their pids. For when nobody is left who would reap
    them."""
    names, mark = set(workers), f"{TEMPLATE_MARK}={template}"
    ended = []
    for name in os.listdir("/proc"):
        if not name.isdecimal() or int(name) == os.getpid():
            continue
        if worker_of(int(name)) in names and has_mark(int(name), mark):
            kill(int(name))
            ended.append(int(name))
    return ended


def has_mark(pid: int, mark: str) -> bool:
    """Is this, name=value, in the environment that it was executed with?"""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat, '' when there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_all(directory: Path, timeout_s: float, *, spare: frozenset[int] = frozenset()) -> list[int]:
    """SIGKILL to all of the cluster until nobody is left; those that are left after the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [pid for pid in find(directory) if pid not in spare]
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            kill(pid)
        time.sleep(0.01)
