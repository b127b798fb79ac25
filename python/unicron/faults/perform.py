"""Do a fault to this very process. Real ones: real signals, a real deadlock, the GIL really held."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

from unicron.faults.kinds import FaultKind


class InjectedFault(RuntimeError):
    """The exception that the fault `exception` raises."""


def perform(kind: int, where: str) -> None:
    """Returns only where the fault lets the process go on (stop, after SIGCONT; reset is done by the caller)."""
    match FaultKind(kind):
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.SEGV:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case FaultKind.ABORT:
            os.abort()
        case FaultKind.EXIT:
            os._exit(3)
        case FaultKind.EXCEPTION:
            raise InjectedFault(f"injected at {where}")
        case FaultKind.OOM:
            raise MemoryError(f"injected at {where}: cannot allocate")
        case FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case FaultKind.DEADLOCK:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case FaultKind.GIL:
            ctypes.PyDLL(None).pause()  # PyDLL keeps the GIL during the call
        case FaultKind.SPIN:
            while True:
                pass
        case FaultKind.LEAVE:
            sys.exit(0)
