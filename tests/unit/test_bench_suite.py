"""The suite of benches: what counts as slower, and a page on which no number is typed by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import page
import suite


def result(**medians: float) -> dict[str, Any]:
    """Case -> median; every run scatters by 5 % to each side."""
    base = medians["base"]
    rows = [
        {"case": case, "median": m, "min": 0.95 * m, "max": 1.05 * m, "ratio": m / base} for case, m in medians.items()
    ]
    return {"baseline": "base", "rows": rows}


def found(kept: dict[str, Any], new: dict[str, Any]) -> dict[str, bool]:
    return {change.case: change.is_slower for change in suite.changes("b", kept, new)}


def test_a_slower_machine_is_no_slower_case() -> None:
    assert found(result(base=10, a=20, b=5), result(base=30, a=60, b=15)) == {"a": False, "b": False}


def test_what_grew_against_its_baseline_is_named() -> None:
    assert found(result(base=10, a=20, b=5), result(base=10, a=28, b=5)) == {"a": True, "b": False}


def test_what_scatters_more_than_it_grew_is_not() -> None:
    new = result(base=10, a=28)
    new["rows"][1].update(min=10.0, max=80.0)
    assert found(result(base=10, a=20), new) == {"a": False}


def test_new_cases_and_cases_without_a_ratio_are_not_compared() -> None:
    new = result(base=10, a=20, c=9)
    new["rows"][1]["ratio"] = None
    assert found(result(base=10, a=20), new) == {}


def test_check_fails_when_something_is_slower_or_nothing_was_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, new = tmp_path / "kept", tmp_path / "new"
    for folder, a in ((kept, 20.0), (new, 40.0)):
        folder.mkdir()
        (folder / "pulse.json").write_text(json.dumps(result(base=10, a=a)))
    arguments = argparse.Namespace(only=("pulse",), kept=kept, new=new)
    assert suite.check(arguments) == 1
    assert "slower: pulse, a: 2.00 times" in capsys.readouterr().err
    arguments.new = kept
    assert suite.check(arguments) == 0
    arguments.only = ("arena",)
    assert suite.check(arguments) == 1
    assert "nothing was compared" in capsys.readouterr().err


def test_every_bench_of_the_suite_is_there() -> None:
    assert all((suite.HERE / f"bench_{name}.py").is_file() for name in suite.SUITE)


def test_the_answers_to_the_corpus_come_onto_the_page() -> None:
    """bench_classify.py adds them where the corpus is there; a result without them is shown as any other."""
    counts = {"root": {"right": 3, "of": 4}, "severity": {"right": 9, "of": 9}, "false root": {"right": 0, "of": 1}}
    halves = {
        "odd": {
            "families": {"all": counts, "xid": {"severity": {"right": 5, "of": 5}}},
            "goals_percent": {"severity": 88.0}, "met": {"severity": True, "no false root": False, "root": None},
            "misses": [{}],
        }
    }  # fmt: skip
    said = "Goals (roots of all rows, others of confident ones): severity 88 %."
    met = "Met: severity yes, no false root no, root not judged."
    assert page.corpus(halves) == [
        "", "| odd half of the corpus | root | severity |", "| --- | --- | --- |", "| all | 3 of 4 | 9 of 9 |",
        "| xid |  | 5 of 5 |", "", f"{said} {met} Wrong: 1 rows.",
    ]  # fmt: skip
    machine = {"versions": {}, "cpu": "", "cores": 2, "load_1min": 0.0}
    rows = [{"case": "a dull log", "median": 5.0, "min": 5.0, "max": 5.0, "runs": 1}]
    kept = {
        "bench": "classify",
        "unit": "MB/s",
        "baseline": None,
        "machine": machine,
        "configuration": {},
        "rows": rows,
    }
    assert "odd half" in page.section("2_cores/classify", {**kept, "corpus": halves}, "")
    assert "half" not in page.section("2_cores/classify", kept, "") + page.section("c", {**kept, "corpus": {}}, "")


def test_the_page_is_what_the_results_say(tmp_path: Path) -> None:
    sections = [
        page.section(name, each, page.draw(name, each, tmp_path / "benchmarks")) for name, each in page.results()
    ]
    sections += page.peers(tmp_path / "benchmarks")
    assert page.PAGE.read_text() == "\n".join([page.INTRODUCTION, *sections]), "python bench/page.py makes it anew"
