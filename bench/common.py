"""What every measurement here shares: how to say where and with what it was made, and one table.

    bench = Bench("deaths", unit="ms", baseline="reaped", configuration={"workers": 8})
    bench.add("robust mutex", samples)
    bench.finish(arguments)

prints the machine, the configuration and a row per case: median, p99, least, most, number of runs, and the ratio to the
baseline's median. With --json the same as one object. Medians, because a shared machine's mean tells of its neighbours.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from unicron import _core

COMPANIONS = ("unicron", "torch", "megatron-core", "numpy", "pyzmq")  # whose versions a result depends on


def parser(description: str, *, runs: int) -> argparse.ArgumentParser:
    """The options that every bench has; add the others to it."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    result.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    result.add_argument("--runs", type=positive, default=runs, help="measurements of each case")
    return result


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for logs and results: removed at the end, but kept and named where the bench fails. SIGTERM is such a
    failure from now on, so that daemons which were started within end with the bench."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="unicron-bench-"))
    is_kept = False
    try:
        yield folder
    except (Exception, SystemExit):
        is_kept = True
        print(f"logs and results are kept: {folder}", file=sys.stderr, flush=True)
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- where


def _first_match(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return ""
    return found[1].strip() if found else ""


def machine() -> dict[str, Any]:
    """What a reader must know of the machine to compare a number with his own."""
    memory_kib = int(_first_match("/proc/meminfo", r"^MemTotal:\s*(\d+)") or 0)
    return {
        "cpu": _first_match("/proc/cpuinfo", r"^model name\s*:(.*)$") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_kib / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": round(os.getloadavg()[0], 2),
        "versions": {name: version for name in COMPANIONS if (version := _version(name))},
        "cuda_build": _core.cuda,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def command() -> str:
    """What was asked for; "" where no bench is what runs."""
    path = Path(sys.argv[0])
    asked = [argument for argument in sys.argv[1:] if argument != "--json"]
    return " ".join([path.name, *asked]) if path.name.startswith("bench_") else ""


# ---------------------------------------------------------------- what


def percentile(samples: Sequence[float], percent: float) -> float:
    """Nearest rank: a value that was measured, not one between two."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@dataclass(frozen=True)
class Row:
    case: str
    samples: Sequence[float]
    facts: dict[str, Any] = field(default_factory=dict)  # further columns of this row

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


@dataclass
class Bench:
    title: str
    unit: str
    baseline: str = ""  # case whose median is 1 in the ratio column; "": no such column
    configuration: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=machine)  # as it was before the first measurement

    def add(self, case: str, samples: Sequence[float], **facts: Any) -> None:
        if not samples:
            raise ValueError(f"{self.title}: no samples for {case}")
        self.rows.append(Row(case, tuple(samples), facts))

    def finish(self, arguments: argparse.Namespace) -> None:
        if arguments.json:
            json.dump(self.as_json(), sys.stdout)
            print()
        else:
            print(self.as_text())

    def ratio(self, row: Row) -> float | None:
        base = next((other.median for other in self.rows if other.case == self.baseline), None)
        return row.median / base if base else None

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "case": row.case,
                "median": row.median,
                "p99": percentile(row.samples, 99),
                "min": min(row.samples),
                "max": max(row.samples),
                "runs": len(row.samples),
                "ratio": self.ratio(row),
                **row.facts,
            }
            for row in self.rows
        ]
        return {
            "bench": self.title,
            "unit": self.unit,
            "command": command(),
            "baseline": self.baseline or None,
            "machine": self.machine,
            "configuration": self.configuration,
            "rows": rows,
        }

    def as_text(self) -> str:
        lines = [f"{self.title} ({self.unit})"]
        for name, facts in (("machine", self.machine), ("configuration", self.configuration)):
            lines.append(f"  {name}: " + ", ".join(f"{key} {plain(value)}" for key, value in facts.items()))
        return "\n".join([*lines, "", *table(self._columns())])

    def _columns(self) -> dict[str, list[str]]:
        columns: dict[str, list[str]] = {"case": [row.case for row in self.rows]}
        columns["median"] = [number(row.median) for row in self.rows]
        columns["p99"] = [number(percentile(row.samples, 99)) for row in self.rows]
        columns["min"] = [number(min(row.samples)) for row in self.rows]
        columns["max"] = [number(max(row.samples)) for row in self.rows]
        columns["runs"] = [str(len(row.samples)) for row in self.rows]
        if self.baseline:
            ratios = [self.ratio(row) for row in self.rows]
            columns[f"x {self.baseline}"] = ["" if ratio is None else number(ratio) for ratio in ratios]
        for name in dict.fromkeys(name for row in self.rows for name in row.facts):
            columns[name] = [plain(row.facts.get(name, "")) for row in self.rows]
        return columns


# ---------------------------------------------------------------- how it looks


def number(value: float) -> str:
    """Three significant digits, without an exponent while it can be read."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {plain(entry)}" for key, entry in value.items()) + ")"
    return number(value) if isinstance(value, float) else str(value)


def table(columns: dict[str, list[str]]) -> list[str]:
    """Aligned lines: the first column to the left, numbers to the right."""
    widths = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    first = next(iter(columns))

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(widths[name]) if name == first else cell.rjust(widths[name])
            for name, cell in zip(columns, cells, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths.values())
    return [line(list(columns)), rule, *(line(cells) for cells in zip(*columns.values(), strict=True))]
