"""unicron's own times, as its benches wrote them: read from bench/results, kept in measured.json for installed copies.

`python -m unicron.simulate.measured` reads the files again; a test fails when measured.json is not what they say.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

# Runs of `managed` on two GPUs, a fault in each part of an iteration; what ending, adopting, regrouping are made of.
TABLES = "bench/results/gpu_2/tables.md"
CASES = ("kill-compute", "kill-reduce", "kill-commit", "kill-step")


class Measured(NamedTuple):
    """Seconds, each a median; sources: name -> file and row."""

    detect_process_s: float  # fault -> the agent knows
    heal_s: float  # wall time of the interrupted iteration less an ordinary one, two GPUs
    iteration_s: float  # an ordinary one of the same runs
    gone_s: float  # fault -> nothing of the process is left on its GPU
    adopt_s_per_gib: float  # mapping a predecessor's memory
    group_s: float  # one communicator of two ranks, a later one of a process
    sources: dict[str, str]


@functools.cache
def stored() -> Measured:
    text = resources.files("unicron.simulate").joinpath("measured.json").read_text(encoding="utf-8")
    return Measured(**json.loads(text))


def read(root: Path) -> Measured:
    """From a checkout's bench/results. Raises OSError where a file is not there, ValueError where a row is not."""
    tables = (root / TABLES).read_text(encoding="utf-8")
    runs = _managed(tables)
    adopt = {gib: _median(tables, f"{gib} GiB, map the predecessor's") for gib in (1, 48)}
    return Measured(
        detect_process_s=statistics.median(row["detect"] for row in runs) / 1e3,
        heal_s=statistics.median(row["lost"] for row in runs) / 1e3,
        iteration_s=statistics.median(row["iteration"] for row in runs) / 1e3,
        gone_s=_median(tables, "32 GiB: pidfd") / 1e3,
        adopt_s_per_gib=(adopt[48] - adopt[1]) / 47 / 1e3,
        group_s=_median(tables, "made, a later one") / 1e3,
        sources={
            "detect_process_s": f"{TABLES}: median of detect over {len(runs)} runs of {', '.join(CASES)}",
            "heal_s": f"{TABLES}: median of lost over the same runs",
            "iteration_s": f"{TABLES}: median of iteration over the same runs",
            "gone_s": f"{TABLES}: 32 GiB: pidfd",
            "adopt_s_per_gib": f"{TABLES}: map the predecessor's, from 1 to 48 GiB",
            "group_s": f"{TABLES}: made, a later one",
        },
    )


def _managed(text: str) -> list[dict[str, float]]:
    """Rows | case | end | bits | iteration | detect | decide | resume | lost | run s | of the cases above."""
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 9 and cells[0] in CASES and cells[1] == "done":
            rows.append({"iteration": float(cells[3]), "detect": float(cells[4]), "lost": float(cells[7])})
    if not rows:
        raise ValueError(f"{TABLES}: no row of {', '.join(CASES)}")
    return rows


def _median(text: str, case: str) -> float:
    found = re.search(rf"^{re.escape(case)}  +([\d.]+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"{TABLES}: no row {case!r}")
    return float(found[1])


def main() -> None:
    here = Path(__file__).resolve()
    values: dict[str, Any] = read(here.parents[3])._asdict()
    here.with_name("measured.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
