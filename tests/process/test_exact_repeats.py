"""Exact mode: a gradient that fits no scale makes everybody compute again; failures meanwhile change no bit of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import compare, results, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Expect, Fault, Scenario
from unicron.demo.variant import Variant

SPIKED, ITERATIONS = 3, 8


def begun(run: results.Run, iteration: int) -> set[int]:
    """How often the forward of each of its micro-batches began."""
    counts: dict[int, int] = {}
    for (_, at, micro_batch), count in run.forwards.items():
        if at == iteration:
            counts[micro_batch] = counts.get(micro_batch, 0) + count
    return set(counts.values())


def scenario(name: str, *faults: Fault) -> Scenario:
    return Scenario(name, name, Expect("healed"), faults, iterations=ITERATIONS, window=())


@pytest.mark.timeout(300)
def test_a_death_while_it_is_computed_again_leaves_the_same_bits(tmp_path: Path) -> None:
    """One dies in the repeated compute, one inside the commit that finds that nothing fits: it learns it from others.
    (Without the repeat the spiked step would be left out by all of them.)
    """
    layout = runner.layout_of(1, 1, 2, exact=True)
    deaths = {"again": Fault(1, "kill", -1, "compute_again"), "commit": Fault(1, "kill", SPIKED, "commit", 1)}
    variant = Variant(spike=SPIKED)
    with runner.Suite(
        runner.Options(layout, folder=tmp_path, measure_unmanaged=False, variant=variant), Progress()
    ) as suite:
        undisturbed = suite.reference(scenario("undisturbed"))
        wanted = compare.position_digest(undisturbed, layout)
        assert begun(undisturbed, SPIKED) == {2} and begun(undisturbed, SPIKED + 1) == {1}
        for name, fault in deaths.items():
            run, seen, _, problem = suite.carry_out(scenario(name, fault), 0)
            assert not problem and [i["outcome"] for i in seen.incidents.values()] == ["healed"], (name, problem)
            assert compare.position_digest(run, layout) == wanted, name
