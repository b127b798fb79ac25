"""YAML of people: unknown fields name the nearest known one; what would be ignored is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.runtime.files import FileProblem, convert, load_yaml
from unicron.runtime.job_file import JobFile, load_job, world_layout
from unicron.runtime.runner import exit_code, seems_managed
from unicron.types import Layout

JOB = """
name: gpt
command: [python, train.py]
weight: 1.0
priority: 0
workers: {min: 2, max: 16, unit: 2}
model: {layers: 24, hidden: 2048}
global_batch: 16
layout: {tp: 2, dp: 2, micro_batch: 2}
throughput: measured
env: {A: "1"}
checkpoint: {dir: ckpt, every: 500}
recovery: in-order
exact: false
restart: {max: 3, fatal_exit_codes: [3], stopped_grace_s: 0.5}
"""


def test_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = load_job(path)
    assert job["layout"] | {"num_micro_batches": 8} == job["layout"]
    assert (job["layout"]["tp"], job["layout"]["dp"], job["layout"]["micro_batch"]) == (2, 2, 2)
    assert job["checkpoint_dir"] == str(tmp_path / "ckpt") and job["checkpoint_every"] == 500
    assert (job["stopped_grace_ms"], job["restart_max"]) == (500, 3)
    assert Path(job["cwd"]) == tmp_path


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("wieght: 2", "unknown field wieght; did you mean weight?"),
        ("checkpoint: {evry: 2}", "unknown field checkpoint.evry; did you mean every?"),
        ("weight: 2", "weight cannot be chosen"),
        ("exact: true", "exact cannot be chosen"),
        ("backup: {every: 2}", "use checkpoint"),
        ("global_batch: 15", "no multiple"),
        ("workers: {min: 8}", "outside 8"),
        ("layouts: [{tp: 1}, {tp: 2}]", "give one layout"),
        ("name: 3", "Expected `str`, got `int` - at `name`"),
        ("[", "is not YAML"),
    ],
)
def test_a_job_that_cannot_be(tmp_path: Path, change: str, text: str) -> None:
    path = tmp_path / "job.yaml"
    field = change.partition(":")[0]
    lines = [line for line in JOB.splitlines() if not line.startswith(f"{field}:")]
    path.write_text("\n".join([*lines, change]))
    with pytest.raises(FileProblem) as caught:
        load_job(path)
    assert text in str(caught.value) and str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileProblem, match="cannot read"):
        load_yaml(tmp_path / "none.yaml", JobFile)
    with pytest.raises(FileProblem, match="known are"):
        convert({"name": "a", "command": [], "qqqq": 1}, JobFile)


def test_layout_of_a_run() -> None:
    assert world_layout(8, 2, 2, 1, 0) == Layout(2, 2, 2, num_micro_batches=8)
    with pytest.raises(FileProblem, match="multiple of 3"):
        world_layout(4, 3, 1, 1, 0)
    with pytest.raises(FileProblem, match="at least 1"):
        world_layout(4, 0, 1, 1, 0)


def test_exit_codes() -> None:
    assert exit_code("done", "", []) == 0
    assert exit_code("stopped", "restart.max = 1 is used up; the last: exit code 5", []) == 5
    assert exit_code("stopped", "the last: signal 9", []) == 137
    assert exit_code("stopped", "x", [{"cause": "exit code 3"}, {"cause": "ValueError"}]) == 3
    assert exit_code("stopped", "cancelled", []) == 1


def test_does_a_script_join(tmp_path: Path) -> None:
    path = tmp_path / "s.py"
    for text, joins in (
        ("import unicron\n", True),
        ("def f():\n    from unicron.training import join\n", True),
        ("import torch  # not unicron\n", False),
        ("import unicronlike\n", False),
    ):
        path.write_text(text)
        assert seems_managed(("/usr/bin/python3", str(path))) is joins, text
    assert seems_managed(("python", "-m", "unicron.runtime.janitor"))
    assert not seems_managed(("python", "-m", "json.tool"))
    assert not seems_managed(("python", "-m", "no.such.module"))
