"""A long healthy run, simulated, through the statistics that decide in production: they must say nothing.

Eight data-parallel ranks; an iteration is four micro-batches, the reduction (in which all wait for the slowest), commit
and step. What happens in it besides: noise, a heavy tail up to one more micro-batch, pauses of a garbage collector,
reads that wait for storage, checkpoints that slow their writer, evaluations after which everything is cold, clocks
that are set. A verdict is the coordinator's own (coordinator/diagnosis.py), of what the ranks' agents would tell.
Beside it go the beats of the ranks' nodes (bench/healthy_beats.py). MODELLED: durations are drawn from seeded
distributions, nothing here is measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

import healthy_beats
from unicron import _core
from unicron.agent.config import AgentConfig
from unicron.agent.progress import WAITS_FACTOR
from unicron.coordinator.diagnosis import are_all_waiting, root_of
from unicron.coordinator.job import Job
from unicron.messages import WorkerStalled
from unicron.types import Cpu, Stage, WaitKind

RANKS, MICRO_BATCHES = 8, 4
COMPUTE_MS, REDUCE_MS, COMMIT_MS, STEP_MS = 2_000.0, 60.0, 5.0, 80.0
CHUNK = 10_000  # iterations made at once
AGENT = AgentConfig(node="", incarnation=1, slots=1, understudies=0, store="", store_key="")
WATCHED_MS = AGENT.sample_ms_max  # what a clock that jumps can add to a standstill
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
    beats: healthy_beats.Result = field(default_factory=healthy_beats.Result)
    ended_ms: float = 0.0  # of simulated time

    @property
    def alarms(self) -> int:
        return len(self.stalls) + len(self.slow) + len(self.beats.nodes)


@dataclass(frozen=True)
class Faults:
    straggler: tuple[int, float, int] | None = None  # (rank, factor, from which iteration)
    hang: tuple[int, int, float] | None = None  # (rank, iteration, ms)


class Told(NamedTuple):
    """What an agent would have told of one interval."""

    iteration: int  # of the chunk
    rank: int
    place: int  # in ORDER
    level: int
    usual_ms: float
    budget_ms: float
    stood_ms: float


def check(
    iterations: int, seed: int = 0, *, noise: float = 0.03, straggler: tuple[int, float, int] | None = None,
    hang: tuple[int, int, float] | None = None, silence: tuple[int, int, float] | None = None,
) -> Result:  # fmt: skip
    """What the statistics say of a run. noise: standard deviation of the logarithm of a micro-batch's time. silence:
    (node, iteration in whose middle it is gone, share of all beats lost in a burst around that)."""
    rng = np.random.default_rng(seed)
    job = Job("healthy", ("train.py",))
    times = [_core.PhaseTimes(job.stall_factor, AGENT.stall_ms_min) for _ in range(RANKS)]
    pace = _core.PaceTable([0] * RANKS, [(int(WaitKind.DP), list(range(RANKS)))], job.slow_ratio)
    beats = healthy_beats.Beats(seed + 1, None if silence is None else _silence(*silence))
    result = Result(iterations, beats=beats.result)
    for first in range(0, iterations, CHUNK):
        number = min(CHUNK, iterations - first)
        compute, asleep = _compute(rng, first, number, noise, Faults(straggler, hang))
        begin_ms = result.ended_ms
        beats.run(begin_ms, *_judge(rng, result, times, first, compute, asleep))
        _compare(rng, result, pace, first, compute)
    return result


def _silence(node: int, iteration: int, in_burst: float) -> healthy_beats.Silence:
    """The others compute on, and wait for it when they are done: that is told, when asked, soon after."""
    iteration_ms = MICRO_BATCHES * COMPUTE_MS + REDUCE_MS + COMMIT_MS + STEP_MS
    waits_ms = MICRO_BATCHES / 2 * COMPUTE_MS + AGENT.waits_ms_min
    return healthy_beats.Silence(node, (iteration + 0.5) * iteration_ms, waits_ms, in_burst)


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
) -> tuple[float, list[healthy_beats.Wait]]:
    """Returns when the chunk ends, and when which ranks are known to wait."""
    ms = _intervals(rng, compute)
    ends = result.ended_ms + ms.sum(axis=2).max(axis=1).cumsum()
    reduced = ends - ms[:, :, MICRO_BATCHES + 1 :].sum(axis=2).max(axis=1)
    waits = ms[:, :, MICRO_BATCHES].copy()
    number, _, width = ms.shape
    stood = ms.copy()
    for _ in range(rng.poisson(number / CLOCK_STEP_EVERY)):
        at = (rng.integers(number), rng.integers(RANKS), rng.integers(width))
        ms[at] += rng.choice((-3.6e6, 3.6e6))
        stood[at] += WATCHED_MS
    stages = np.tile(np.array(ORDER, dtype=np.int32), number)
    told: dict[int, list[Told]] = {}
    for rank in range(RANKS):
        replayed = times[rank].replay(stages, ms[:, rank].ravel(), stood[:, rank].ravel())
        for index, level, usual_ms, budget_ms in replayed:
            iteration, place = divmod(index, width)
            found = Told(iteration, rank, place, level, usual_ms, budget_ms, float(stood[iteration, rank, place]))
            told.setdefault(iteration, []).append(found)
    result.intervals += ms.size
    result.suspicions += sum(map(len, told.values()))
    result.ended_ms = float(ends[-1])
    for index, of_iteration in sorted(told.items()):
        root = _verdict(of_iteration, asleep[index] / compute[index])
        if root:
            result.stalls.append((first + index, root))
    return result.ended_ms, sorted(_known_waits(times, waits, reduced))


def _known_waits(times: list[_core.PhaseTimes], waits: Floats, reduced: Floats) -> list[healthy_beats.Wait]:
    """Who would say, when asked, that it waits for others; by what is usual at the end of the chunk."""
    known = []
    for rank, phases in enumerate(times):
        budget = phases.budget(int(ORDER[MICRO_BATCHES]))
        if budget is None:
            continue
        from_ms = max(AGENT.waits_ms_min, WAITS_FACTOR * budget[0])
        for index in np.nonzero(waits[:, rank] > from_ms)[0]:
            known.append(healthy_beats.wait(reduced[index] - waits[index, rank] + from_ms, reduced[index], rank))
    return known


def _verdict(told: list[Told], share: Floats) -> int:
    """The level of the root by the coordinator's rules, of what is told in an iteration; 0: nobody is ended. That all
    of it is known at once is more than a coordinator has."""
    members = [str(rank) for rank in range(RANKS)]
    waits = {str(each.rank): _stalled(each, share) for each in told if each.place == MICRO_BATCHES}
    for each in told:
        if each.place == MICRO_BATCHES:
            continue
        name = str(each.rank)
        found = root_of({**waits, name: _stalled(each, share)}, members, {})
        if found is not None:
            return each.level
    return 2 if are_all_waiting([waits.get(name) for name in members]) else 0


def _stalled(told: Told, share: Floats) -> WorkerStalled:
    """What its agent would say of it."""
    sleeps = told.place < MICRO_BATCHES and share[told.rank, told.place] >= SLEEPS
    is_wait = told.place == MICRO_BATCHES
    return WorkerStalled(
        node=str(told.rank), task="healthy", worker=str(told.rank), rank=told.rank, stage=ORDER[told.place],
        iteration=told.iteration, micro_batch=told.place if told.place < MICRO_BATCHES else -1,
        waiting_in_collective=is_wait, stalled_ms=told.stood_ms, budget_ms=told.budget_ms, fault_ns=0, seen_ns=0,
        is_sure=told.level == 2, usual_ms=told.usual_ms, cpu=Cpu.IDLE if sleeps else Cpu.BUSY,
    )  # fmt: skip


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
