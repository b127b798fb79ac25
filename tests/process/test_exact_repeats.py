"""Exact mode: a gradient that fits no scale makes everybody compute again, and failures meanwhile change no bit of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from unicron.demo import compare, histories, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Act, Expect, Fault, Scenario
from unicron.demo.variant import Variant
from unicron.types import Layout

SPIKED = 5
ITERATIONS = histories.ITERATIONS


def scenario(name: str, *faults: Fault, acts: tuple[Act, ...] = ()) -> Scenario:
    return Scenario(name, name, Expect("healed"), faults, acts, iterations=ITERATIONS, window=())


def begun(run: runner.results.Run, iteration: int) -> set[int]:
    """How often the forward of each of its micro-batches began."""
    counts: dict[int, int] = {}
    for (_, at, micro_batch), count in run.forwards.items():
        if at == iteration:
            counts[micro_batch] = counts.get(micro_batch, 0) + count
    return set(counts.values())


@pytest.mark.timeout(300)
def test_a_spike_is_computed_again_and_a_death_in_that_leaves_the_same_bits(tmp_path: Path) -> None:
    """The first death is in the repeated compute, the second in the repeated reduction, the third at the commit that
    finds that nothing fits: some learn it from others."""
    layout = runner.layout_of(1, 1, 2, exact=True)
    options = runner.Options(layout, folder=tmp_path, measure_unmanaged=False, variant=Variant(spike=SPIKED))
    deaths = {
        "again": Fault(1, "kill", -1, "compute_again"),
        "reduce": Fault(0, "kill", -1, "reduce_again", 1),
        "commit": Fault(1, "kill", SPIKED, "commit", 1),
    }
    with runner.Suite(options, Progress()) as suite:
        undisturbed = histories.reference(suite, layout)
        wanted = compare.position_digest(undisturbed, layout)
        assert begun(undisturbed, SPIKED) == {2} and begun(undisturbed, SPIKED + 1) == {1}
        found = {name: histories.judge(suite, scenario(name, fault), layout, wanted) for name, fault in deaths.items()}
    wrong = {name: result["reasons"] for name, result in found.items() if not result["passed"]}
    assert not wrong
    assert all(result["incidents"] == [["worker lost", "SEV2", "healed"]] for result in found.values())


@pytest.mark.timeout(300)
def test_it_ends_in_the_same_bits_at_every_width(tmp_path: Path) -> None:
    """Without the repeat the spiked step would be left out; with it, it is made."""
    digests: dict[tuple[int, int], str] = {}
    for dp in (1, 2):
        layout: Layout = replace_micro_batches(runner.layout_of(1, 1, dp, exact=True))
        options = runner.Options(
            layout, folder=tmp_path / str(dp), measure_unmanaged=False, variant=Variant(spike=SPIKED)
        )
        with runner.Suite(options, Progress()) as suite:
            digests[dp, SPIKED] = compare.position_digest(histories.reference(suite, layout), layout)
    assert len(set(digests.values())) == 1


def replace_micro_batches(layout: Layout) -> Layout:
    from msgspec import structs

    return structs.replace(layout, num_micro_batches=8)
