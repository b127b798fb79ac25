"""Several runs of bench_overhead.py on machines of one kind as one measurement: each weighs as it is exact.

python bench/pooled_overhead.py bench/results/16_cores/overhead_*.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import common


def pooled(values: list[tuple[float, float]]) -> tuple[float, float]:
    """(value, 95 % half-width) of independent measurements of one thing, each weighed by 1 / half-width squared."""
    weights = [1 / half**2 for _, half in values]
    mean = sum(w * value for w, (value, _) in zip(weights, values, strict=True)) / sum(weights)
    return mean, 1 / math.sqrt(sum(weights))


def pair(configuration: dict[str, Any], name: str) -> tuple[float, float]:
    return configuration[f"{name} %"], configuration[f"{name} half-width %"]


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=1)
    parser.add_argument("results", type=Path, nargs="+", help="what bench_overhead.py --json printed")
    arguments = parser.parse_args()
    runs = {path.stem: json.loads(path.read_text()) for path in arguments.results}
    if len(places := {(run["machine"]["cpu"], run["configuration"]["layout"]) for run in runs.values()}) > 1:
        parser.error(f"these are of different machines or layouts, which are not one measurement: {sorted(places)}")
    settings = {name: run["configuration"] for name, run in runs.items()}
    noise, cost = ([pair(each, name) for each in settings.values()] for name in ("A'/A", "B/A"))
    all_noise, all_cost = pooled(noise), pooled(cost)
    bench = common.Bench(
        "cost of being managed, of several runs", "% of A",
        configuration={
            "rounds": sum(each["rounds"] for each in settings.values()),
            "upper end of B/A": round(sum(all_cost), 2), "allowed": round(2 + all_noise[1], 2),
        },
        machine=next(iter(runs.values()))["machine"],
    )  # fmt: skip
    for name, a, b in zip(settings, noise, cost, strict=True):
        parts = settings[name]["parts, summed %"]
        bench.add(f"{name}: B/A", [b[0]], **{"half-width": b[1], "A'/A": a[0], "its half-width": a[1], "parts": parts})
    facts = {"half-width": all_cost[1], "A'/A": all_noise[0], "its half-width": all_noise[1]}
    bench.add("all: B/A", [all_cost[0]], **facts)
    bench.finish(arguments)


if __name__ == "__main__":
    main()
