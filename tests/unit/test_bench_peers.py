"""bench/peers without its peers: what a run's events say it cost, the order of cells, and the page's tables."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from peers import compare, job, measure, systems, tables

STRUCK = 10.0
BENCH = systems.HERE.parent
TOKENS = float(job.SAMPLES * job.SEQ_LENGTH)


def committed(iteration: int, at: float, ranks: tuple[int, ...] = (0, 1, 2, 3), tokens: float = TOKENS) -> list[Any]:
    return [
        {"t": at, "event": "commit", "rank": rank, "i": iteration, "world": len(ranks), "loss": 1.0, "tokens": tokens}
        for rank in ranks
    ]


def run(*, after: list[Any]) -> dict[str, Any]:
    """Iterations of 0.1 s up to number 24, the fault at 10 s in number 25."""
    events = [event for i in range(25) for event in committed(i, 7.4 + 0.1 * i)]
    events += [{"t": STRUCK, "event": "fault", "rank": 2, "i": 25}, *after]
    return measure.row(sorted(events, key=lambda event: event["t"]), [(10.25, "it died")], None)


def test_an_iteration_finished_by_all() -> None:
    row = run(after=[*committed(25, 10.5), *committed(26, 10.6)])
    assert (row["detected_s"], row["next_commit_s"], row["full_world_s"]) == (0.25, 0.5, 0.5)
    assert row["lost_s"] == pytest.approx(10.5 - 9.8 - 0.1)
    assert (row["redone"], row["samples_lost"]) == (0, 0)


def test_a_world_of_three_that_becomes_whole() -> None:
    three = (0, 1, 3)
    after = [*committed(25, 11.0, three, 0.75 * TOKENS), *committed(26, 11.1, three, 0.75 * TOKENS)]
    row = run(after=[*after, *committed(27, 14.0), *committed(28, 14.1)])
    assert (row["next_commit_s"], row["full_world_s"]) == (1.0, 4.0)
    assert row["samples_lost"] == 2 * job.SAMPLES // 4


def test_a_world_that_stays_small_is_not_whole() -> None:
    row = run(after=[event for i in range(25, 30) for event in committed(i, 11.0 + i, (0, 1, 3))])
    assert row["full_world_s"] is None
    assert row["world_after"] == 3


def test_the_last_iteration_may_be_half_said() -> None:
    row = run(after=[*committed(25, 10.5), *committed(26, 10.6), *committed(27, 10.7, (0, 1))])
    assert row["full_world_s"] == 0.5


def test_iterations_computed_again_from_a_checkpoint() -> None:
    row = run(after=[*committed(23, 15.0), *committed(24, 15.1), *committed(25, 15.2), *committed(26, 15.3)])
    assert row["next_commit_s"] == pytest.approx(5.2)
    assert row["redone"] == 2


def test_no_commit_at_all() -> None:
    row = run(after=[])
    assert (row["next_commit_s"], row["full_world_s"], row["lost_s"]) == (None, None, None)


def test_forwards_begun_twice_are_counted_in_samples() -> None:
    forwards = [{"t": 1.0, "event": "forward", "rank": 0, "i": 3, "m": m} for m in (0, 1, 1, 1)]
    assert measure.begun_again(forwards) == 2 * job.MICRO_BATCH


def arguments(**given: Any) -> argparse.Namespace:
    wanted = {"systems": tuple(systems.SYSTEMS), "faults": tuple(systems.FAULTS), "settings": ("tuned", "defaults")}
    return argparse.Namespace(**{**wanted, **given})


def test_important_cells_come_first_and_no_system_is_asked_for_what_it_has_not() -> None:
    found = compare.cells(arguments())
    faults = [fault for _, setting, fault in found if setting == "tuned"]
    assert faults[0] == "none" and faults.index("agent") < faults.index("gil")
    assert ("torchft", "tuned", "agent") not in found  # it has no launcher
    assert ("torchft", "tuned", "source") in found
    assert ("torchrun", "tuned", "source") not in found
    assert len(found) == len(set(found))


@pytest.mark.parametrize("fault", [fault for fault in systems.FAULTS if fault != "none"])
def test_every_fault_has_a_system_that_it_can_strike(fault: str) -> None:
    assert any(system.has(fault) for system in systems.SYSTEMS.values())


def kept(**given: Any) -> dict[str, Any]:
    row = {
        "system": "torchrun", "setting": "tuned", "fault": "kill", "status": "whole", "load": [1.0, 2.0],
        "machine": {"cpu": "a", "cores": 2}, "next_commit_s": 9.5, "full_world_s": 9.6, "weights_equal": True,
        "weights_max_abs_diff": 0.0, "work": tables.work(),
    }  # fmt: skip
    return {**row, **given}


def test_what_never_came_is_written_as_such() -> None:
    silent = kept(status="no reaction", next_commit_s=None, full_world_s=None)
    line = tables.fault_line(("stop", "torchrun", "tuned"), [silent])
    assert line["next commit"] == f"no reaction in {job.REACTION_S_MAX:g} s"
    assert line["full world"] == "not whole"


def test_the_page_tells_median_and_spread_of_several_runs(tmp_path: Path) -> None:
    rows = [kept(), kept(next_commit_s=8.5), kept(next_commit_s=20.0), kept(fault="none", cpu_ms_per_iteration=200.0)]
    text = tables.page(rows, "", "peers")
    assert text.count(tables.work()) == 1 and "over gloo" in text
    assert "9.5 (8.5 to 20)" in text and "equal bit for bit" in text and "| torchrun | tuned | 1 | 200 |" in text
    assert tables.load(tmp_path) == []


def test_run_sh_is_sound_and_names_only_what_exists() -> None:
    script = systems.HERE / "run.sh"
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    assert os.access(script, os.X_OK)
    for environment in {system.environment for system in systems.SYSTEMS.values()} - {""}:
        pins = (systems.HERE / "requirements" / f"{environment}.txt").read_text().split()
        assert "torch==2.13.0" in pins
        assert all("==" in pin for pin in pins), environment


def test_on_gpus_there_are_two_ranks_and_faults_that_leave_one() -> None:
    words = "import torch, numpy as np; from peers import job, systems, tables; print(job.VICTIM, tables.work());"
    words += (
        "print([f for f in systems.FAULTS if systems.UNICRON.has(f) or systems.TORCHFT.has(f)], systems.SECOND_HALF)"
    )
    found = subprocess.run(
        [sys.executable, "-c", words], env={**os.environ, "PEERS_MACHINE": "gpu", "PYTHONPATH": str(BENCH)},
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert found.startswith("1 GPT 8 x 512") and "2 ranks over nccl" in found
    assert "'kill'" in found and "'two'" not in found and "'source'" not in found and "('rank1',)" in found


def test_the_time_of_a_log_line_is_counted_from_the_fault_over_midnight_too() -> None:
    from peers.ours import since

    noon = time.mktime((2026, 1, 2, 12, 0, 0, 0, 0, -1)) + 0.25
    assert since(noon, "12", "00", "01.500") == pytest.approx(1.25)
    before_midnight = time.mktime((2026, 1, 2, 23, 59, 59, 0, 0, -1))
    assert since(before_midnight, "00", "00", "01.000") == pytest.approx(2.0)
