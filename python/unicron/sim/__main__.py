"""`python -m unicron.sim`: many seeds, a table, and one command that replays a failing one."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from unicron.sim.plants import PLANTS
from unicron.sim.record import Record
from unicron.sim.run import options_of, run_seed
from unicron.sim.side_by_side import run_chunks

SAVE_S = 60.0  # between two savings of a record


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m unicron.sim",
        description="Simulate the coordinator, agents and workers under faults, from seeds.",
        epilog="example: python -m unicron.sim --seeds 500; a long run that goes on where it stopped: "
        "python -m unicron.sim --seeds 20000 --record bench/results/swarm.json --minutes 30 --keep-going",
    )
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (default 500)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="one seed, with its whole history")
    parser.add_argument("--plant", choices=PLANTS, default="", help="plant a known mistake")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument("--record", type=Path, help="keep sums and coverage here; run what is missing there")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no seed later than this")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (default 1; 0: one a core)")
    parser.add_argument("--yield-to", type=Path, help="wait while this file exists: somebody measures")
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
    record = Record(arguments.record)
    seeds = record.todo(arguments.first, arguments.first + arguments.seeds - 1)
    begin_s = time.perf_counter()

    def may_begin() -> bool:
        late = time.perf_counter() - begin_s > arguments.minutes * 60
        return not late and (arguments.keep_going or not record.data["failed"])

    def say(number: int) -> None:
        failed, now_s = len(record.data["failed"]), time.perf_counter()
        line = f"\r{number}/{len(seeds)} seeds, {failed} failed, {now_s - begin_s:.0f} s "
        print(line, end="", file=sys.stderr, flush=True)

    try:
        if arguments.jobs == 1:
            _one_after_the_other(arguments, record, seeds, may_begin, say)
        else:
            _side_by_side(arguments, record, seeds, may_begin, say)
    finally:
        record.save()
    print(file=sys.stderr)
    _report(record)
    for row in record.data["failed"][:5]:
        plant = f" --plant {arguments.plant}" if arguments.plant else ""
        print(f"replay: python -m unicron.sim --seed {row['seed']}{plant}")
    return 1 if record.data["failed"] else 0


def _one_after_the_other(
    arguments: argparse.Namespace, record: Record, seeds: list[int], may_begin: Callable[[], bool],
    say: Callable[[int], None],
) -> None:  # fmt: skip
    saved_s = time.perf_counter()
    for number, seed in enumerate(seeds, 1):
        while arguments.yield_to is not None and arguments.yield_to.exists():
            time.sleep(1.0)
        if not may_begin():
            return
        cpu_s = time.process_time()
        try:
            result = run_seed(seed, arguments.plant)
        except Exception:
            print(f"\nthe simulator itself failed; replay: python -m unicron.sim --seed {seed}", file=sys.stderr)
            raise
        record.add(result, time.process_time() - cpu_s)
        if not result.is_good:
            print(f"\rseed {seed}: {result.violations[0]}", file=sys.stderr)
        say(number)
        if time.perf_counter() - saved_s > SAVE_S:
            saved_s = time.perf_counter()
            record.save()


def _side_by_side(
    arguments: argparse.Namespace, record: Record, seeds: list[int], may_begin: Callable[[], bool],
    say: Callable[[int], None],
) -> None:  # fmt: skip
    extra = ["--plant", arguments.plant] if arguments.plant else []
    extra += ["--yield-to", str(arguments.yield_to)] if arguments.yield_to else []
    known = len(record.data["failed"])

    def kept(number: int) -> None:
        nonlocal known
        for row in record.data["failed"][known:]:
            print(f"\rseed {row['seed']}: {row['violation']}", file=sys.stderr)
        known = len(record.data["failed"])
        record.save()
        say(number)

    run_chunks(record, seeds, arguments.jobs or os.cpu_count() or 1, extra, may_begin, kept)


def _report(record: Record) -> None:
    data = record.data
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(data["outcomes"].items()))
    print(f"{'seeds':<28}{data['seeds']:>10}   {outcomes}")
    print(f"{'virtual time (s)':<28}{data['virtual_hours'] * 3600:>10.0f}")
    per_s = data["events"] / max(data["cpu_hours"] * 3600, 1e-9)
    print(f"{'events':<28}{data['events']:>10}   {per_s:.0f} a CPU second")
    print(f"{'iterations committed':<28}{data['iterations']:>10}")
    earlier = sum(one["seeds"] for one in data["earlier"])
    if earlier:
        print(f"{'seeds of earlier sources':<28}{earlier:>10}")
    for what in sorted(data["counts"]):
        print(f"{what:<28}{data['counts'][what]:>10}")
    for machine, seen in record.coverage().items():
        print(f"coverage of {machine}: {seen}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and with it what runs beside it
    sys.exit(main())
