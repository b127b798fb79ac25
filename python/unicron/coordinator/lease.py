"""A coordinator's right to decide, where there are several: until when it may act, by its own clock alone.

Who leads holds a key under a lease of so many milliseconds, granted and refreshed by somebody else's clock. What it
may be sure of is counted from before it asked, and ends `margin_ms` early. So when the lease can have run out and a
successor begins, the former leader has stopped. A lease that was lost once stays lost: its key may be another's by now.

Pure: runtime/election.py has the key in etcd and the clock, the simulator has others.
"""

from __future__ import annotations

from typing import Literal

NEVER_MS = float("-inf")


class Lease:
    def __init__(self, length_ms: float, margin_ms: float, asked_ms: float) -> None:
        """asked_ms: our clock before the grant was asked for."""
        assert 0 <= margin_ms < length_ms, (margin_ms, length_ms)
        self.span_ms = length_ms - margin_ms
        self._until_ms = asked_ms + self.span_ms
        self.is_lost = False

    def refreshed(self, asked_ms: float) -> None:
        self._until_ms = max(self._until_ms, asked_ms + self.span_ms)

    def lose(self) -> None:
        """It is known that the key is not ours any more."""
        self.is_lost = True

    def left_ms(self, now_ms: float) -> float:
        """0 or less: somebody else may lead."""
        return NEVER_MS if self.is_lost else self._until_ms - now_ms

    @property
    def refresh_ms(self) -> float:
        """Between two refreshes: several may fail before the span is over."""
        return self.span_ms / 4


def refused_append(leader: int | None, own: int, head: int, before: int) -> Literal["written", "followed", "broken"]:
    """What a refused transaction on the journal means.

    Args:
        leader: create revision of the leader key as it is now, None when there is none; own: of ours.
        head: number of the journal's last batch as it is now; before: as we knew it.
    """
    if leader != own:
        return "followed"
    return "written" if head == before + 1 else "broken"  # written: by us, and the answer was lost
