"""Rows of `make leaders`, kept from run to run, and what they say together."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from unicron.sim.record import sources

PARTS = ("types.py", "messages.py", "agent", "coordinator", "planner", "runtime")  # what a round is of
TAKEOVER_S_MAX = 3.0
MUST_END = ("kill", "freeze", "cut", "end")  # after these there is a successor


class Row(msgspec.Struct, frozen=True):
    """One round. Times in seconds from the fault."""

    seed: int
    number: int
    fault: str
    takeover_s: float | None  # until a later term began; None: the leader kept its lease
    joined_s: float | None  # until every agent had a line to the new leader
    answered_s: float  # until somebody answered; of a lost member: until an order was written
    pause_s: float  # the longest time between two iterations of any worker; 0: below 0.1
    load: float  # of the machine, one minute's

    def words(self) -> str:
        takeover = "kept its lease" if self.takeover_s is None else f"takeover {self.takeover_s:.2f} s"
        joined = "" if self.joined_s is None else f", agents joined {self.joined_s:.2f} s"
        rest = f"answered {self.answered_s:.2f} s, longest pause {self.pause_s:.2f} s, load {self.load:.1f}"
        return f"seed {self.seed} round {self.number}: {self.fault}: {takeover}{joined}, {rest}"


class Kept(msgspec.Struct):
    machine: str = ""
    lease_s: int = 0
    sources: str = ""
    rounds: list[Row] = []


class Record:
    def __init__(self, path: Path | None, lease_s: int) -> None:
        self._path = path
        known = path is not None and path.is_file()
        self._kept = msgspec.json.decode(path.read_bytes(), type=Kept) if path and known else Kept()
        begun = Kept(f"{platform.machine()}, {os.cpu_count()} cores", lease_s, sources(PARTS))
        if (self._kept.lease_s, self._kept.sources) != (lease_s, begun.sources):  # of other settings, or other code
            self._kept = begun
        self._num_kept = len(self._kept.rounds)

    def has(self, seed: int) -> bool:
        return any(row.seed == seed for row in self._kept.rounds)

    def add(self, rows: Sequence[Row]) -> None:
        self._kept.rounds += rows
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = msgspec.json.format(msgspec.json.encode(self._kept), indent=1)
            self._path.write_bytes(text + b"\n")

    def words(self) -> str:
        rows = self._kept.rounds
        known = f" ({self._num_kept} of them known before, of the same sources)" if self._num_kept else ""
        lines = [f"{len(rows)} rounds{known}, nothing forgotten, never two that decide, no task paused"]
        for fault in sorted({row.fault for row in rows}):
            times = [row.takeover_s for row in rows if row.fault == fault and row.takeover_s is not None]
            count = sum(row.fault == fault for row in rows)
            if times:
                spread = f"median {statistics.median(times):.2f} s, most {max(times):.2f} s"
                lines.append(f"  {fault:>6}: {count} rounds, {len(times)} takeovers: {spread}")
            else:
                lines.append(f"  {fault:>6}: {count} rounds, no takeover")
        late = self._late()
        lines += [f"  later than {TAKEOVER_S_MAX:g} s: {row.words()}" for row in late]
        return "\n".join(lines)

    def _late(self) -> list[Row]:
        return [row for row in self._kept.rounds if row.fault in MUST_END and (row.takeover_s or 1e9) > TAKEOVER_S_MAX]

    def exit_code(self) -> int:
        return 1 if self._late() else 0
