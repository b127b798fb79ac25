"""Deaths inside a reduction that runs under the backward, on real processes: the bits are those of an undisturbed run
whose segments are the same, and are all reduced behind the backward."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import compare, runner
from unicron.demo.progress import Progress
from unicron.demo.scenarios import Expect, Fault, Scenario
from unicron.demo.variant import Variant
from unicron.faults.kinds import AFTER, BEFORE, INSIDE
from unicron.training.eager import MIB_SETTING

ITERATIONS = 9
FAULTS = (
    Fault(2, "kill", 2, "eager", INSIDE),
    Fault(1, "kill", 4, "eager", AFTER),
    Fault(3, "exception", 6, "eager", BEFORE),
)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mib", ["", "0.5"], ids=["all of the segments", "some"])
def test_who_dies_under_the_backward_changes_no_bit(mib: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = runner.layout_of(1, 1, 4)
    options = runner.Options(layout, folder=tmp_path, measure_unmanaged=False, variant=Variant(overlap=True))
    scenario = Scenario(
        "eager", "deaths under the backward", Expect("healed"), FAULTS, iterations=ITERATIONS, window=()
    )
    monkeypatch.setenv(MIB_SETTING, "0")
    with runner.Suite(options, Progress()) as suite:
        behind = suite.reference(scenario)
    if mib:
        monkeypatch.setenv(MIB_SETTING, mib)
    else:
        monkeypatch.delenv(MIB_SETTING)
    with runner.Suite(options, Progress()) as suite:
        run, seen, left, problem = suite.carry_out(scenario, 0)
    assert not problem and seen.view["phase"] == "done" and not any(left.values()), (problem, seen.view, left)
    assert len(seen.incidents) == len(FAULTS), "each of them came past an eager segment"
    assert compare.position_digest(run, layout) == compare.position_digest(behind, layout)
    assert run.losses == behind.losses
