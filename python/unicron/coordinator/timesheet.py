"""How a task spent its time and what it earned: the sums behind ETTR and WAF. accounting.py feeds them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

HISTORY_MAX = 1_000
MEANT_TO_RUN = ("starting", "running", "recovering", "waiting")  # not: queued before its first start, suspended


@dataclass(slots=True)
class Accounts:
    """(journal) of one task."""

    kind: str = ""
    slots: int = 0
    waf: float = 0.0  # FLOP/s, weighted
    since_ms: float = 0.0
    spent_ms: dict[str, float] = field(default_factory=dict)  # by kind
    flop: float = 0.0  # weighted: the integral of WAF

    def spent(self, now_ms: float) -> dict[str, float]:
        """Milliseconds by kind until now."""
        spent = dict(self.spent_ms)
        if self.kind:
            spent[self.kind] = spent.get(self.kind, 0.0) + max(now_ms - self.since_ms, 0.0)
        return spent

    def flop_until(self, now_ms: float) -> float:
        return self.flop + self.waf * max(now_ms - self.since_ms, 0.0) / 1000

    def ettr(self, now_ms: float) -> float | None:
        """Time spent on committed iterations over the time it was meant to run; None before its first start."""
        spent = self.spent(now_ms)
        wall = sum(spent.get(kind, 0.0) for kind in MEANT_TO_RUN)
        return spent.get("running", 0.0) / wall if wall > 0 else None


def new_history() -> deque[tuple[float, float]]:
    return deque(maxlen=HISTORY_MAX)
