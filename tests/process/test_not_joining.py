"""A rank that stops before a collective that the others are in: found by itself, without a plan that frees all."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import histories, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Fault


@pytest.mark.timeout(300)
def test_who_never_begins_it_is_replaced_bit_for_bit(tmp_path: Path) -> None:
    """It said that it waits in its collective already where its loop came to it."""
    layout = runner.layout_of(1, 1, 2)
    with runner.Suite(runner.Options(layout, folder=tmp_path, measure_unmanaged=False), Progress()) as suite:
        wanted = histories.reference_digest(suite, layout)
        for seed, (point, number) in enumerate((("reduce", 0), ("reduce", 1), ("commit", -1))):
            scenario = histories._scenario(layout, seed, [Fault(1, "deadlock", 6, point, number)], [])
            result = histories.judge(suite, scenario, layout, wanted)
            assert result["passed"], (point, result["reasons"])
            assert [incident[0] for incident in result["incidents"]] == ["stalled"], point
