"""unicron simulate: what it prints, what it writes, and one line for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from unicron.cli import main
from unicron.simulate.report import rows_of
from unicron.simulate.scenario import Scenario, simulate

SCENARIO = """
name: small
nodes: 6
gpu: A100-80GB
days: 3
standbys: 1
failures: {per_1000_node_days: 500, repair_scale: 0.1}
tasks:
  - {name: a, model: gpt3-1.3b, weight: 2.0, nodes: {max: 3}}
  - {name: b, model: gpt3-1.3b, nodes: {max: 3}}
policies: [unicron, unicron-standby, megatron]
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def test_json(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(scenario), "--seed", "2", "--policy", "unicron,megatron", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seed"] == 2 and found["modelled"] is True and found["events_per_s"] > 0
    assert list(found["policies"]) == ["unicron", "megatron"]
    for row in found["policies"].values():
        assert {"waf_mean", "ettr", "gpu_hours_wasted", "incidents", "downtime_s"} <= set(row)
        assert row["waf_mean"] > 0


def test_the_table_is_for_people_and_a_pipe_gets_no_bar(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(scenario), "--policy", "unicron,megatron"]) == 0
    out, error = capsys.readouterr()
    assert error == "" and "failures (modelled)" in out and "failures and returns" in out
    assert "events a second" not in out and "e+0" not in out


def test_whoever_waits_hears_what_begins() -> None:
    chosen = msgspec.convert(msgspec.yaml.decode(SCENARIO), Scenario)
    begun: list[str] = []
    simulated = simulate(msgspec.structs.replace(chosen, policies=("unicron", "megatron")), tell=begun.append)
    assert begun == ["what every task earns", "unicron", "megatron"]
    assert not [row for row in rows_of(simulated) if "e" in str(row["GPU-hours wasted"])]


def test_report(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out.html"
    assert main(["simulate", str(scenario), "--report", str(page)]) == 0
    assert "modelled" in capsys.readouterr().out
    text = page.read_text()
    assert page.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for part in ("Who is ahead", "Sensitivity", "measured on two GPUs", "bench/results/gpu_2/tables.md", "megatron"):
        assert part in text
    assert "unicron.group_per_rank_s" in text and text.count("modelled") >= 4


def test_incidents_in_place_of_what_is_drawn(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    incidents = scenario.with_name("incidents.csv")
    incidents.write_text("node,start_day,end_day,class,desc,mapped_severity\nn5,0.5,0.75,GPU,ECC,SEV1\n")
    assert main(["simulate", str(scenario), "--incidents", str(incidents), "--json"]) == 0
    history = json.loads(capsys.readouterr().out)["history"]
    assert history == {"name": "incidents.csv", "nodes": 6, "events": 1}


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        ([], "give a scenario, or --table NAME", 2),
        (["--table", "nothing"], "there are trace-a, trace-b", 2),
        (["SCENARIO", "--policy", "slurm"], "no policy slurm; there are unicron", 1),
        (["SCENARIO", "--incidents", "/nowhere.csv"], "cannot read /nowhere.csv", 1),
        (["SCENARIO", "--report", "/proc/x.html"], "--report /proc/x.html cannot be written", 2),
        (["SCENARIO", "--report", "/tmp"], "/tmp is a folder: give the page's name", 2),
    ],
)
def test_what_is_wrong_is_one_line(
    scenario: Path, words: list[str], says: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *(str(scenario) if word == "SCENARIO" else word for word in words)]) == code
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--table", "downtime"]) == 0
    said = capsys.readouterr().out
    assert "published" in said and "modelled" in said and "moves with: unicron.group_per_rank_s" in said
