"""Histories of others: a real cluster's incidents from a file, and Unicron's trace-a and trace-b by their counts."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from unicron.simulate.history import History, HistoryProblem, Kind, history_of

DAY_S = 86_400.0
FILE_BYTES_MAX = 64 << 20
COLUMNS = {"node", "start_day", "end_day", "class", "desc", "mapped_severity"}
SEVERITY_KINDS = {"SEV1": Kind.NODE, "SEV2": Kind.PROCESS, "SEV3": Kind.LINK, "SEV3->SEV1": Kind.NODE}


def read_incidents(path: Path, num_nodes: int = 0) -> History:
    """A table of incidents with a begin and an end: node, start_day, end_day, class, desc, mapped_severity.

    A name that is the node's number (n210) keeps it; 0 takes the highest number there is. Raises HistoryProblem.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise HistoryProblem(f"{path} is larger than {FILE_BYTES_MAX} bytes")
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = COLUMNS - set(reader.fieldnames or ())
            if missing:
                raise HistoryProblem(f"{path} has no column {', '.join(sorted(missing))}")
            rows = [_row(path, number, row) for number, row in enumerate(reader, 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise HistoryProblem(f"cannot read {path}: {error}") from None
    if not rows:
        raise HistoryProblem(f"{path} has no incident")
    nodes = num_nodes or 1 + max(row[1] for row in rows)
    days = np.ceil(max(row[0] + row[3] for row in rows) / DAY_S)
    return history_of(path.name, nodes, float(days) * DAY_S, rows)


def _row(path: Path, number: int, row: dict[str, str]) -> tuple[float, int, Kind, float, str]:
    try:
        begin_s, end_s = float(row["start_day"]) * DAY_S, float(row["end_day"]) * DAY_S
        node = int(row["node"].lstrip("abcdefghijklmnopqrstuvwxyz-"))
        kind = SEVERITY_KINDS[row["mapped_severity"]]
    except (KeyError, ValueError, AttributeError):
        raise HistoryProblem(f"{path}, line {number}: {row} is no incident") from None
    lasts_s = max(end_s - begin_s, 0.0) if kind is Kind.NODE else 0.0
    return begin_s, node, kind, lasts_s, f"{row['class']}: {row['desc']}"


class Counts(NamedTuple):
    """A trace known by its counts alone. repair_days: uniform between the two."""

    name: str
    days: float
    node_faults: int
    others: int
    repair_days: tuple[float, float]


# Unicron, section of the overall traces. The counts are remembered; trace-b's repair times are not known at all and
# taken as a quarter of trace-a's, because days of repair would leave no nodes at its rate.
TRACE_A = Counts("trace-a", 56.0, 10, 33, (1.0, 7.0))
TRACE_B = Counts("trace-b", 7.0, 26, 80, (0.25, 1.75))
SHARE_PROCESS = 23.3 / (23.3 + 48.6)  # of the others, SEV2 against SEV3: Unicron's shares of failed tasks, figure 1


def by_counts(counts: Counts, num_nodes: int, seed: int, repair_scale: float = 1.0) -> History:
    """Exactly so many of each, at uniform moments on uniform nodes."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, Kind, float, str]] = []
    low, high = counts.repair_days
    for _ in range(counts.node_faults):
        lasts_s = float(rng.uniform(low, high)) * DAY_S * repair_scale
        at_s = float(rng.uniform(0, counts.days)) * DAY_S
        rows.append((at_s, int(rng.integers(num_nodes)), Kind.NODE, lasts_s, "SEV1"))
    for number in range(counts.others):
        is_process = number < round(counts.others * SHARE_PROCESS)
        kind, cause = (Kind.PROCESS, "SEV2") if is_process else (Kind.LINK, "SEV3")
        rows.append((float(rng.uniform(0, counts.days)) * DAY_S, int(rng.integers(num_nodes)), kind, 0.0, cause))
    return history_of(f"{counts.name}, seed {seed}", num_nodes, counts.days * DAY_S, rows)
