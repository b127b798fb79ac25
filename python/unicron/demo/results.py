"""A run's folder, read back: what record.py wrote, as plain values."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unicron.types import Rank

_GRADIENT = re.compile(r"gradient_(\d+)_(\d+)\.npy")


@dataclass
class Run:
    """Everything two runs are compared by. Ranks may be missing: a lost replica writes nothing."""

    losses: dict[int, float] = field(default_factory=dict)  # by iteration; the last commit counts
    commit_ns: dict[int, int] = field(default_factory=dict)  # when the first rank had committed
    disagreements: list[str] = field(default_factory=list)  # ranks that report different losses
    pids: dict[Rank, list[int]] = field(default_factory=dict)  # processes of a role, in order
    forwards: Counter[tuple[Rank, int, int]] = field(default_factory=Counter)  # times begun
    begun: Counter[tuple[tuple[int, int], int, int]] = field(default_factory=Counter)  # the same by (tp, pp)
    states: dict[Rank, dict[str, Any]] = field(default_factory=dict)
    weights: dict[Rank, np.ndarray] = field(default_factory=dict)
    digests: dict[tuple[int, Rank], tuple[str, str]] = field(default_factory=dict)  # of gradient ("": not known), state
    gradients: dict[tuple[int, Rank], Path] = field(default_factory=dict)
    folder: Path = Path()

    def gradient(self, iteration: int, rank: Rank) -> np.ndarray:
        return np.load(self.gradients[iteration, rank], mmap_mode="r")

    def magnitude(self, iteration: int, rank: Rank) -> np.ndarray | None:
        path = self.folder / f"magnitude_{iteration}_{rank}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    def iteration_ms(self, first: int = 0, last: int = 1 << 30) -> dict[int, float]:
        """Wall time commit to commit."""
        commits = self.commit_ns
        return {i: (commits[i] - commits[i - 1]) / 1e6 for i in commits if i - 1 in commits and first <= i <= last}


def load(folder: Path) -> Run:
    run = Run(folder=folder)
    for path in sorted(folder.glob("rank_*.jsonl")):
        _read_rank(run, path)
    for path in sorted(folder.glob("forwards_*.jsonl")):
        rank = int(path.stem.split("_")[1])
        for line in lines(path):
            run.forwards[rank, line["iteration"], line["micro_batch"]] += 1
            if line.get("place"):
                run.begun[tuple(line["place"]), line["iteration"], line["micro_batch"]] += 1
    for path in sorted(folder.glob("state_*.json")):
        state = json.loads(path.read_text(encoding="utf-8"))
        run.states[state["rank"]] = state
        run.weights[state["rank"]] = np.load(folder / f"weights_{state['rank']}.npy")
    for path in folder.glob("digests_*.jsonl"):
        rank = int(path.stem.split("_")[1])
        for line in lines(path):
            run.digests[line["iteration"], rank] = (line["gradient"], line["state"])
    for path in folder.glob("gradient_*.npy"):
        match = _GRADIENT.fullmatch(path.name)
        if match:
            run.gradients[int(match[1]), int(match[2])] = path
    return run


def _read_rank(run: Run, path: Path) -> None:
    rank = int(path.stem.split("_")[1])
    last: dict[int, float] = {}
    for line in lines(path):
        if line["event"] == "process":
            run.pids.setdefault(rank, []).append(line["pid"])
            continue
        iteration, commit_ns = line["iteration"], line["commit_ns"]
        last[iteration] = line["loss"]
        known = run.commit_ns.get(iteration)
        run.commit_ns[iteration] = commit_ns if known is None else min(known, commit_ns)
    for iteration, loss in last.items():
        if run.losses.setdefault(iteration, loss) != loss:
            run.disagreements.append(
                f"iteration {iteration}: rank {rank} reports loss {loss}, another {run.losses[iteration]}"
            )


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; a process killed in a write leaves at most one that is not."""
    for line in path.read_bytes().splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


class Tail:
    """New lines of a growing file, for live progress."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return [json.loads(line) for line in data[:end].splitlines()]
