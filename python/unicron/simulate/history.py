"""What happens to a cluster's nodes, as arrays sorted by time: the same history is played to every policy.

Times are seconds since the beginning, nodes are numbers from 0. A node that fails again while it is away only stays
away longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

EVENTS_MAX = 1 << 24


class Kind(IntEnum):
    NODE = 0  # SEV1: the node is gone for lasts_s
    PROCESS = 1  # SEV2: a process died, its node is whole
    LINK = 2  # SEV3: a connection broke, both ends are alive
    HANG = 3  # nobody died and nobody advances
    MOVE = 4  # planned: another machine takes the node's role, at once and one for one
    PREEMPT = 5  # as NODE, announced some time before


class HistoryProblem(ValueError):
    """A history that cannot be played; one line that says what is wrong and where."""


@dataclass(frozen=True)
class History:
    """at_s, lasts_s (float64), node (int32), kind (int8), cause (int16, place in causes): one row an event."""

    name: str
    num_nodes: int
    duration_s: float
    at_s: npt.NDArray[np.float64]
    node: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    lasts_s: npt.NDArray[np.float64]
    cause: npt.NDArray[np.int16]
    causes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def mean_repair_s(self) -> float:
        away = self.lasts_s[np.isin(self.kind, (Kind.NODE, Kind.PREEMPT))]
        return float(away.mean()) if len(away) else 0.0


def history_of(
    name: str, num_nodes: int, duration_s: float, rows: list[tuple[float, int, Kind, float, str]]
) -> History:
    """From rows (at_s, node, kind, lasts_s, cause) in any order. Raises HistoryProblem for rows that cannot be."""
    if len(rows) > EVENTS_MAX:
        raise HistoryProblem(f"{name}: {len(rows)} events, at most {EVENTS_MAX} can be played")
    rows = sorted(rows, key=lambda row: (row[0], row[1]))
    causes = tuple(dict.fromkeys(row[4] for row in rows))
    places = {cause: place for place, cause in enumerate(causes)}
    for number, (at_s, node, _, lasts_s, _) in enumerate(rows, 1):
        if not 0 <= at_s <= duration_s or lasts_s < 0 or not 0 <= node < num_nodes:
            raise HistoryProblem(
                f"{name}, event {number}: at {at_s:g} s on node {node} for {lasts_s:g} s does not fit "
                f"{num_nodes} nodes and {duration_s:g} s"
            )
    return History(
        name=name,
        num_nodes=num_nodes,
        duration_s=duration_s,
        at_s=np.array([row[0] for row in rows], np.float64),
        node=np.array([row[1] for row in rows], np.int32),
        kind=np.array([row[2] for row in rows], np.int8),
        lasts_s=np.array([row[3] for row in rows], np.float64),
        cause=np.array([places[row[4]] for row in rows], np.int16),
        causes=causes,
    )
