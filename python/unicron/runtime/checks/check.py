"""What a check is, which there are, and what it may look at.

A plug-in is a `Check` under the entry point group ``unicron.checks`` of any installed package; its name must be new.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import msgspec

GROUP = "unicron.checks"
ADDRESSES = "UNICRON_CHOSEN_ADDRESSES"  # with spaces between


class Answer(enum.StrEnum):
    OK = "ok"
    BAD = "bad"
    UNKNOWN = "unknown"


class Reading(msgspec.Struct, frozen=True):
    answer: Answer
    reason: str  # one line


class Result(msgspec.Struct, frozen=True):
    check: str
    answer: Answer
    reason: str
    took_ms: float = 0.0


@dataclass
class Look:
    """What a check is given: places to look at, and what it counted the last time."""

    folder: Path = field(default_factory=Path.cwd)  # where the node's own files lie
    sys: Path = Path("/sys")
    kernel_log: Path = Path("/dev/kmsg")
    addresses: tuple[str, ...] = ()  # that the node's agent chose for control and for state
    before: dict[str, dict[str, int]] = field(default_factory=dict)  # check -> counter -> value, of the run before
    now: dict[str, dict[str, int]] = field(default_factory=dict)

    def growth(self, check: str, counters: dict[str, int]) -> dict[str, int]:
        """How far these have grown since the last run; nothing in the first. A counter that fell began anew."""
        self.now[check] = counters
        known = self.before.get(check)
        if known is None:
            return {}
        grown = {name: value - known.get(name, value) for name, value in counters.items()}
        return {name: counters[name] if by < 0 else by for name, by in grown.items() if by}


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[Look], Reading]
    limit_s: float = 10.0
    tries: int = 1  # so often in a row it must be bad
    pause_s: float = 0.5  # between them
    disturbs: bool = False  # uses what workers use: only on a node without workers


def ok(reason: str) -> Reading:
    return Reading(Answer.OK, reason)


def bad(reason: str) -> Reading:
    return Reading(Answer.BAD, reason)


def unknown(reason: str) -> Reading:
    return Reading(Answer.UNKNOWN, reason)


def worst(readings: Iterable[Reading], none: str) -> Reading:
    """Of several devices: what is bad names them all; unknown only where none is known. none: why there is none."""
    found = list(readings)
    for answer in (Answer.BAD, Answer.OK, Answer.UNKNOWN):
        reasons = [r.reason for r in found if r.answer is answer]
        if reasons:
            return Reading(answer, "; ".join(dict.fromkeys(reasons)))
    return unknown(none)


def known_checks() -> dict[str, Check]:
    """All of them by name, in the order they run: what is quick and needs no driver first."""
    from unicron.runtime.checks import gpu_compute, kernel_log, machine, network, nvml

    found: dict[str, Check] = {}
    own = (*machine.CHECKS, *network.CHECKS, *kernel_log.CHECKS, *nvml.CHECKS, *gpu_compute.CHECKS)
    plugged = [point.load() for point in metadata.entry_points(group=GROUP)]
    for check in (*own, *plugged):
        if not isinstance(check, Check):
            raise TypeError(f"entry point group {GROUP}: {check!r} is no Check")
        if check.name in found:
            raise ValueError(f"two checks are called {check.name}: rename the plug-in's")
        found[check.name] = check
    return found
