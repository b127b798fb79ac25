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


def test_the_page_is_what_the_results_say(tmp_path: Path) -> None:
    sections = [
        page.section(name, each, page.draw(name, each, tmp_path / "benchmarks")) for name, each in page.results()
    ]
    assert page.PAGE.read_text() == "\n".join([page.INTRODUCTION, *sections]), "python bench/page.py makes it anew"
