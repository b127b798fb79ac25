"""Virtual time: a heap of what happens when. Ties go by order of insertion, so a history is a function of the seed."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any


class Scheduled:
    """A call that is due: a list, because the heap compares thousands of them in a moment. [at_ms, order, call]"""

    __slots__ = ("entry",)

    def __init__(self, entry: list[Any]) -> None:
        self.entry = entry

    def cancel(self) -> None:
        self.entry[2] = None


class Scheduler:
    def __init__(self) -> None:
        self.now_ms = 0.0
        self.num_events = 0
        self._heap: list[list[Any]] = []
        self._count = 0

    def after(self, delay_ms: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, [self.now_ms + max(delay_ms, 0.0), self._count, call])

    def at(self, at_ms: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, [max(at_ms, self.now_ms), self._count, call])

    def at_unless(self, at_ms: float, call: Callable[[], None]) -> Scheduled:
        """It may still be cancelled."""
        self._count += 1
        entry = [max(at_ms, self.now_ms), self._count, call]
        heapq.heappush(self._heap, entry)
        return Scheduled(entry)

    def run_until(self, at_ms: float, is_over: Callable[[], bool]) -> None:
        """Until virtual time reaches at_ms, nothing is left, or is_over() (asked after every event)."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= at_ms:
            self.now_ms, _, call = pop(heap)
            if call is None:
                continue
            self.num_events += 1
            call()
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
