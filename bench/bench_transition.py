"""What a recovery's parts take, by failure point and layout, and what exact sums cost an iteration.

Each case breaks one living task again and again (demo/chain.py), and every one is judged: the bits must be those of an
undisturbed run. Parts are of the rank on which they took longest. `exact` is the median iteration with gradients summed
as integers against floating point, in turns.

    python bench/bench_transition.py --layouts 1,1,4 1,2,2 --json
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from unicron.demo import compare, runner
from unicron.demo.chain import Chain
from unicron.demo.matrix_cases import REPLACE, Case
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Expect, Scenario
from unicron.types import Layout

CASES = ("compute", "backward", "tie", "reduce-during", "commit", "step", "exception-reduce", "reset-reduce")
PARTS: dict[str, tuple[str, ...]] = {  # names of healing's actions
    "agree": ("ExchangeInside", "ExchangeWorld"),
    "group": ("RebuildInside", "RebuildCross"),
    "state": ("FetchState", "GoBack", "LoadCheckpoint"),
    "reduce": ("Reduce", "Commit", "Confirm"),
}
EXACT_ITERATIONS = 24


def part(incident: dict[str, Any], names: tuple[str, ...]) -> float:
    return float(sum(incident["phases_ms"].get(name, 0.0) for name in names))


COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "see": lambda i: i["detect_ms"] or 0.0,
    "decide": lambda i: i["decide_ms"] or 0.0,
    "free": lambda i: i["phases_ms"].get("AwaitPlan", 0.0),
    **{name: lambda i, names=names: part(i, names) for name, names in PARTS.items()},  # type: ignore[misc]
    "recompute": lambda i: i["recompute_ms"] or 0.0,
}


def incidents(
    layout: Layout, cases: list[Case], runs: int, folder: Path
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """(by case, in one living task; what was not as it must be)."""
    options = runner.Options(layout, folder=folder, measure_unmanaged=False)
    found: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    wrong: list[str] = []
    with runner.Suite(options, Progress()) as suite:
        for verdict in Chain(suite, layout, cases * runs, evaluate_every=0).run():
            if verdict["passed"]:
                found[verdict["case"]] += verdict["incidents"]
            else:
                wrong.append(f"{verdict['case']}: {verdict['reasons'][0]}")
    return {name: incidents for name, incidents in found.items() if incidents}, wrong


def iteration_ms(layout: Layout, folder: Path) -> float:
    options = runner.Options(layout, folder=folder, measure_unmanaged=False)
    with runner.Suite(options, Progress()) as suite:
        undisturbed = Scenario("", "", Expect("unaffected"), iterations=EXACT_ITERATIONS, window=())
        return compare.median_ms(suite.reference(undisturbed))


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--layouts", nargs="*", default=["1,1,4", "2,1,2", "1,2,2"], help="tp,pp,dp")
    parser.add_argument("--cases", nargs="*", default=list(CASES), help="see demo/matrix_cases.py")
    parser.add_argument("--exact-rounds", type=int, default=3, help="0: the cost of exact sums is not measured")
    arguments = parser.parse_args()
    bench = common.Bench("transition", "ms lost", configuration={"model": "GPT 4 x 64, seq 64", "understudies": 1})
    wrong: list[str] = []
    with common.scratch() as folder:
        for text in arguments.layouts:
            layout = runner.layout_of(*map(int, text.split(",")))
            cases = [case for case in REPLACE if case.name in arguments.cases and case.fits(layout)]
            by_case, not_so = incidents(layout, cases, arguments.runs, folder / text)
            wrong += [f"{text} {problem}" for problem in not_so]
            for name, found in by_case.items():
                parts = {part: statistics.median(map(of, found)) for part, of in COLUMNS.items()}
                known = [i["lost_ms"] for i in found if i["lost_ms"] is not None]
                bench.add(f"{text} {name}", known, **parts)
                print(f"{text} {name}", file=sys.stderr, flush=True)
        if arguments.exact_rounds:
            add_exact(bench, arguments.layouts[0], arguments.exact_rounds, folder)
    bench.configuration["not as it must be"] = len(wrong)
    bench.finish(arguments)
    if wrong:
        raise SystemExit("; ".join(wrong))


def add_exact(bench: common.Bench, text: str, rounds: int, folder: Path) -> None:
    sizes = [int(word) for word in text.split(",")]
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for exact in (False, True):
            layout = runner.layout_of(*sizes, exact=exact)
            times[exact].append(iteration_ms(layout, folder / f"exact-{number}-{exact}"))
    bench.add(f"{text} iteration, floating point", times[False])
    bench.add(f"{text} iteration, exact", times[True])
    ratio = statistics.median(times[True]) / statistics.median(times[False])
    bench.configuration["exact, x floating point"] = round(ratio, 3)


if __name__ == "__main__":
    main()
