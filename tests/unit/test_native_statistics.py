"""Robust budgets and comparisons, natively: no alarm in a long noisy run, and the faults that hide in one are found."""

from __future__ import annotations

import numpy as np
import pytest

import healthy
import healthy_beats
from unicron import _core

COMPUTE = 2


def test_budgets_of_a_steady_phase() -> None:
    times = _core.PhaseTimes(3.0, 100.0)
    assert times.budget(COMPUTE) is None
    for _ in range(100):
        times.add(COMPUTE, 1000.0)
    assert times.budget(COMPUTE) == (1000.0, 1500.0, 3000.0)
    assert times.budget(3) is None, "of another stage nothing is known"


def test_budgets_of_a_phase_that_varies_are_wider() -> None:
    steady, varied = _core.PhaseTimes(3.0, 0.0), _core.PhaseTimes(3.0, 0.0)
    for number in range(64):
        steady.add(COMPUTE, 100.0)
        varied.add(COMPUTE, 100.0 + 20.0 * (number % 5 - 2))
    known, wider = steady.budget(COMPUTE), varied.budget(COMPUTE)
    assert known is not None and wider is not None
    assert 100.0 < wider[0] <= 140.0
    assert wider[1] > known[1]


def test_one_long_interval_widens_but_not_without_end() -> None:
    times = _core.PhaseTimes(3.0, 0.0)
    for _ in range(64):
        times.add(COMPUTE, 100.0)
    times.add(COMPUTE, 1e7)
    budget = times.budget(COMPUTE)
    assert budget is not None and budget[0] == 100.0 and budget[2] == pytest.approx(1500.0)


def test_a_clock_that_goes_back_teaches_nothing() -> None:
    times = _core.PhaseTimes(3.0, 0.0)
    times.add(COMPUTE, -5.0)
    times.add(COMPUTE, float("nan"))
    assert times.budget(COMPUTE) is None


@pytest.mark.parametrize("wrong", [(1.0, 0.0), (3.0, -1.0), (float("nan"), 0.0)])
def test_bad_bounds_are_refused(wrong: tuple[float, float]) -> None:
    with pytest.raises(_core.UnicronError, match="factor"):
        _core.PhaseTimes(*wrong)


def test_bad_tables_are_refused() -> None:
    with pytest.raises(_core.UnicronError, match="slow_ratio"):
        _core.PaceTable([0], [], 1.0)
    with pytest.raises(_core.UnicronError, match="rank 5 is outside"):
        _core.PaceTable([0, 0], [(2, [0, 5])], 1.05)
    table = _core.PaceTable([0, 0], [], 1.05)
    with pytest.raises(_core.UnicronError, match="one wait for each kind"):
        table.add(0, 1, 2.0, [1.0])


def test_a_healthy_run_alarms_nobody() -> None:
    """A sample of `bench_detection.py --healthy 1000000`, which is the whole check."""
    result = healthy.check(iterations=30_000, seed=1)
    assert (result.stalls, result.slow, result.beats.nodes) == ([], [], [])
    assert result.intervals > 1_000_000
    beats = result.beats
    assert beats.freezes > 10 and beats.clock_steps and beats.bursts > 100
    assert beats.suspicions > 100 and beats.unanswered > 100 and beats.vouched > beats.suspicions, "it is no calm run"


@pytest.mark.parametrize("seed", range(4))
def test_a_straggler_in_that_run_is_found_in_twenty_iterations(seed: int) -> None:
    result = healthy.check(iterations=2_000, seed=seed, straggler=(3, 1.1, 1_500), noise=0.02)
    assert [(kind, rank) for _, kind, rank in result.slow] == [("rank", 3)]
    assert 1_500 < result.slow[0][0] <= 1_520


def test_a_hang_in_that_run_would_be_told() -> None:
    result = healthy.check(iterations=2_000, seed=1, hang=(2, 1_500, 60_000.0))
    assert {level for _, level in result.stalls} == {2}


@pytest.mark.parametrize("in_burst", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_a_node_that_is_gone_in_that_run_is_lost_and_no_other(seed: int, in_burst: float) -> None:
    """Also where the coordinator hears little of anybody meanwhile."""
    result = healthy.check(iterations=1_000, seed=seed, silence=(3, 500, in_burst))
    ((at_ms, node, evidence),) = result.beats.nodes
    assert (node, evidence.partition(",")[0]) == (3, "nobody hears its beats")
    gone_ms = healthy._silence(3, 500, in_burst).begin_ms
    assert gone_ms < at_ms < gone_ms + 10_000.0


def test_a_node_whose_beats_alone_are_gone_is_not_lost() -> None:
    """Nobody waits for it, or not all: silence is suspicion. Some are enough after a long time only."""
    beats = healthy_beats.Beats(1, healthy_beats.Silence(2, 1_000_000.0, waits_ms=float("inf")))
    beats.run(0.0, 1_010_000.0, [healthy_beats.Wait(1_005_000.0, 1_006_000.0, other) for other in (0, 1, 3, 4, 5, 6)])
    assert beats.result.suspicions and not beats.result.nodes
    beats.run(1_010_000.0, 1_200_000.0, [])
    assert not beats.result.nodes
    beats.run(1_200_000.0, 1_210_000.0, [healthy_beats.Wait(1_205_000.0, 1_206_000.0, 5)])
    ((_, node, evidence),) = beats.result.nodes
    assert node == 2 and evidence.startswith("silent for 2")


def test_beats_of_wrong_shapes_are_refused() -> None:
    table = _core.BeatReplay(2, 500, 50)
    one, none, ms = np.zeros(1, dtype=np.int32), np.empty(0, dtype=np.int32), np.zeros(1)
    with pytest.raises(_core.UnicronError, match="differ in length"):
        table.replay(one, none, ms, none, np.empty(0), 100.0)
    with pytest.raises(_core.UnicronError, match="differ in length"):
        table.replay(one, one, ms, one, np.empty(0), 100.0)
    with pytest.raises(_core.UnicronError, match="give 1 ms or more"):
        _core.BeatReplay(2, 0, 50)
    assert table.replay(one, one + 1, ms, none, np.empty(0), 5_000.0)[0][1:] == (0, "heard", 0)


def test_beats_are_read_and_looks_are_taken_in_simulated_time() -> None:
    table = _core.BeatReplay(1, 500, 50)
    numbers = np.arange(20, dtype=np.int32)
    nodes, none = np.zeros(20, dtype=np.int32), np.empty(0, dtype=np.int32)
    changes = table.replay(nodes, numbers + 1, 500.0 * numbers, none, np.empty(0), 12_000.0)
    assert [(hearing, at) for at, _, hearing, _ in changes] == [("heard", 0.0), ("silent", 10_600.0)]
    thawed = np.array([12_000.0, 42_000.0])
    more = table.replay(nodes[:1], numbers[:1] + 21, np.array([42_000.0]), none, thawed, 43_200.0)
    assert [(hearing, at) for at, _, hearing, _ in more] == [("heard", 42_000.0), ("silent", 43_100.0)]


@pytest.mark.parametrize("onset", range(100, 108))
@pytest.mark.parametrize("between", [1, 3, 8])
def test_a_straggler_is_named_at_a_look_however_rare_looks_are(between: int, onset: int) -> None:
    """Short iterations come many to a heartbeat: a verdict that waits for another look takes as many again."""
    rng = np.random.default_rng(onset)
    table = _core.PaceTable([0, 0, 0], [], 1.05)
    named: list[tuple[int, str, int]] = []
    for iteration in range(200):
        for rank in range(3):
            ms = 15.0 * rng.lognormal(0.0, 0.01) * (1.1 if rank == 1 and iteration >= onset else 1.0)
            table.add(rank, iteration, ms, [0.0] * 4)
        if iteration % between == 0:
            named += [(iteration, kind, rank) for kind, rank, *_ in table.look()]
    assert {found[1:] for found in named} == {("rank", 1)}
    assert onset + 9 < named[0][0] <= onset + 12 + between


def told_of(factors: np.ndarray, seed: int, *, quiet_links: bool = True) -> list[tuple[int, str, int]]:
    """What is told of four ranks whose times all have these factors; (iteration, kind, index)."""
    rng = np.random.default_rng(seed)
    table = _core.PaceTable([0] * 4, [(2, [0, 1, 2, 3])], 1.05)
    told: list[tuple[int, str, int]] = []
    for iteration, factor in enumerate(factors):
        own = 10.0 * factor * rng.lognormal(0.0, 0.1, 4)
        alone = 2.0 if quiet_links else 2.0 * factor
        for rank in range(4):
            wait = own.max() - own[rank] + alone * rng.lognormal(0.0, 0.1)
            table.add(rank, iteration, own[rank], [0.0, 0.0, wait, 0.0])
        if iteration % 5 == 0:
            told += [(iteration, kind, index) for kind, index, *_ in table.look()]
    return told


@pytest.mark.parametrize("seed", range(6))
def test_other_work_that_comes_and_goes_is_no_drift(seed: int) -> None:
    """On a machine with neighbours all ranks are slower for a minute, and as fast as before in the next."""
    rng = np.random.default_rng(100 + seed)
    loads = np.repeat(rng.uniform(1.0, 1.8, 400), rng.integers(20, 200, 400))[:20_000]
    assert told_of(loads, seed, quiet_links=False) == []


def test_a_drift_is_told_on_a_machine_with_neighbours_too() -> None:
    rng = np.random.default_rng(7)
    loads = np.repeat(rng.uniform(1.0, 1.05, 400), rng.integers(20, 200, 400))[:20_000]
    creep = 1.0 + 0.4 * np.arange(20_000) / 20_000
    told = told_of(loads * creep, 7)
    assert {found[1:] for found in told} == {("drift", -1)}
    assert told[0][0] > 4_000
