"""What a swarm has run: ranges of seeds with their sums, kept in a file, so that a long run can go on where it stopped.

Sums are of one state of the code: different histories under the same seed must not be added, so the file says which
sources it was made from, and another state begins anew; of the states before it one line each is kept.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unicron.agent.transitions import TRANSITIONS as WORKER
from unicron.coordinator.transitions import NODE_TRANSITIONS, TASK_TRANSITIONS
from unicron.healing.machine import Phase
from unicron.sim.run import Result

PARTS = ("types.py", "messages.py", "sim", "coordinator", "agent", "healing", "planner")
NO_PART = ("__main__.py", "record.py", "side_by_side.py")  # of the histories
KEPT_OF_EARLIER = ("sources", "seeds", "events", "virtual_hours", "cpu_hours", "iterations", "failed")
SUMS = ("seeds", "events", "virtual_hours", "cpu_hours", "iterations", "outcomes", "counts", "changes", "pairs")
TABLES: dict[str, Any] = {"task": TASK_TRANSITIONS, "node": NODE_TRANSITIONS, "worker": WORKER}


def sources(parts: Sequence[str] = PARTS) -> str:
    """A digest of everything that a history depends on; of other results: of these parts of the package."""
    found = importlib.util.find_spec("unicron")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent
    digest = hashlib.sha256()
    for part in parts:
        files = [root / part] if part.endswith(".py") else sorted((root / part).glob("**/*.py"))
        for path in (path for path in files if path.name not in NO_PART):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def possible(machine: str) -> set[tuple[str, str]]:
    """Changes of phase that the machine's table has, by name."""
    return {(str(old), str(new)) for (old, _), new in TABLES[machine].items() if old is not new}


class Record:
    """Sums over seeds. Raises OSError where its file cannot be read or written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.data: dict[str, Any] = {
            "sources": sources(), "ranges": [], "seeds": 0, "failed": [], "events": 0, "virtual_hours": 0.0,
            "cpu_hours": 0.0, "iterations": 0, "outcomes": {}, "counts": {}, "changes": {}, "pairs": {}, "earlier": [],
        }  # fmt: skip
        if path is not None and path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            if kept.get("sources") == self.data["sources"]:
                self.data = kept
            elif kept.get("seeds"):
                self.data["earlier"] = [*kept.get("earlier", ()), {name: kept[name] for name in KEPT_OF_EARLIER}]

    def todo(self, first: int, last: int) -> list[int]:
        """Seeds of first ... last that were not run yet."""
        done = {seed for begin, end in self.data["ranges"] for seed in range(begin, end + 1)}
        return [seed for seed in range(first, last + 1) if seed not in done]

    def add(self, result: Result, cpu_s: float) -> None:
        data = self.data
        self._add_seed(result.seed)
        data["seeds"] += 1
        data["events"] += result.num_events
        data["iterations"] += result.iterations
        data["virtual_hours"] += result.virtual_ms / 3.6e6
        data["cpu_hours"] += cpu_s / 3600
        data["outcomes"][result.outcome] = data["outcomes"].get(result.outcome, 0) + 1
        for name, count in result.counts.items():
            data["counts"][name] = data["counts"].get(name, 0) + count
        if not result.is_good:
            data["failed"].append({"seed": result.seed, "violation": result.violations[0][:400]})
        for machine, *what in result.coverage:
            kind = "changes" if isinstance(what[1], type(what[0])) else "pairs"
            name = " > ".join(getattr(one, "__name__", None) or str(getattr(one, "value", one)) for one in what)
            seen = data[kind].setdefault(machine, {})
            seen[name] = seen.get(name, 0) + 1

    def _add_seed(self, seed: int) -> None:
        ranges = self.data["ranges"]
        if ranges and ranges[-1][1] == seed - 1:
            ranges[-1][1] = seed
        else:
            ranges.append([seed, seed])

    def merge(self, path: Path) -> None:
        """Adds what another record holds, of other seeds and the same sources; that an end came earlier is none."""
        other = json.loads(path.read_text(encoding="utf-8"))
        if other["sources"] != self.data["sources"]:
            raise ValueError(f"{path} is of sources {other['sources']}, this record of {self.data['sources']}")
        ranges: list[list[int]] = []
        for first, last in sorted([*self.data["ranges"], *other["ranges"]]):
            if ranges and first <= ranges[-1][1]:
                raise ValueError(f"{path}: seed {first} is in the record already")
            if ranges and first == ranges[-1][1] + 1:
                ranges[-1][1] = last
            else:
                ranges.append([first, last])
        failed = sorted([*self.data["failed"], *other["failed"]], key=lambda row: row["seed"])
        for name in SUMS:
            self.data[name] = _sum(self.data[name], other[name])
        self.data |= {"ranges": ranges, "failed": failed}

    def coverage(self) -> dict[str, str]:
        """machine -> changes of phase seen, of those its table has; the healing machine's (phase, event) pairs."""
        found = {}
        for machine in TABLES:
            seen = {tuple(name.split(" > ")) for name in self.data["changes"].get(machine, {})}
            wanted = possible(machine)
            missing = sorted(" > ".join(pair) for pair in wanted - seen)
            never = f"; never {', '.join(missing)}" if missing else ""
            found[machine] = f"{len(seen & wanted)} of {len(wanted)}{never}"
        phases = {name.split(" > ")[0] for name in self.data["pairs"].get("healing", {})}
        found["healing"] = f"{len(phases)} of {len(Phase)} phases, {len(self.data['pairs'].get('healing', {}))} pairs"
        return found

    def save(self) -> None:
        if self.path is None:
            return
        self.data["coverage"] = self.coverage()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        staging = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        staging.write_text(json.dumps(self.data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(staging, self.path)


def _sum(one: Any, other: Any) -> Any:
    """Of numbers, or of tables of them, however deep."""
    if not isinstance(other, dict):
        return one + other
    return {
        name: _sum(one[name], other[name]) if name in one and name in other else one.get(name, other.get(name))
        for name in [*one, *(set(other) - set(one))]
    }
