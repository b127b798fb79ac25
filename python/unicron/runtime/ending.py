"""When a daemon shall end (a signal, or the end of its lifeline: both wake its poll at once), and its priority."""

from __future__ import annotations

import contextlib
import os
import signal

import zmq

SIGNALS = (signal.SIGTERM, signal.SIGINT)
NICE = -10  # who decides must run although every core is busy with training


def rise() -> None:
    """Run before the workers, where that is permitted: a daemon that decides works for a fraction of a millisecond, and
    must not wait for a busy core's next turn first. Niceness alone says nothing between sessions (sched_autogroup), so
    it is a real-time priority, the lowest one. Threads made later inherit it; after `settle` nothing does any more.
    """
    with contextlib.suppress(OSError):
        os.nice(NICE)
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))


def settle() -> None:
    """The calling thread keeps what `rise` gave it, and what it starts from here on begins as any other process."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_RR:
            least = os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
            os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, least)


class Ending:
    """Register in the daemon's poller; ``look`` after every poll; ``reason`` is not empty when it
    shall end.
    """

    def __init__(self, lifeline: int = -1) -> None:
        """lifeline: a descriptor at its end when whoever started us is gone; -1: none."""
        self.reason = ""
        self._lifeline = lifeline
        self._awake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def catch_signals(self) -> None:
        """The main thread only."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda number, _: self.ask(signal.Signals(number).name))

    def ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def register(self, poller: zmq.Poller) -> None:
        poller.register(self._awake, zmq.POLLIN)
        if self._lifeline >= 0:
            poller.register(self._lifeline, zmq.POLLIN)

    def look(self, ready: dict[object, int]) -> None:
        if self._lifeline in ready:
            self.ask("the process that started us is gone")
        if self._awake in ready:
            os.read(self._awake, 4096)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self._awake)
        os.close(self._waker)
