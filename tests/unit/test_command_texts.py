"""What commands say to people: plans, incidents, options, and what is left out because it says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from several import Cluster
from unicron import _core
from unicron.cli import incidents, main
from unicron.cli.plan import meaning
from unicron.planner.situation import EVENTS
from unicron.runtime import doctor
from unicron.runtime.checks import gpu_compute, nvml, supervise
from unicron.runtime.views import incident_view

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster.yaml"


def an_incident(**changes: Any) -> dict[str, Any]:
    cluster = Cluster(nodes=2, slots=2)
    cluster.run("a", 4)
    cluster.lose("n1")
    state = cluster.machine.state
    return {**incident_view(next(iter(state.incidents.values())), state, 0.0), **changes}


def shown(incident: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    incidents.show(incident)
    return capsys.readouterr().out


def test_an_incident_leaves_out_what_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(an_incident(is_only_told=False, micro_batch=-1, groups_kept=0, detect_ms=1.23456), capsys)
    assert "is only told" not in text and "micro batch " not in text and "groups kept" not in text
    assert "detect ms  1.2\n" in text and "iterations lost  0" in text
    text = shown(an_incident(is_only_told=True, micro_batch=3, detect_ms=None), capsys)
    assert "is only told  yes" in text and "micro batch  3" in text
    assert "detect ms  -  (when it happened is not known" in text


def test_an_incident_explains_the_steps_of_its_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(an_incident(phases_ms={"Commit": 1.26, "AwaitPlan": 20.0, "New": 1.0}), capsys)
    lines = text.partition("recovery, step by step")[2].splitlines()[1:4]
    steps = [line.split(":")[0].strip() for line in lines]
    assert steps == ["20.0 ms  AwaitPlan", "1.3 ms  Commit", "1.0 ms  New"]


def test_every_step_that_is_measured_is_explained() -> None:
    from unicron.healing import actions

    ends = {"ReportStateLost", "EndIteration", "Ready", "AwaitOthers", "Over", "Leave"}  # nothing is mended in them
    known = {n for n, c in vars(actions).items() if isinstance(c, type) and issubclass(c, actions.Action)}
    assert known - ends - {"Action"} == set(incidents.PHASES)


def test_incidents_of_a_run_that_is_over_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["incidents", "--coordinator", "127.0.0.1:9", "--keys", str(tmp_path / "keys")]) == 1
    said = capsys.readouterr().err
    assert "no cluster is at" in said and "--log-dir FOLDER" in said and len(said.splitlines()) == 1


def test_a_plan_says_what_its_event_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(EXAMPLE)]) == 0
    assert capsys.readouterr().out.startswith("What the planner would do now, if nothing else happened:")
    assert main(["plan", str(EXAMPLE), "--event", "slot:gpt-7b", "--event", "node:n1"]) == 0
    headline = capsys.readouterr().out.splitlines()[0]
    assert "task gpt-7b loses a slot" in headline and "node n1 is lost with all its slots" in headline
    for event in EVENTS.split(", "):
        assert meaning(event), event
    assert "a new node of 8 slots" in meaning("join:8") and "on n1" in meaning("slot:a@n1")


def test_a_machine_without_gpus_is_not_asked_about_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr(supervise, "run_checks", lambda *_, only, **__: asked.extend(only) or [])
    monkeypatch.setattr(_core, "num_cuda_devices", lambda: 0)
    monkeypatch.setattr(doctor, "DEVICES", tmp_path)
    of_gpus = {check.name for check in (*nvml.CHECKS, *gpu_compute.CHECKS)}
    doctor._hardware()
    assert "disk" in asked and not of_gpus & set(asked)
    (tmp_path / "nvidia0").touch()  # there, and CUDA does not see it
    doctor._hardware()
    assert of_gpus <= set(asked)


def test_help_names_one_default(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert "default: -1" not in said and "default all.  [default" not in said and "Always so here" not in said
    assert main(["incidents", "--help"]) == 0
    examples = [line.strip() for line in capsys.readouterr().out.splitlines() if "Example:" in line]
    assert examples == ["Example: unicron incidents i3", "Example: unicron incidents --log-dir unicron-logs"]
