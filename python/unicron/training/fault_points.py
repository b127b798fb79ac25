"""The places in an iteration where a fault that was armed for it happens (unicron inject; faults/kinds.py).

A point that nothing is armed for costs one load of the pulse page.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from unicron.faults.kinds import AFTER, BEFORE, INSIDE, FaultPoint

OTHERS_ARE_IN_S = 0.05  # how long who is to fail in an operation with others lets them go ahead
COMPLETE_S_MAX = 10.0  # who is to fail after a collective that nobody waits for

#: (kind of fault, point, micro-batch or whatever the point counts) -> does it.
Perform = Callable[[int, FaultPoint, int], None]


def carry_out(operation: Callable[[bool], Any], then: Callable[[], None] | None) -> None:
    """operation(is_async) with others. It is begun and waited for apart only where something is to be done between."""
    work = operation(then is not None)
    if then is not None:
        then()
        work.wait()


class FaultPoints:
    """Of one worker. pulse: its page, in which faults are armed; iteration: the one it is at."""

    def __init__(self, pulse: Any, iteration: Callable[[], int], perform: Perform) -> None:
        self._pulse, self._iteration, self._perform = pulse, iteration, perform

    def taken(self, point: FaultPoint, number: int = -1) -> int:
        """The kind of fault that was armed for here, and no longer is; 0: none."""
        return int(self._pulse.take_fault(int(point), self._iteration(), number))

    def maybe(self, point: FaultPoint, number: int = -1) -> None:
        kind = self.taken(point, number)
        if kind:
            self._perform(kind, point, number)

    def enter(self, point: FaultPoint, number: int) -> Callable[[], None] | None:
        """An operation with others is about to begin here. Returns what is to be called when it has begun, if there is
        a fault for then.
        """
        kind = self.taken(point, number)
        if not kind:
            return None
        time.sleep(OTHERS_ARE_IN_S)
        return functools.partial(self._perform, kind, point, number)

    def enter_passage(self, point: FaultPoint) -> Callable[[], None] | None:
        before = self.enter(point, BEFORE)
        if before is not None:
            before()
        return self.enter(point, INSIDE)

    def joint(self, point: FaultPoint, operation: Callable[[bool], Any]) -> None:
        """operation(is_async) with others, a passage."""
        carry_out(operation, self.enter_passage(point))
        self.maybe(point, AFTER)

    def early(self, begin: Callable[[], Any]) -> Any:
        """A segment's all-reduce under the backward, a passage that nobody waits in: after it, it is complete."""
        then = self.enter_passage(FaultPoint.EAGER)
        work = begin()
        if then is not None:
            then()
        kind = self.taken(FaultPoint.EAGER, AFTER)
        if kind:
            deadline = time.monotonic() + COMPLETE_S_MAX
            while not work.is_completed() and time.monotonic() < deadline:
                time.sleep(OTHERS_ARE_IN_S)
            self._perform(kind, FaultPoint.EAGER, AFTER)
        return work
