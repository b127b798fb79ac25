"""Goals of the detection bench, and what of it comes onto the page."""

from __future__ import annotations

import json

import pytest

import bench_detection as detection
import common
import healthy
import healthy_beats
import page


@pytest.mark.parametrize(("samples", "met"), [([1.0, 2.0, 9.0], "yes"), ([1.0, 2.1, 2.2], "no")])
def test_a_goal_is_the_medians(samples: list[float], met: str) -> None:
    assert detection.PROCESS.facts(samples, 25.0) == {"goal": "2 ms", "goal ms": 2.0, "met": met}


def test_a_hangs_goal_is_a_factor_of_its_phase_and_a_look() -> None:
    found = detection.WITH_EVIDENCE.facts([6_150.0], 4_000.0)
    assert found == {
        "goal": "1.5 x its phase", "goal ms": 6_000.0, "met": "yes", "phase ms": 4_000.0, "x its phase": 1.538,
    }  # fmt: skip
    assert detection.WITH_EVIDENCE.facts([6_201.0], 4_000.0)["met"] == "no"
    short = detection.WITHOUT.facts([1_600.0], 25.0)
    assert short == {"goal": "3 x its phase, 1500 ms or more", "goal ms": 1_500.0, "met": "yes"}


def test_cases_have_names_of_their_own_and_long_ones_a_phase_that_decides() -> None:
    assert len({case.name for case in detection.CASES}) == len(detection.CASES)
    defaults = detection.options().parse_args([])
    for case in detection.CASES:
        if case.kind is detection.LONG:
            assert case.goal.factor and "phase ms" in case.goal.facts([1.0], defaults.long_micro_batch_ms)


def test_a_simulated_run_is_a_result_that_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    result = healthy.Result(1_000, intervals=56_000, beats=healthy_beats.Result(beats=9, suspicions=3))
    kept = json.loads(json.dumps(detection.false_alarms(result).as_json()))
    text = page.section("2_cores/detection_healthy", kept, "")
    assert "`bench_detection.py" in text and "(modelled)" in text and "iterations 1000" in text
    assert "| a lost node | 0 | 0 | 0 | 0 | 1 | 9 beats | 3 | none | yes |" in text
    result.beats.nodes.append((1.0, 2, "gone"))
    rows = detection.false_alarms(result).as_json()["rows"]
    assert [(row["median"], row["met"]) for row in rows] == [(0.0, "yes"), (0.0, "yes"), (1.0, "no")]


def test_results_of_before_there_were_goals_are_shown() -> None:
    bench = common.Bench("detection: fault to verdict", "ms", machine={"versions": {}, "cpu": "", "cores": 2})
    bench.add("SIGKILL", [1.0, 2.0], paper="1800", verdict="worker lost: signal 9")
    lines = page.table(json.loads(json.dumps(bench.as_json())))
    assert lines[0] == "| case | median | p99 | min | max | runs | paper | verdict |"
    rows = [{"case": "a", "median": 1.0, "min": 1.0, "max": 1.0, "runs": 1}]
    assert page.table({"baseline": None, "rows": rows})[0] == "| case | median | min | max | runs |"
