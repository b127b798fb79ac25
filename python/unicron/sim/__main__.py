"""`python -m unicron.sim`: many seeds, a table, and one command that replays a failing one."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from unicron.sim.plants import PLANTS
from unicron.sim.run import Result, options_of, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m unicron.sim",
        description="Simulate the coordinator, agents and workers under faults, from seeds.",
        epilog="example: python -m unicron.sim --seeds 300",
    )
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds (default 300)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="one seed, with its whole history")
    parser.add_argument("--plant", choices=PLANTS, default="", help="plant a known mistake")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return _replay(arguments.seed, arguments.plant)
    return _many(arguments)


def _replay(seed: int, plant: str) -> int:
    options = options_of(seed, plant)
    options.keep_log = True
    result = run_seed(seed, plant, options)
    print("\n".join(result.lines))
    print(f"seed {seed}, layout {result.layout}: {result.outcome} {result.cause}")
    for violation in result.violations:
        print(f"violation {violation}")
    return 0 if result.is_good else 1


def _many(arguments: argparse.Namespace) -> int:
    begin_s = time.perf_counter()
    results: list[Result] = []
    failed: list[Result] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        result = run_seed(seed, arguments.plant)
        results.append(result)
        if not result.is_good:
            failed.append(result)
            print(f"\rseed {seed}: {result.violations[0]}", file=sys.stderr)
            if not arguments.keep_going:
                break
        wall_s = time.perf_counter() - begin_s
        line = f"\r{len(results)}/{arguments.seeds} seeds, {len(failed)} failed, {wall_s:.0f} s "
        print(line, end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    _report(results, time.perf_counter() - begin_s)
    for result in failed[:5]:
        plant = f" --plant {arguments.plant}" if arguments.plant else ""
        print(f"replay: python -m unicron.sim --seed {result.seed}{plant}")
    return 1 if failed else 0


def _report(results: list[Result], wall_s: float) -> None:
    counts: Counter[str] = Counter()
    outcomes = Counter(r.outcome for r in results)
    for result in results:
        counts.update(result.counts)
    events = sum(r.num_events for r in results)
    virtual_s = sum(r.virtual_ms for r in results) / 1000
    print(f"{'seeds':<28}{len(results):>10}   " + ", ".join(f"{k} {v}" for k, v in sorted(outcomes.items())))
    print(f"{'virtual time (s)':<28}{virtual_s:>10.0f}")
    print(f"{'events':<28}{events:>10}   {events / max(wall_s, 1e-9):.0f} a second")
    print(f"{'iterations committed':<28}{sum(r.iterations for r in results):>10}")
    for what in sorted(counts):
        print(f"{what:<28}{counts[what]:>10}")


if __name__ == "__main__":
    sys.exit(main())
