"""Clocks: every daemon reads its own monotonic clock, which begins anywhere, runs a little fast or slow, and may jump.

A jump goes forward only (a machine that was paused): the machines' contract is that time never goes back within one
life. Between two lives it may be anything.
"""

from __future__ import annotations

from collections.abc import Callable

from unicron.sim.scheduler import Scheduled, Scheduler


class Clock:
    """now = offset + rate x virtual time."""

    def __init__(self, scheduler: Scheduler, offset_ms: float = 0.0, rate: float = 1.0) -> None:
        self._scheduler = scheduler
        self.offset_ms, self.rate = offset_ms, rate
        self.stepped: Callable[[], None] = lambda: None

    @property
    def now_ms(self) -> float:
        return self.offset_ms + self.rate * self._scheduler.now_ms

    def world_ms(self, at_ms: float) -> float:
        """When this clock will show at_ms."""
        return (at_ms - self.offset_ms) / self.rate

    def step(self, by_ms: float) -> None:
        assert by_ms >= 0, "a monotonic clock does not go back"
        self.offset_ms += by_ms
        self.stepped()


class Timers:
    """A host's timers by name, at times of its clock: setting one again replaces it."""

    def __init__(
        self, scheduler: Scheduler, clock: Clock, fired: Callable[[str], None],
        gate: Callable[[Callable[[], None]], None] = lambda call: call(),
    ) -> None:  # fmt: skip
        """gate: how a call reaches the host's loop; one that comes late may find its timer cancelled meanwhile."""
        self._scheduler, self._clock, self._fired, self._gate = scheduler, clock, fired, gate
        self._pending: dict[str, tuple[float, Scheduled]] = {}
        clock.stepped = self._rearm

    def __len__(self) -> int:
        return len(self._pending)

    def set(self, name: str, at_ms: float) -> None:
        old = self._pending.pop(name, None)
        if old is not None:
            old[1].cancel()

        def deliver() -> None:
            found = self._pending.get(name)
            if found is not None and found[1] is timer:
                del self._pending[name]
                self._fired(name)

        timer = self._scheduler.at_unless(self._clock.world_ms(at_ms), lambda: self._gate(deliver))
        self._pending[name] = (at_ms, timer)

    def cancel(self, name: str) -> None:
        self._pending.pop(name)[1].cancel()

    def cancel_all(self) -> None:
        for _, timer in self._pending.values():
            timer.cancel()
        self._pending.clear()

    def _rearm(self) -> None:
        """The clock jumped: what is due by now is due now."""
        for name, (at_ms, _) in list(self._pending.items()):
            self.set(name, at_ms)
