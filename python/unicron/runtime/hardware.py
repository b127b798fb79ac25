"""An agent's eyes on its node's hardware: the checks it runs, and the kernel log as it grows.

The checks run in a process of their own (checks/supervise.py), nice, one run at a time; a run that is asked for while
another goes on follows it. The kernel log is followed where it can be read; each line the tables know is told once.
The driver's own events (NVML) come through a child that exists only where NVML does (checks/nvml_events.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from unicron.agent.events import HardwareFailed, NodeChecked
from unicron.messages import cut
from unicron.runtime.checks.check import ADDRESSES, Answer, Result
from unicron.runtime.checks.kernel_log import meaning, read
from unicron.runtime.checks.supervise import verdict

KERNEL_LOG = Path("/dev/kmsg")
RECORDS_PER_TURN_MAX = 256
RUN_S_MAX = 900.0  # all limits of all checks, and then some
OUTPUT_BYTES_MAX = 1 << 20
REASON_CHARS_MAX = 500

log = logging.getLogger("unicron.hardware")


class HardwareWatch:
    """Poll ``fds`` for reading; they change. ``serve(ready)`` gives events for the agent's machine."""

    def __init__(
        self, folder: Path, *, checks: bool, addresses: Iterable[str] = (), kernel_log: Path = KERNEL_LOG
    ) -> None:
        """folder: the node's own. checks: run them at once (the node is not used before). addresses: of its own, that
        it cannot do without."""
        self._folder = folder
        self._environment = {**os.environ, ADDRESSES: " ".join(dict.fromkeys(addresses))}
        self._run: subprocess.Popen[bytes] | None = None
        self._until_s = 0.0
        self._output = b""
        self._wanted: bool | None = None  # is_idle of a run that is to follow
        self._log_fd = -1
        self._events: subprocess.Popen[bytes] | None = None  # where the kernel log cannot be read
        if not checks:
            return
        try:
            self._log_fd = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._follow_events()
        else:
            with contextlib.suppress(OSError):
                os.lseek(self._log_fd, 0, os.SEEK_END)
        self.check(is_idle=True)

    @property
    def fds(self) -> tuple[int, ...]:
        found = [] if self._log_fd < 0 else [self._log_fd]
        for child in (self._run, self._events):
            if child is not None and child.stdout is not None:
                found.append(child.stdout.fileno())
        return tuple(found)

    def _follow_events(self) -> None:
        if importlib.util.find_spec("pynvml") is None:
            return
        command = [sys.executable, "-m", "unicron.runtime.checks.nvml_events"]
        self._events = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert self._events.stdout is not None
        os.set_blocking(self._events.stdout.fileno(), False)

    def _serve_events(self) -> list[HardwareFailed]:
        if self._events is None or self._events.stdout is None:
            return []
        try:
            data = os.read(self._events.stdout.fileno(), 8192)
        except BlockingIOError:
            return []
        if not data:
            self._end_events()
        said = (meaning(line.decode("utf-8", "replace")) for line in data.splitlines())
        return [HardwareFailed(each[0].value, each[1]) for each in said if each is not None]

    def _end_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            assert events.stdout is not None
            events.stdout.close()
            events.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                events.wait(2.0)

    def check(self, *, is_idle: bool) -> None:
        if self._run is not None:
            self._wanted = is_idle
            return
        command = [sys.executable, "-m", "unicron.runtime.checks.supervise", "--nice", "--folder", str(self._folder)]
        self._output, self._until_s = b"", time.monotonic() + RUN_S_MAX
        self._run = subprocess.Popen(
            [*command, *(["--idle"] if is_idle else [])],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, env=self._environment,
        )  # fmt: skip
        assert self._run.stdout is not None
        os.set_blocking(self._run.stdout.fileno(), False)

    def serve(self) -> list[NodeChecked | HardwareFailed]:
        return [*self._serve_run(), *self._serve_log(), *self._serve_events()]

    @property
    def is_overdue(self) -> bool:
        return self._run is not None and time.monotonic() >= self._until_s

    def _serve_run(self) -> list[NodeChecked]:
        if self._run is None or self._run.stdout is None:
            return []
        while True:
            try:
                data = os.read(self._run.stdout.fileno(), 65536)
            except BlockingIOError:
                if time.monotonic() < self._until_s:
                    return []
                log.error("the checks did not end in %g s", RUN_S_MAX)
                data = b""
            if not data or len(self._output) > OUTPUT_BYTES_MAX:
                break
            self._output += data
        results = _results(self._output)
        self._end_run()
        if self._wanted is not None:
            is_idle, self._wanted = self._wanted, None
            self.check(is_idle=is_idle)
        told = tuple((r.check, r.answer.value, cut(r.reason, REASON_CHARS_MAX)) for r in results)
        return [NodeChecked(verdict(results), told)]

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        assert run.stdout is not None
        run.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, 9)  # its own session: what it started ends with it
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(2.0)

    def _serve_log(self) -> list[HardwareFailed]:
        found: list[HardwareFailed] = []
        if self._log_fd < 0:
            return found
        for _ in range(RECORDS_PER_TURN_MAX):
            try:
                record = read(self._log_fd)
            except OSError as problem:
                log.error("the kernel log cannot be read any more: %s", problem)
                os.close(self._log_fd)
                self._log_fd = -1
                break
            if record is None:
                break
            said = meaning(record[1])
            if said is not None:
                found.append(HardwareFailed(said[0].value, said[1]))
        return found

    def close(self) -> None:
        self._wanted = None
        self._end_run()
        self._end_events()
        if self._log_fd >= 0:
            os.close(self._log_fd)
            self._log_fd = -1


def _results(output: bytes) -> list[Result]:
    """No answer at all is unknown, like every other silence."""
    try:
        return msgspec.json.decode(output, type=list[Result])
    except msgspec.DecodeError as problem:
        return [Result("checks", Answer.UNKNOWN, f"their process did not answer: {problem}")]
