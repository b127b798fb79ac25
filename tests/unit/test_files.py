"""YAML of people: unknown fields name the nearest known one; what would be ignored is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron.coordinator.job import Job
from unicron.runtime import runner
from unicron.runtime.files import FileProblem, convert, load_yaml
from unicron.runtime.job_file import JobFile, load_job, world_layout
from unicron.runtime.runner import UNJOINED_S, Watch, exit_code, seems_managed
from unicron.types import Layout

JOB = """
name: gpt
command: [python, train.py]
weight: 1.0
priority: 0
workers: {min: 2, max: 16, unit: 2}
model: {layers: 24, hidden: 2048, heads: 16, seq: 2048, vocab: 51200}
global_batch: 16
layout: {tp: 2, dp: 2, micro_batch: 2}
throughput: measured
env: {A: "1"}
checkpoint: {dir: ckpt, every: 500}
recovery: in-order
exact: false
restart: {max: 3, fatal_exit_codes: [3], stopped_grace_s: 0.5, grace_s: 2}
timeouts: {iteration_s: 60, save_s: 5}
observe_only: true
"""


def layout_in(job: dict[str, Any]) -> Layout:
    """Sent without what has its default."""
    return msgspec.convert(job["layout"], Layout)


def test_a_job(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    job = load_job(path)
    assert job["layout"] | {"num_micro_batches": 8} == job["layout"]
    assert (job["layout"]["tp"], job["layout"]["dp"], job["layout"]["micro_batch"]) == (2, 2, 2)
    assert job["checkpoint_dir"] == str(tmp_path / "ckpt") and job["checkpoint_every"] == 500
    assert (job["stopped_grace_ms"], job["restart_max"]) == (500, 3)
    assert Path(job["cwd"]) == tmp_path
    assert job["budgets"] == {
        "iteration_ms": 60_000.0, "first_iteration_ms": 1_800_000.0, "evaluation_ms": 3_600_000.0, "save_ms": 5_000.0,
    }  # fmt: skip
    assert (job["observe_only"], job["stop_grace_ms"]) == (True, 2_000)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("wieght: 2", "unknown field wieght; did you mean weight?"),
        ("checkpoint: {evry: 2}", "unknown field checkpoint.evry; did you mean every?"),
        ("weight: -1", "weight is -1.0: give a number of 0 or more"),
        ("weight: .nan", "weight is nan: give a number of 0 or more"),
        ("weight: .inf", "weight is inf"),
        ("priority: high", "Expected `int`, got `str` - at `priority`"),
        ("workers: {min: 2, max: 1}", "workers.max 1 is below workers.min 2"),
        ("workers: {min: 1}", "workers.min 1 is no multiple of a replica's 2 workers"),
        ("workers: {min: 2, unit: 3}", "workers.unit 3 is no multiple of a replica's 2 workers"),
        ("workers: {mni: 2}", "unknown field workers.mni; did you mean min?"),
        ("throughput: {2: 1.0e+12}", "throughput has no value for 4 workers"),
        ("throughput: {2: 1.0e+12, 4: .nan}", "throughput at 4 workers is nan"),
        ("throughput: {2: 1.0e+12, 4: -1}", "throughput at 4 workers is -1"),
        ("throughput: {2: 1.0e+12, 4: 2.0e+12, 6: 1.0}", "throughput names 6 workers"),
        ("throughput: model", "throughput: model needs the cluster's GPU type"),
        ("throughput: guess", "Invalid enum value 'guess'"),
        ("model: {layers: 24}", "missing required field `hidden` - at `model`"),
        ("model: {layers: 24, hidden: 2048, heads: 15, seq: 8, vocab: 8}", "not divisible by its 15 heads"),
        ("timeouts: {save_s: 0}", "timeouts.save_s is 0.0: give seconds above 0"),
        ("timeouts: {svae_s: 3}", "unknown field timeouts.svae_s; did you mean save_s?"),
        ("recovery: fastest", "recovery cannot be chosen"),
        ("recovery: slow", "Invalid enum value 'slow'"),
        ("restart: {grace_s: -3}", "restart.grace_s is -3.0"),
        ("checkpoint: {every: 3}", "checkpoint.every without checkpoint.dir"),
        ("name: a/b", "name 'a/b'"),
        ("backup: {every: 2}", "layout.optimizer must be distributed"),
        ("backup: {sync: true}", "layout.optimizer must be distributed"),
        ("global_batch: 15", "no multiple"),
        ("workers: {min: 8, max: 16}", "outside 8"),
        ("layouts: [{tp: 1}, {tp: 2}]", "give layout or layouts, not both"),
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


def test_shards_have_buddies_when_the_job_says_so(tmp_path: Path) -> None:
    text = "name: t\ncommand: [x]\nlayout: {dp: 2, optimizer: distributed}\nbackup: {sync: true}\n"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    layout = layout_in(load_job(path))
    assert layout.sharded and layout.buddy and not layout.buddy_every
    path.write_text(text.replace("{sync: true}", "{every: 10, sync: false}"))
    assert load_job(path)["layout"]["buddy_every"] == 10


def test_a_job_says_what_another_layout_earns(tmp_path: Path) -> None:
    text = "name: t\ncommand: [x]\nlayouts: [{dp: 2}, {tp: 2, dp: 2}]\nthroughput: {1: 1e12, 2: 2e12, 4: 3e12}\n"
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert load_job(path)["throughput"][4] == 3e12
    path.write_text(text.replace("4: 3e12", "3: 3e12"))
    with pytest.raises(FileProblem, match="throughput names 3 workers"):
        load_job(path)


@pytest.mark.parametrize(
    ("backup", "problem"),
    [("{every: 10, sync: true}", "leave out every"), ("{every: 1}", "at least 2"), ("{every: -1}", "at least 2")],
)
def test_backups_that_cannot_be(tmp_path: Path, backup: str, problem: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"name: t\ncommand: [x]\nlayout: {{dp: 2, optimizer: distributed}}\nbackup: {backup}\n")
    with pytest.raises(FileProblem, match=problem):
        load_job(path)


WIDE = """
name: gpt
command: [python, train.py]
model: {layers: 24, hidden: 2048, heads: 16, seq: 2048, vocab: 51200}
global_batch: 256
workers: {min: 2, max: 16, unit: 2}
"""


def load(tmp_path: Path, text: str, gpu: str = "") -> dict[str, Any]:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return load_job(path, gpu)


def test_widths_of_a_job(tmp_path: Path) -> None:
    job = load(tmp_path, WIDE)
    layout = layout_in(job)
    assert (layout.tp, layout.dp, job["replicas_min"], job["replicas_unit"]) == (1, 16, 2, 2)
    assert (job["throughput"], job["measured"]) == ({}, True) and job["iteration_flop"] > 1e15
    listed = load(tmp_path, WIDE + "layouts: [{tp: 2, dp: 1}, {tp: 2, dp: 3}, {tp: 2, dp: 5}]\n")
    assert (listed["layout"]["dp"], listed["replicas_min"], listed["replicas_unit"]) == (5, 1, 2)
    several = load(tmp_path, WIDE + "layouts: [{tp: 1, dp: 4}, {tp: 2, pp: 2, dp: 2, optimizer: distributed}]\n")
    others = [msgspec.convert(other, Layout) for other in several["layouts"]]
    assert [(x.tp, x.pp, x.dp, x.sharded) for x in others] == [
        (1, 1, 4, False), (2, 2, 2, True),
    ]  # fmt: skip
    assert several["layout"] == several["layouts"][0]
    for layouts, text in (
        ("[{tp: 1, dp: 4}, {tp: 2, dp: 2, micro_batch: 4}]", "micro_batch must be that of the first"),
        ("[{tp: 1, dp: 4}, {tp: 2}]", "several need dp"),
        ("[{dp: 2}, {dp: 3}, {dp: 6}]", "not evenly spaced"),
        ("[{tp: 1}, {tp: 1}]", "several need dp"),
        ("[{dp: 20}, {dp: 30}]", "no layout of the list has 2 to 16 workers"),
        ("best", "Invalid enum value .best."),
    ):
        with pytest.raises(FileProblem, match=text):
            load(tmp_path, f"{WIDE}layouts: {layouts}\n")


@pytest.mark.timeout(240)  # the model is compiled
def test_a_cluster_with_gpus_gives_the_model_its_say(tmp_path: Path) -> None:
    job = load(tmp_path, WIDE, "H100-80GB")
    size = layout_in(job).replica_size
    assert 2 % size == 0 and job["measured"]
    slots = sorted(job["throughput"])
    assert slots[0] == 2 and slots[-1] == 16 and job["throughput"][16] > 4 * job["throughput"][2]
    assert not load(tmp_path, WIDE + "throughput: model\n", "H100-80GB")["measured"]
    large = WIDE.replace("layers: 24, hidden: 2048, heads: 16", "layers: 96, hidden: 12288, heads: 96")
    for layouts in ("auto", "[{tp: 2}]"):
        with pytest.raises(FileProblem, match=r"it fits no layout: .* GiB a slot, H100-80GB has 80"):
            load(tmp_path, f"{large}layouts: {layouts}\n", "H100-80GB")
    with pytest.raises(FileProblem, match="unknown GPU type"):
        load(tmp_path, WIDE, "H1000")


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
    assert exit_code("stopped", "cancelled", []) == 137
    assert exit_code("stopped", "cancelled", [{"cause": "exit code 5"}]) == 137
    assert exit_code("stopped", "restart.max = 1 is used up; the last: exit code 5", []) == 5
    assert exit_code("stopped", "the last: signal 9", []) == 137
    assert exit_code("stopped", "x", [{"cause": "exit code 3"}, {"cause": "ValueError"}]) == 3


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


def test_workers_that_do_not_join_are_told_once() -> None:
    told: list[float] = []
    job, watch = Job("j", ("python", "train.py")), Watch(unjoined=told.append)
    now = time.monotonic()
    waiting, starting, running = ({"phase": phase, "epoch": 0} for phase in ("waiting", "starting", "running"))
    since = runner._awaited(job, waiting, watch, now - 2 * UNJOINED_S)
    assert since is not None and since >= now  # in the queue nobody could join
    assert runner._awaited(job, starting, watch, since) == since and not told
    assert runner._awaited(job, starting, watch, now - 2 * UNJOINED_S) is None and told == [UNJOINED_S]
    assert runner._awaited(job, starting, watch, None) is None and len(told) == 1
    assert runner._awaited(job, {**running, "epoch": 1}, watch, now - 2 * UNJOINED_S) is None and len(told) == 1
