"""The five cases of the allocation bench: shares are whole and feasible, and nobody beats the planner by its own T."""

from __future__ import annotations

import numpy as np
import pytest

import bench_allocation as bench

pytestmark = pytest.mark.timeout(240)  # the performance model is compiled at its first use


def test_shares_are_whole_and_feasible() -> None:
    flat = np.where(np.arange(bench.GPUS + 1) >= 4, 1.0, 0.0)
    kinds = [bench.Kind("x", flat, 1.0)] * 3
    assert bench.shares(kinds, [1.0, 1.0, 1.0]) == [43, 43, 42]
    assert bench.shares(kinds, [1.0, 1.0, 126.0]) == [4, 4, 120]


@pytest.mark.parametrize("case", bench.CASES)
def test_nobody_beats_the_planner_by_its_own_numbers(case: str) -> None:
    sizes, weights = bench.CASES[case]
    known = {name: bench.kind_of(name) for name in set(sizes)}
    kinds = [known[size] for size in sizes]
    curves = [kind.flops for kind in kinds]
    given = bench.policies(kinds, weights)
    assert all(sum(counts) <= bench.GPUS for counts in given.values())
    earned = {policy: bench.waf(counts, weights, curves) for policy, counts in given.items()}
    assert earned["unicron"] >= max(earned.values()) * (1 - 1e-9)
    assert all(count >= kind.least for counts in given.values() for count, kind in zip(counts, kinds, strict=True))


def test_a_perturbed_curve_stays_within_its_error() -> None:
    flops = np.arange(bench.GPUS + 1, dtype=np.float64)
    for seed in range(5):
        off = bench.perturbed(flops, np.random.default_rng(seed))
        assert (np.diff(off) >= 0).all()
        assert (off[1:] / flops[1:] >= 1 - bench.ERROR - 1e-9).all()
