"""Was it the kernel's out-of-memory killer? A SIGKILL itself does not say who sent it.

Three witnesses, any of which may be missing: the kernel log names the process (readable for root, and only where
process numbers are the machine's own); the counter of the process's control group (v2: memory.events, v1:
memory.oom_control); the machine's counter (/proc/vmstat). A counter that did not move clears the kernel; one that moved
accuses it; where none can be read the answer is "unknown", never a guess.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from unicron.types import KILLED_NOTHING, OF_MEMORY

CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG = Path("/dev/kmsg")
RECORDS_MAX = 10_000  # of the kernel log, read after a death
TEXT_CHARS_MAX = 400

_KILLED = re.compile(r"(?:Out of memory|[Mm]emory cgroup out of memory).*?Killed process (\d+)\b.*")


@dataclass(frozen=True, slots=True)
class Witness:
    """oom: True, False, or None where nothing can be read."""

    oom: bool | None
    text: str


@dataclass
class _Before:
    """Counters when the worker began."""

    cgroup: Path | None
    counts: dict[str, int] = field(default_factory=dict)


class OomWatch:
    """begin(worker, pid) while the process lives; ended(worker, pid) once it was killed; forget(worker)."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = CGROUPS, kernel_log: Path = KERNEL_LOG) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._workers: dict[str, _Before] = {}
        self._log_fd = -1
        if _is_machine_namespace(proc):
            with contextlib.suppress(OSError):
                self._log_fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log_fd, 0, os.SEEK_END)

    def begin(self, worker: str, pid: int) -> None:
        cgroup = _memory_cgroup(self._proc / str(pid) / "cgroup", self._cgroups)
        self._workers[worker] = _Before(cgroup, self._counts(cgroup))

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def ended(self, worker: str, pid: int) -> Witness:
        line = self._logged(pid)
        if line:
            return Witness(True, line)
        before = self._workers.get(worker)
        if before is None or not before.counts:
            return Witness(
                None, f"{OF_MEMORY}neither the kernel log nor a counter of out-of-memory kills can be read here"
            )
        now = self._counts(before.cgroup)
        for name, count in before.counts.items():
            if now.get(name, count) > count:
                # The others that live here are measured from now on: one kill is not several workers' cause.
                for other in self._workers.values():
                    if name in other.counts:
                        other.counts[name] = max(other.counts[name], count + 1)
                return Witness(True, f"{name} counts {now[name] - count} out-of-memory kill(s) since the worker began")
        return Witness(False, KILLED_NOTHING)

    def close(self) -> None:
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1

    def _counts(self, cgroup: Path | None) -> dict[str, int]:
        """By file."""
        counts = {}
        places = [cgroup / "memory.events", cgroup / "memory.oom_control"] if cgroup is not None else []
        for path in places:
            count = _field(path, "oom_kill")
            if count is not None:
                counts[str(path)] = count
        machine = _field(self._proc / "vmstat", "oom_kill")
        if not counts and machine is not None:  # anybody's kill: only where nothing nearer is known
            counts[str(self._proc / "vmstat")] = machine
        return counts

    def _logged(self, pid: int) -> str:
        """The kernel's own line about this process, of those that came since the last look."""
        found = ""
        for _ in range(RECORDS_MAX):
            if self._log_fd < 0:
                break
            try:
                record = os.read(self._log_fd, 8192).decode(errors="replace")
            except BlockingIOError:
                break
            except OSError as error:  # EPIPE: records were overwritten before they were read; go on with the next
                if error.errno != 32:
                    break
                continue
            match = _KILLED.search(record)
            if match is not None and int(match[1]) == pid:
                found = match[0].strip()[:TEXT_CHARS_MAX]
        return found


def _field(path: Path, name: str) -> int | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def _memory_cgroup(path: Path, cgroups: Path) -> Path | None:
    """The folder of the process's memory controller, v1 or v2."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    found = None
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if "memory" in controllers.split(","):
            found = cgroups / "memory" / place.lstrip("/")
            break
        if number == "0" and not controllers:
            found = cgroups / place.lstrip("/")
    return found


def _is_machine_namespace(proc: Path) -> bool:
    """Does this process see the numbers that the kernel log uses? In a container's own pid namespace it does not."""
    try:
        return (proc / "self" / "ns" / "pid").readlink().name == "pid:[4026531836]"
    except OSError:
        return False
