"""Real worker processes for tests of the native core: a pulse page, a control socket, and code to run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType

from unicron import _core

WAIT_S_MAX = 20.0  # far above what anything here takes: a bound, not an expectation

_PRELUDE = """
import os, signal, socket, sys, threading, time
from unicron import _core
pulse = _core.PulsePage(int(sys.argv[1]), int(sys.argv[2]))
monitor = _core.WorkerMonitor(int(sys.argv[3]), pulse)
fds = [int(text) for text in sys.argv[4:]]
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {WAIT_S_MAX} s: {what}")
        time.sleep(0.002)


class Worker:
    """A process that runs `code` with `pulse`, `monitor` and `fds` in scope. The test is its agent."""

    def __init__(self, pages_fd: int, slot: int, code: str, fds: tuple[int, ...] = ()) -> None:
        self.slot = slot
        self.pulse = _core.PulsePage(pages_fd, slot)
        self.control, theirs = socket.socketpair()
        self.control.settimeout(WAIT_S_MAX)
        numbers = (pages_fd, slot, theirs.fileno(), *fds)
        command = [sys.executable, "-c", _PRELUDE + code, *map(str, numbers)]
        with theirs:
            self.process = subprocess.Popen(
                command, pass_fds=(pages_fd, theirs.fileno(), *fds), stderr=subprocess.PIPE, text=True
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> Worker:
        wait_until(
            lambda: self.pulse.owner_pid == self.pid or self.process.poll() is not None, "worker holds its mutex"
        )
        assert self.process.poll() is None, self.stderr()
        return self

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def exit_code(self) -> int:
        return self.process.wait(WAIT_S_MAX)

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def receive(self) -> bytes:
        """One frame from the worker."""
        length = int.from_bytes(self._exactly(4), "little")
        return self._exactly(length)

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = self.control.recv(num_bytes - len(data))
            assert part, f"worker closed its connection: {self.stderr()}"
            data += part
        return data

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.control.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S_MAX)
        assert self.process.stderr is not None
        self.process.stderr.close()


def frame(kind: int, epoch: int, touched: tuple[int, ...], message: bytes) -> bytes:
    """A frame from agent to worker."""
    body = bytes((kind,)) + epoch.to_bytes(8, "little") + len(touched).to_bytes(2, "little")
    body += b"".join(rank.to_bytes(4, "little") for rank in touched) + message
    return len(body).to_bytes(4, "little") + body
