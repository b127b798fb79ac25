"""A long healthy run, simulated, through the statistics that decide in production: they must say nothing.

Eight data-parallel ranks; an iteration is four micro-batches, the reduction (in which all wait for the slowest), commit
and step. What happens in it besides: noise, a heavy tail up to one more micro-batch, pauses of a garbage collector,
reads that wait for storage, checkpoints that slow their writer, evaluations after which everything is cold, clocks
that are set. A verdict is what coordinator/diagnosis.py takes for one: both signals together. MODELLED: durations are
drawn from seeded distributions, nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from unicron import _core
from unicron.coordinator.job import Job
from unicron.types import Stage, WaitKind

RANKS, MICRO_BATCHES = 8, 4
COMPUTE_MS, REDUCE_MS, COMMIT_MS, STEP_MS = 2_000.0, 60.0, 5.0, 80.0
CHUNK = 10_000  # iterations made at once
FLOOR_MS = 1_500.0  # AgentConfig.stall_ms_min
WATCHED_MS = 1_000.0  # AgentConfig.sample_ms_max: what a clock that jumps can add to a standstill
SLEEPS = 0.95  # of a standstill, for its process to count as asleep (agent/progress.py)
SAVE_EVERY, EVALUATE_EVERY, CLOCK_STEP_EVERY = 500, 1_000, 40_000
ORDER = (*[Stage.COMPUTE] * MICRO_BATCHES, Stage.REDUCE, Stage.COMMIT, Stage.STEP)

Floats = np.ndarray


@dataclass
class Result:
    iterations: int
    intervals: int = 0
    suspicions: int = 0  # told to the coordinator, and not enough for it
    stalls: list[tuple[int, int]] = field(default_factory=list)  # (iteration, level of the root): would be ended
    slow: list[tuple[int, str, int]] = field(default_factory=list)  # (iteration, kind, index)


@dataclass(frozen=True)
class Faults:
    straggler: tuple[int, float, int] | None = None  # (rank, factor, from which iteration)
    hang: tuple[int, int, float] | None = None  # (rank, iteration, ms)


def check(
    iterations: int, seed: int = 0, *, noise: float = 0.03,
    straggler: tuple[int, float, int] | None = None, hang: tuple[int, int, float] | None = None,
) -> Result:  # fmt: skip
    """What the statistics say of a run. noise: standard deviation of the logarithm of a micro-batch's time."""
    rng = np.random.default_rng(seed)
    job = Job("healthy", ("train.py",))
    times = [_core.PhaseTimes(job.stall_factor, FLOOR_MS) for _ in range(RANKS)]
    pace = _core.PaceTable([0] * RANKS, [(int(WaitKind.DP), list(range(RANKS)))], job.slow_ratio)
    result = Result(iterations)
    for first in range(0, iterations, CHUNK):
        number = min(CHUNK, iterations - first)
        compute, asleep = _compute(rng, first, number, noise, Faults(straggler, hang))
        _judge(rng, result, times, first, compute, asleep)
        _compare(rng, result, pace, first, compute)
    return result


def _compute(rng: np.random.Generator, first: int, number: int, noise: float, faults: Faults) -> tuple[Floats, Floats]:
    """ms of every micro-batch [iteration][rank][micro-batch], and ms of them that its process slept."""
    shape = (number, RANKS, MICRO_BATCHES)
    ms = COMPUTE_MS * rng.lognormal(0.0, noise, shape)
    index = first + np.arange(number)
    ms[index % SAVE_EVERY < 2, 0] *= 1.15
    ms[index % EVALUATE_EVERY == 0] *= 1.3
    if faults.straggler is not None:
        rank, factor, since = faults.straggler
        ms[index >= since, rank] *= factor
    tail = 0.05 * COMPUTE_MS * rng.pareto(2.5, shape) * (rng.random(shape) < 0.02)
    collector = rng.uniform(100.0, 400.0, shape) * (rng.random(shape) < 0.005)
    asleep = np.minimum(rng.exponential(100.0, shape), 1_500.0) * (rng.random(shape) < 0.01)
    ms += np.minimum(tail + collector, COMPUTE_MS) + asleep
    if faults.hang is not None:
        rank, iteration, hang_ms = faults.hang
        if first <= iteration < first + number:
            ms[iteration - first, rank, 1] += hang_ms
            asleep[iteration - first, rank, 1] += hang_ms
    return ms, asleep


def _intervals(rng: np.random.Generator, compute: Floats) -> Floats:
    """[iteration][rank][interval], in the order of ORDER."""
    own = compute.sum(axis=2)
    number = len(own)
    reduce = own.max(axis=1, keepdims=True) - own + REDUCE_MS * rng.lognormal(0.0, 0.2, (number, 1))
    commit = COMMIT_MS * rng.lognormal(0.0, 0.5, (number, RANKS))
    step = STEP_MS * rng.lognormal(0.0, 0.05, (number, RANKS))
    return np.concatenate([compute, reduce[:, :, None], commit[:, :, None], step[:, :, None]], axis=2)


def _judge(
    rng: np.random.Generator, result: Result, times: list[_core.PhaseTimes], first: int, compute: Floats, asleep: Floats
) -> None:
    ms = _intervals(rng, compute)
    number, _, width = ms.shape
    stood = ms.copy()
    for _ in range(rng.poisson(number / CLOCK_STEP_EVERY)):
        at = (rng.integers(number), rng.integers(RANKS), rng.integers(width))
        ms[at] += rng.choice((-3.6e6, 3.6e6))
        stood[at] += WATCHED_MS
    stages = np.tile(np.array(ORDER, dtype=np.int32), number)
    levels = np.zeros(ms.shape, dtype=np.int8)
    for rank in range(RANKS):
        told = times[rank].replay(stages, ms[:, rank].ravel(), stood[:, rank].ravel())
        for index, level in told:
            levels[index // width, rank, index % width] = level
    result.intervals += ms.size
    result.suspicions += int((levels > 0).sum())
    for index in np.flatnonzero(levels.any(axis=(1, 2))).tolist():
        root = _verdict(levels[index], asleep[index] / compute[index])
        if root:
            result.stalls.append((first + index, root))


def _verdict(levels: Floats, share: Floats) -> int:
    """The level of the root, by the rules of diagnosis.stall_root and all_wait; 0: nobody is ended."""
    waits = levels[:, MICRO_BATCHES]
    for rank in range(RANKS):
        others = np.delete(waits, rank)
        alone = np.delete(levels[rank], MICRO_BATCHES)
        level = int(alone.max())
        place = int(alone.argmax())
        sleeps = place < MICRO_BATCHES and share[rank, place] >= SLEEPS
        if level and sleeps and others.all():
            return level
        if level == 2 and (sleeps or others.any()):
            return level
    return 2 if bool((waits == 2).all()) else 0


def _compare(
    rng: np.random.Generator, result: Result, pace: _core.PaceTable, first: int, compute: Floats
) -> None:  # fmt: skip
    own = compute.sum(axis=2)
    number = len(own)
    waits = np.zeros((number, RANKS, len(WaitKind)))
    alone = REDUCE_MS * rng.lognormal(0.0, 0.2, (number, 1))
    waits[:, :, WaitKind.DP] = own.max(axis=1, keepdims=True) - own + alone
    values = own / MICRO_BATCHES
    result.slow += pace.replay(RANKS, first, values.ravel(), waits.ravel(), 1 if number < 5_000 else 4)
