"""Named timers as the machines ask for them: set, moved, cancelled, each fires once."""

from __future__ import annotations

from collections.abc import Iterator


class Timers:
    def __init__(self) -> None:
        self._at_ms: dict[str, float] = {}

    def set(self, name: str, at_ms: float) -> None:
        self._at_ms[name] = at_ms

    def cancel(self, name: str) -> None:
        self._at_ms.pop(name, None)

    def due(self, now_ms: float) -> Iterator[str]:
        """Those that are due now, one by one; what is set meanwhile waits for the next call, lest a loop whose steps
        take longer than its timers never does anything else."""
        for name, at_ms in sorted(self._at_ms.items(), key=lambda item: item[1]):
            if at_ms > now_ms:
                return
            if self._at_ms.get(name) == at_ms:  # not cancelled or moved by a step before it
                del self._at_ms[name]
                yield name

    def wait_ms(self, now_ms: float, most_ms: float) -> float:
        """How long a poll may sleep."""
        first = min(self._at_ms.values(), default=now_ms + most_ms)
        return max(0.0, min(most_ms, first - now_ms))
