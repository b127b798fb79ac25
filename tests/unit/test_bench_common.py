"""The benches' table: medians, ratios, alignment, and the same as JSON."""

from __future__ import annotations

import argparse
import json
import shutil

import pytest

import common


@pytest.fixture
def bench() -> common.Bench:
    result = common.Bench("widths", "ms", "small", {"cases": 2}, machine={"cores": 2})
    result.add("small", [3.0, 1.0, 2.0])
    result.add("a large one", [2000.0, 4.0, 4.0], note="slow")
    return result


def test_table(bench: common.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.finish(argparse.Namespace(json=False))
    assert capsys.readouterr().out.splitlines() == [
        "widths (ms)",
        "  machine: cores 2",
        "  configuration: cases 2",
        "",
        "case         median   p99  min   max  runs  x small  note",
        "-----------  ------  ----  ---  ----  ----  -------  ----",
        "small             2     3    1     3     3        1",
        "a large one       4  2000    4  2000     3        2  slow",
    ]


def test_json(bench: common.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.finish(argparse.Namespace(json=True))
    found = json.loads(capsys.readouterr().out)
    assert (found["bench"], found["unit"], found["baseline"]) == ("widths", "ms", "small")
    large = found["rows"][1]
    assert large == {
        "case": "a large one", "median": 4.0, "p99": 2000.0, "min": 4.0, "max": 2000.0, "runs": 3, "ratio": 2.0,
        "note": "slow",
    }  # fmt: skip


def test_a_result_says_how_it_was_asked_for(bench: common.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.as_json()["command"] == ""
    monkeypatch.setattr("sys.argv", ["/checkout/bench/bench_widths.py", "--json", "--runs", "9"])
    assert bench.as_json()["command"] == "bench_widths.py --runs 9"


def test_no_samples_is_an_error(bench: common.Bench) -> None:
    with pytest.raises(ValueError, match="no samples for nothing"):
        bench.add("nothing", [])


def test_machine_says_where() -> None:
    facts = common.machine()
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    assert "unicron" in facts["versions"]


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1234.5, "1234"), (12.345, "12.3"), (0.01234, "0.0123"), (0.00001234, "1.2e-05")]
)
def test_numbers(value: float, text: str) -> None:
    assert common.number(value) == text


def test_a_bench_that_fails_leaves_its_logs(capsys: pytest.CaptureFixture[str]) -> None:
    with common.scratch() as well:
        (well / "log").write_text("x")
    assert not well.exists() and capsys.readouterr().err == ""
    with pytest.raises(SystemExit), common.scratch() as badly:
        (badly / "log").write_text("x")
        raise SystemExit(f"see {badly}")
    assert (badly / "log").exists() and str(badly) in capsys.readouterr().err
    shutil.rmtree(badly)
    with pytest.raises(KeyboardInterrupt), common.scratch() as given_up:
        raise KeyboardInterrupt
    assert not given_up.exists()
