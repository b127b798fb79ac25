"""What a policy earned and lost: GPU-hours by what they were spent on (they sum to all there were), WAF over time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

BINS = 480  # of the curve

# What a GPU-hour can be. Together they are nodes x GPUs x hours.
USES = (
    "productive", "overhead", "recompute", "detection", "infrastructure", "transition", "waiting", "idle", "standby",
    "down",
)  # fmt: skip
LOST = tuple(use for use in USES if use not in ("productive", "down"))


@dataclass
class Downtime:
    """One incident as its task met it: seconds by part; waiting for a node is not in it."""

    at_s: float
    kind: str
    cause: str
    task: str
    parts_s: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())


@dataclass
class Account:
    duration_s: float
    num_gpus: int
    gpu_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(USES, 0.0))
    flop: float = 0.0  # weighted, committed
    training_s: dict[str, float] = field(default_factory=dict)  # task -> seconds on committed iterations
    downtimes: list[Downtime] = field(default_factory=list)
    num_events: int = 0
    num_plans: int = 0
    _steps: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS + 1))
    _edges: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(BINS + 1))

    def use(self, what: str, gpus: float, seconds: float) -> None:
        self.gpu_s[what] += gpus * seconds

    def earn(self, begin_s: float, end_s: float, flops: float) -> None:
        """flops for the whole of begin..end; O(1): whole bins by their difference, the two ends by their part."""
        self.flop += flops * (end_s - begin_s)
        width = self.duration_s / BINS
        first, last = int(begin_s / width), int(end_s / width)
        if first == last:
            self._edges[first] += flops * (end_s - begin_s)
            return
        self._edges[first] += flops * ((first + 1) * width - begin_s)
        self._edges[last] += flops * (end_s - last * width)
        self._steps[first + 1] += flops
        self._steps[last] -= flops

    def lose(self, at_s: float, flop: float) -> None:
        """FLOP that were earned and are computed again."""
        self.flop -= flop
        self._edges[min(int(at_s / self.duration_s * BINS), BINS)] -= flop

    @property
    def curve(self) -> npt.NDArray[np.float64]:
        """Mean WAF in FLOP/s of each of BINS equal parts of the time. Work lost counts where it was lost, so a bin
        may lie below zero."""
        width = self.duration_s / BINS
        result: npt.NDArray[np.float64] = np.cumsum(self._steps[:BINS]) + self._edges[:BINS] / width
        return result

    @property
    def waf_mean(self) -> float:
        return self.flop / self.duration_s

    @property
    def gpu_hours(self) -> dict[str, float]:
        return {use: seconds / 3600 for use, seconds in self.gpu_s.items()}

    @property
    def gpu_hours_wasted(self) -> float:
        """All that a policy could have used and did not: everything but productive hours and broken machines."""
        return sum(self.gpu_s[use] for use in LOST) / 3600

    def ettr(self, gpus: dict[str, float]) -> float:
        """Time on committed iterations over wall time; several tasks by the GPUs they began with."""
        total = sum(gpus.values())
        share = sum(gpus[name] * self.training_s.get(name, 0.0) for name in gpus)
        return share / total / self.duration_s if total else 0.0
