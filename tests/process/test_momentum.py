"""SGD's momentum is made in the first step; an heir has it all the same, and so has a new node."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import compare, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Expect, Fault, Scenario
from unicron.demo.variant import Variant
from unicron.faults.kinds import INSIDE

ITERATIONS = 14
DEATHS = (Fault(1, "kill", 4, "compute"), Fault(0, "kill", 7, "step"), Fault(2, "kill", 10, "commit", INSIDE))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", ["1,1,3", "1,1,1"])
def test_an_heir_goes_on_with_its_predecessors_momentum(layout: str, tmp_path: Path) -> None:
    """With one replica nobody else has it, and the step is undone and finished."""
    sizes = runner.layout_of(*map(int, layout.split(",")))
    faults = tuple(fault for fault in DEATHS if fault.rank < sizes.world_size)
    scenario = Scenario("momentum", "deaths with SGD", Expect("healed"), faults, iterations=ITERATIONS, window=())
    options = runner.Options(sizes, folder=tmp_path, measure_unmanaged=False, variant=Variant(sgd=True))
    with runner.Suite(options, Progress()) as suite:
        undisturbed = suite.reference(scenario)
        run, seen, left, problem = suite.carry_out(scenario, 0)
    assert not problem and seen.view["phase"] == "done" and not any(left.values()), (problem, seen.view, left)
    assert len(seen.incidents) == len(faults)
    assert compare.position_digest(run, sizes) == compare.position_digest(undisturbed, sizes)
    assert run.losses.items() <= undisturbed.losses.items(), "who died in its step wrote none"
