"""The matrix: every failure point at every layout, role replaced or not, on real processes.

Results are kept, one JSON line a case; a case that passed is not run again, so a run that was interrupted goes on where
it stopped. The last lines are a table for people.

    python -m unicron.demo.matrix --into results/matrix.jsonl [--rows 1,1,4 2,1,2] [--sample 6 --seed 1]

A machine of many cores runs portions of it at once (--jobs: one for every three cores or so), each a few cases of a
row in a task of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unicron.demo import runner
from unicron.demo.chain import Chain
from unicron.demo.matrix_cases import (
    REPLACE,
    ROWS,
    SHRINK,
    SHRINK_AGAIN,
    Case,
    Row,
    shrink_scenario,
)
from unicron.demo.progress import Progress
from unicron.demo.watch import WatchProblem
from unicron.runtime.local_cluster import ClusterProblem

REPLACED, SHRUNK = "replace", "shrink"
PORTION = 12  # cases of one row that a job runs one after the other
Key = tuple[str, str, str]  # row, how, case


def cases_of(row: Row) -> list[tuple[str, Case]]:
    found = [(REPLACED, case) for case in REPLACE if row.has(case)]
    if row.can_shrink():
        found += [(SHRUNK, case) for case in (*SHRINK, *SHRINK_AGAIN) if row.has(case)]
    return found


def run_row(row: Row, wanted: Sequence[tuple[str, Case]], folder: Path) -> Iterator[dict[str, Any]]:
    """One line a case."""
    layout = row.layout()
    options = runner.Options(layout, folder=folder, measure_unmanaged=False, variant=row.variant)
    replaced = [case for how, case in wanted if how == REPLACED]
    shrunk = [case for how, case in wanted if how == SHRUNK]
    with runner.Suite(options, Progress()) as suite:
        if replaced:
            for verdict in Chain(suite, layout, replaced, row.evaluate_every).run():
                yield {"row": row.name, "how": REPLACED, **verdict}
        for turn, case in enumerate(shrunk):
            result = suite.one(shrink_scenario(case, layout, turn)).result
            names = ("passed", "reasons", "incidents", "gradient", "loss")
            yield {"row": row.name, "how": SHRUNK, "case": case.name, **{name: result[name] for name in names}}


def known(path: Path) -> dict[Key, dict[str, Any]]:
    """Results so far, the newest of each case."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {key_of(result): result for result in map(json.loads, lines)}


def key_of(result: dict[str, Any]) -> Key:
    return result["row"], result["how"], result["case"]


def to_do(rows: Sequence[Row], done: dict[Key, dict[str, Any]]) -> list[tuple[Row, str, Case]]:
    every = [(row, how, case) for row in rows for how, case in cases_of(row)]
    return [(row, how, case) for row, how, case in every if not done.get((row.name, how, case.name), {}).get("passed")]


def show(results: dict[Key, dict[str, Any]], rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layout", "how", "passed", "not passed", box=None, pad_edge=False)
    for row in rows:
        for how in (REPLACED, SHRUNK):
            mine = [r for r in results.values() if (r["row"], r["how"]) == (row.name, how)]
            wrong = [f"{r['case']}: {r['reasons'][0]}" for r in mine if not r["passed"]]
            if mine:
                table.add_row(row.name, how, str(len(mine) - len(wrong)), "\n".join(wrong))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def main() -> int:
    options = parse()
    rows = [row for row in ROWS if not options.rows or row.name in options.rows]
    left = to_do(rows, known(options.into))
    if options.cases:
        left = [(row, how, case) for row, how, case in left if case.name in options.cases]
    if options.sample:
        left = random.Random(options.seed).sample(left, min(options.sample, len(left)))
    options.into.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if options.jobs > 1:
        _side_by_side(portions(left), options, began)
    else:
        for row in dict.fromkeys(row for row, _, _ in left):
            _one_row(row, [(how, case) for its, how, case in left if its is row], options)
    results = {key: result for key, result in known(options.into).items() if key[0] in {row.name for row in rows}}
    show(results, rows)
    print(f"{len(left)} cases in {time.monotonic() - began:.0f} s; {options.into}")
    asked = {(row.name, how, case.name) for row, how, case in left}
    return 0 if all(key in results and results[key]["passed"] for key in asked) else 1


def _one_row(row: Row, wanted: list[tuple[str, Case]], options: argparse.Namespace) -> None:
    folder = options.folder / row.name
    wrong = 0
    try:
        for result in run_row(row, wanted, folder):
            wrong += not result["passed"]
            with open(options.into, "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    except (WatchProblem, ClusterProblem) as problem:
        print(f"{row.name}: {problem}", file=sys.stderr)
        return
    if not options.keep and not wrong:
        shutil.rmtree(folder, ignore_errors=True)


def portions(left: Sequence[tuple[Row, str, Case]]) -> list[tuple[Row, list[str]]]:
    """The names of a few cases of one row, each: what a job runs. Both ways of a case (how) are in one portion."""
    found = []
    for row in dict.fromkeys(row for row, _, _ in left):
        names = list(dict.fromkeys(case.name for its, _, case in left if its is row))
        found += [(row, names[start : start + PORTION]) for start in range(0, len(names), PORTION)]
    return found


def _side_by_side(work: Sequence[tuple[Row, list[str]]], options: argparse.Namespace, began: float) -> None:
    """Each portion by a process of its own, that appends to the same file."""

    def run(number: int) -> None:
        row, names = work[number]
        if options.seconds and time.monotonic() - began > options.seconds:
            return
        folder = options.folder / f"{row.name}-{number}"
        command = [sys.executable, "-m", "unicron.demo.matrix", "--into", options.into, "--folder", folder]
        command += ["--rows", row.name, "--cases", *names, *(["--keep"] if options.keep else [])]
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        last = (ended.stdout.splitlines() or ["no word"])[-1]
        print(f"{number + 1}/{len(work)} {row.name}: {last}", *ended.stderr.splitlines()[-3:], sep="\n  ", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(run, range(len(work))))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--into", type=Path, default=Path("results/matrix.jsonl"), help="kept results")
    parser.add_argument("--rows", nargs="*", choices=[row.name for row in ROWS], help="only these")
    parser.add_argument("--cases", nargs="*", help="only these")
    parser.add_argument("--sample", type=int, default=0, help="only so many cases, drawn by seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("results/matrix"), help="records and logs")
    parser.add_argument("--keep", action="store_true", help="keep the records also of what passed")
    parser.add_argument("--jobs", type=int, default=1, help="portions at once; the rows asked for, in their order")
    parser.add_argument("--seconds", type=float, default=0, help="with --jobs: begin none after so long (0: all)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
