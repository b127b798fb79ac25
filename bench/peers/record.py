"""What a rank says while it trains, and the fault that it does to itself. The same under every system.

One file a process, one JSON line an event, one write a line: a killed process leaves whole lines. Times are of the
machine's monotonic clock. The run's folder and fault come in the environment (PEERS_RUN, PEERS_FAULT, PEERS_RANKS).
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peers.job import COMPARED, FAULT_ITERATION

INSIDE = ("kill", "stop", "deadlock", "exception", "gil", "two", "source")  # faults that a rank does to itself


class Recorder:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.folder = Path(os.environ["PEERS_RUN"])
        self._fault = os.environ.get("PEERS_FAULT", "none")
        self._ranks = [int(word) for word in os.environ["PEERS_RANKS"].split(",")]
        path = self.folder / "events" / f"{rank}.{os.getpid()}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.say("boot")

    def say(self, event: str, iteration: int = -1, **facts: Any) -> None:
        line = {"t": time.monotonic(), "event": event, "rank": self.rank, "i": iteration, **facts}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def begins(self, iteration: int, micro_batch: int) -> None:
        """A forward begins. A fault strikes at the second of a rank's two micro-batches: half of its work is done."""
        self.say("forward", iteration, m=micro_batch)
        is_second = micro_batch % 2 == 1
        if iteration == FAULT_ITERATION and is_second and self.rank in self._ranks and self._fault in INSIDE:
            self._strike(iteration)

    def committed(self, iteration: int, world: int, loss: float, tokens: float) -> None:
        self.say("commit", iteration, world=world, loss=loss, tokens=tokens)

    def compared(self, iteration: int, weights: Callable[[], np.ndarray]) -> None:
        """Keeps the weights after the iteration that runs are compared at."""
        if iteration == COMPARED - 1:
            np.save(self.folder / f"weights_{self.rank}.npy", weights())

    def told_end(self) -> float:
        """Iterations to train: without end until the driver has seen what it wants."""
        try:
            return int((self.folder / "end").read_text())
        except FileNotFoundError:
            return float("inf")

    def first_time(self, name: str) -> bool:
        """Once in a run, whatever is started again."""
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _strike(self, iteration: int) -> None:
        if not self.first_time(f"struck_{self.rank}"):
            return
        self.say("fault", iteration, fault=self._fault)
        strike(self._fault)

    def serving(self) -> None:
        """This rank is about to hand its state to another. A second one dies of that in the fault `source`."""
        self.say("serving")
        again = (self.folder / f"struck_{self._ranks[0]}").exists()
        if self._fault == "source" and again and self.first_time("struck_source"):
            self.say("fault", fault="source")
            strike("kill")


def strike(fault: str) -> None:
    """Does it to the calling process."""
    if fault in ("kill", "two", "source"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "exception":
        raise RuntimeError("injected")
    elif fault == "deadlock":
        threading.Thread(target=_live, daemon=True).start()
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif fault == "gil":
        ctypes.PyDLL(None).sleep(100_000)  # PyDLL keeps the GIL during the call


def _live() -> None:
    while True:
        time.sleep(0.05)
