"""A rank that dies before anybody has trained: what the stages of a pipeline share is shared all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import histories, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Fault


@pytest.mark.timeout(300)
def test_who_dies_in_the_first_meeting_leaves_one_embedding(tmp_path: Path) -> None:
    """Its heir came with another plan than the first, and the last stage kept the embedding that it was built with."""
    layout = runner.layout_of(1, 2, 2)
    with runner.Suite(runner.Options(layout, folder=tmp_path, measure_unmanaged=False), Progress()) as suite:
        wanted = histories.reference_digest(suite, layout)
        for rank in (0, 3):
            scenario = histories._scenario(layout, rank, [Fault(rank, "exit", -1, "heal")], [])
            result = histories.judge(suite, scenario, layout, wanted)
            assert result["passed"], (rank, result["reasons"])
            assert [incident[0] for incident in result["incidents"]] == ["worker lost"]
