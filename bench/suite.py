"""The benches that fit a CPU, one after the other, and what became slower since the results that are kept.

python bench/suite.py run --into DIR          results as JSON, one file a bench (make bench)
python bench/suite.py check                   run, and compare with bench/results/cpu (make bench-check)
python bench/suite.py check --new DIR         compare what is there
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

HERE = Path(__file__).parent
KEPT = HERE / "results" / "cpu"
LIMIT_S = 900.0  # of one bench
SLOWER = 1.3  # a ratio so much above the kept one, beyond what both runs scatter, is reported

#: Name -> arguments with which all of them end within 20 minutes on two cores, and the table still says something.
SUITE: dict[str, tuple[str, ...]] = {
    "pulse": (),
    "arena": ("--runs", "5"),
    "death": ("--runs", "5", "--mebibytes", "0", "256"),
    "agents": ("--nodes", "10", "100", "--runs", "20"),
    "scale": (),
    "planner": ("--small", "--clusters", "2000", "--middle", "50"),
    "model": (),
    "allocation": ("--runs", "20"),
    "classify": (),
    "detection": ("--runs", "3", "--long-runs", "1"),
    "recovery": ("--runs", "3", "--nodes", "1", "--torchrun", "1"),
    "transition": ("--runs", "1", "--layouts", "1,1,4", "2,1,2", "--exact-rounds", "2"),
    "overhead": ("--minutes", "3"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    running = verbs.add_parser("run", help="run them, and keep what they print")
    running.add_argument("--into", type=Path, default=KEPT, help="folder of the results")
    checking = verbs.add_parser("check", help="name what became slower")
    checking.add_argument("--new", type=Path, help="results to compare, instead of a run")
    checking.add_argument("--kept", type=Path, default=KEPT, help="results to compare with")
    for each in (running, checking):
        each.add_argument("--only", nargs="+", choices=tuple(SUITE), default=tuple(SUITE), help="these benches")
    arguments = parser.parse_args()
    if arguments.verb == "run":
        raise SystemExit(1 if run(arguments.only, arguments.into) else 0)
    raise SystemExit(check(arguments))


# ---------------------------------------------------------------- run


def run(names: tuple[str, ...], into: Path) -> list[str]:
    """Returns the names of those that failed."""
    into.mkdir(parents=True, exist_ok=True)
    failed = []
    for number, name in enumerate(names):
        print(f"[{number + 1}/{len(names)}] {name} ...", end=" ", file=sys.stderr, flush=True)
        start = time.monotonic()
        result, problem = run_one(name)
        took = f"{time.monotonic() - start:.0f} s"
        if result is None:
            failed.append(name)
            print(f"failed after {took}: {problem}", file=sys.stderr)
            continue
        (into / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(took, file=sys.stderr)
    return failed


def run_one(name: str) -> tuple[dict[str, Any] | None, str]:
    command = [sys.executable, str(HERE / f"bench_{name}.py"), *SUITE[name], "--json"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"not done in {LIMIT_S:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return None, (done.stderr.strip().splitlines() or ["it printed no result"])[-1]
    return {**json.loads(lines[-1]), "command": f"bench_{name}.py {' '.join(SUITE[name])}".strip()}, ""


# ---------------------------------------------------------------- compare


@dataclass(frozen=True)
class Change:
    bench: str
    case: str
    kept: float  # ratio to the baseline of its run
    new: float
    scatter: float  # factor by which the medians of both runs may lie apart

    @property
    def factor(self) -> float:
        return self.new / self.kept

    @property
    def is_slower(self) -> bool:
        return self.factor > max(SLOWER, self.scatter)


def scatter(row: dict[str, Any]) -> float:
    """How far a row's samples lie around their median, as a factor: half of the way to the extremes."""
    if row["min"] <= 0 or row["median"] <= 0:
        return 1.0
    return float((row["max"] / row["min"]) ** 0.5)


def changes(name: str, kept: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """Of rows that are in both and have a ratio: it says the same on a slow machine as on a fast one."""
    before = {row["case"]: row for row in kept["rows"]}
    for row in new["rows"]:
        old = before.get(row["case"])
        if old and old.get("ratio") and row.get("ratio") and row["case"] != new["baseline"]:
            yield Change(name, row["case"], old["ratio"], row["ratio"], scatter(old) * scatter(row))


def check(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="unicron-bench-") as folder:
        failed = [] if arguments.new else run(arguments.only, Path(folder))
        new = arguments.new or Path(folder)
        found, missing = compare(arguments.only, arguments.kept, new)
    if found:
        print("\n".join(common.table(columns(found))))
    slower = [change for change in found if change.is_slower]
    for name in missing:
        print(f"{name}: no result to compare in both {arguments.kept} and the new ones", file=sys.stderr)
    for change in slower:
        print(
            f"slower: {change.bench}, {change.case}: {change.factor:.2f} times the ratio that is kept", file=sys.stderr
        )
    if not found:
        print("nothing was compared: make bench writes the results to compare with", file=sys.stderr)
    return 1 if slower or failed or not found else 0


def compare(names: tuple[str, ...], kept: Path, new: Path) -> tuple[list[Change], list[str]]:
    found: list[Change] = []
    missing = []
    for name in names:
        paths = [folder / f"{name}.json" for folder in (kept, new)]
        if not all(path.exists() for path in paths):
            missing.append(name)
            continue
        found += changes(name, *(json.loads(path.read_text()) for path in paths))
    return found, missing


def columns(found: list[Change]) -> dict[str, list[str]]:
    return {
        "bench: case": [f"{change.bench}: {change.case}" for change in found],
        "kept ratio": [common.number(change.kept) for change in found],
        "new ratio": [common.number(change.new) for change in found],
        "new / kept": [f"{change.factor:.2f}" for change in found],
        "scatter": [f"{change.scatter:.2f}" for change in found],
        "": ["slower" if change.is_slower else "" for change in found],
    }


if __name__ == "__main__":
    main()
