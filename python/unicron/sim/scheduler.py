"""Virtual time: a heap of what happens when. Ties go by order of insertion, so a history is a function of the seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable


class Scheduled:
    __slots__ = ("call", "is_cancelled")

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.is_cancelled = False


class Scheduler:
    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Scheduled]] = []
        self._count = 0

    def after(self, delay_ms: float, call: Callable[[], None]) -> Scheduled:
        return self.at(self.now_ms + delay_ms, call)

    def at(self, at_ms: float, call: Callable[[], None]) -> Scheduled:
        self._count += 1
        entry = Scheduled(call)
        heapq.heappush(self._heap, (max(at_ms, self.now_ms), self._count, entry))
        return entry

    def run_until(self, at_ms: float, is_over: Callable[[], bool]) -> None:
        """Until virtual time reaches at_ms, nothing is left, or is_over() (asked after every event)."""
        while self._heap and self._heap[0][0] <= at_ms:
            self.now_ms, _, entry = heapq.heappop(self._heap)
            if entry.is_cancelled:
                continue
            self.num_events += 1
            entry.call()
            if is_over():
                return
        self.now_ms = max(self.now_ms, at_ms)


class Streams:
    """Random streams by name from one seed: adding a consumer does not shift the others."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._streams: dict[str, random.Random] = {}

    def __call__(self, name: str) -> random.Random:
        if name not in self._streams:
            self._streams[name] = random.Random(f"{self._seed}/{name}")
        return self._streams[name]

