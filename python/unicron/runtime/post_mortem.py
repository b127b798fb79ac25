"""What this node's files and kernel say of a worker that stopped or died: read once, at that moment."""

from __future__ import annotations

import signal
import time

from unicron.agent.events import ChildStatusSeen, Pulse
from unicron.messages import ChildStatus
from unicron.runtime.holding import why_held
from unicron.runtime.last_words import LastWords, last_words
from unicron.runtime.oom import OomWatch, Witness


class PostMortem:
    """ordered(worker, log) before there is a process, forked(worker, pid) while it lives, forget(worker) in the end."""

    def __init__(self) -> None:
        self._oom = OomWatch()
        self._logs: dict[str, str] = {}  # worker -> its stderr

    def ordered(self, worker: str, stderr: str) -> None:
        self._logs[worker] = stderr

    def forked(self, worker: str, pid: int) -> None:
        self._oom.begin(worker, pid)

    def forget(self, worker: str) -> None:
        self._oom.forget(worker)
        self._logs.pop(worker, None)

    def seen(self, status: ChildStatus, pulse: Pulse | None) -> ChildStatusSeen:
        """The status as an event, with what explains it."""
        seen_ns = time.monotonic_ns()
        held, witness, words = "", Witness(None, ""), LastWords()
        if status.kind == "stopped":
            held = why_held(status.pid)
        elif (status.kind, status.status) == ("signaled", signal.SIGKILL):
            witness = self._oom.ended(status.worker, status.pid)
        elif status.kind in ("exited", "signaled") and status.status:
            words = last_words(self._logs.get(status.worker, ""))
        return ChildStatusSeen(status, seen_ns, pulse, held, witness.oom, witness.text, words.text, words.where)

    def close(self) -> None:
        self._oom.close()
