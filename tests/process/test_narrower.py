"""Real processes, the distributed optimizer, a buddy on another node: a node is lost for good, and nothing with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import runner
from unicron.demo.matrix_cases import SHRINK, shrink_scenario
from unicron.demo.progress import Progress


@pytest.mark.timeout(300)
def test_without_the_node_it_goes_on_narrower_and_with_it_as_wide_as_before(tmp_path: Path) -> None:
    """Lost in the middle of the step: the copy is one step behind, and its holder has the gradient. What must be true
    of losses, gradient, incidents and widths the scenario says."""
    layout = runner.layout_of(1, 1, 3, sharded=True, buddy=True)
    (case,) = [case for case in SHRINK if case.name == "step"]
    options = runner.Options(layout, folder=tmp_path, measure_unmanaged=False)
    with runner.Suite(options, Progress()) as suite:
        result = suite.one(shrink_scenario(case, layout, 0)).result
    assert result["passed"], result["reasons"]
    (incident,) = [incident for incident in result["incidents"] if incident["severity"] == "SEV1"]
    assert (incident["iterations_lost"], incident["state_source"]) == (0, "buddy")
