"""Named timers as the machines ask for them: set, moved, cancelled, each fires once."""

from __future__ import annotations


class Timers:
    def __init__(self) -> None:
        self._at_ms: dict[str, float] = {}

    def set(self, name: str, at_ms: float) -> None:
        self._at_ms[name] = at_ms

    def cancel(self, name: str) -> None:
        self._at_ms.pop(name, None)

    def take_due(self, now_ms: float) -> str | None:
        """The one that is due longest; one at a time, because its step may cancel the next."""
        name = min(self._at_ms, key=self._at_ms.__getitem__, default=None)
        if name is None or self._at_ms[name] > now_ms:
            return None
        del self._at_ms[name]
        return name

    def wait_ms(self, now_ms: float, most_ms: float) -> float:
        """How long a poll may sleep."""
        first = min(self._at_ms.values(), default=now_ms + most_ms)
        return max(0.0, min(most_ms, first - now_ms))
