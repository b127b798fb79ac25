"""The commands against a running cluster: what they print, what they do, and how they end."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from clusters import PLAIN, eventually
from unicron.cli import VERBS, main
from unicron.runtime.local_cluster import LocalCluster

pytestmark = pytest.mark.timeout(90)

JOB = """
name: {name}
command: [{python}, {script}, "{iterations}", "10"]
workers: {{min: 1, max: 2}}
weight: {weight}
throughput: {{1: 1.0e+12, 2: 1.9e+12}}
understudies: 0
restart: {{stopped_grace_s: 0}}
"""


class Line:
    """The command line of one cluster."""

    def __init__(self, cluster: LocalCluster, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._where = ["--coordinator", cluster._address, "--keys", str(cluster.directory / "keys")]
        self._folder, self._capsys = folder, capsys

    def __call__(self, *words: str, code: int = 0) -> str:
        self._capsys.readouterr()
        found = main([*words, *self._where])
        gc.collect()  # a socket that the command left open is an error here, and not in a later test
        said = self._capsys.readouterr()
        assert found == code, said.err
        if code:
            assert len(said.err.splitlines()) == 1, said.err
        return said.err if code else said.out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))

    def file(self, name: str, weight: float = 1.0, iterations: int = 100_000, more: str = "") -> str:
        path = self._folder / f"{name}.yaml"
        text = JOB.format(name=name, python=sys.executable, script=PLAIN, iterations=iterations, weight=weight)
        path.write_text(text + more)
        return str(path)


@pytest.fixture
def line(cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Line:
    return Line(cluster, tmp_path, capsys)


def test_tasks_and_nodes(line: Line, tmp_path: Path) -> None:
    said = line.json("submit", line.file("a"))
    assert (said["task"], said["slots"]) == ("a", 2) and said["why"].startswith("2 of 2 slots")
    eventually(lambda: line.json("ps")["tasks"][0]["phase"] == "running")
    assert "is running already" in line("submit", line.file("a"), code=1)

    # b earns as much as a, and is newer: one slot each.
    assert "b is admitted (1 of 2 slots" in line("submit", line.file("b", weight=1.0))
    eventually(lambda: {t["task"]: (t["phase"], t["slots"]) for t in line.json("ps")["tasks"]}
               == {"a": ("running", 1), "b": ("running", 1)})  # fmt: skip
    nodes = line.json("nodes")["nodes"]
    assert [n["used"] for n in nodes] == [1, 1] and {t for n in nodes for t in n["tasks"]} == {"a", "b"}

    view = line.json("describe", "a")
    assert view["throughput"] == {"1": 1.0e12, "2": 1.9e12} and view["allocation"]["trigger"] == "b wants slots"
    assert "ETTR" in line("describe", "a") and "recovery cost in GPU-seconds" in line("describe", "b")

    answer = line.json("plan", "--event", "finish:b")
    assert answer["allocation"] == {"a": 2, "b": 0} and answer["reason"]
    everything = line.json("plan", "--event", "all")
    assert "node:n0" not in everything or sum(everything["node:n0"]["allocation"].values()) <= 1
    assert "slots" in line("plan") and "no event" in line("plan", "--event", "flood", code=1)

    assert "no checkpoint.dir" in line("suspend", "a", code=1)
    assert "is not suspended" in line("resume", "a", code=1)
    assert "no task 'x'" in line("suspend", "x", code=1)
    line("cancel", "a")
    eventually(lambda: {t["task"]: t["slots"] for t in line.json("ps")["tasks"]}["b"] == 2)
    eventually(lambda: line.json("top")["cluster"]["waf"] == pytest.approx(1.9e12))
    assert len(line.json("top")["cluster"]["waf_over_time"]) >= 3
    assert "2 of 2 slots in use, WAF 1.9e+12 FLOP/s" in line("top", "--once")
    assert Path(line.json("logs", "b")["logs"][0]).is_relative_to(tmp_path)


def test_a_drained_node(line: Line) -> None:
    line("submit", line.file("a", more="checkpoint: {dir: ckpt}\n"))
    eventually(lambda: line.json("ps")["tasks"][0]["phase"] == "running")
    assert line.json("drain", "n1")["result"]["workers"] >= 1
    eventually(lambda: [(n["drained"], n["used"]) for n in line.json("nodes")["nodes"]] == [(False, 1), (True, 0)])
    assert line.json("drain", "n1", "--wait", "20")["used"] == 0  # to wait again is no mistake
    assert "n1 is empty" in line("drain", "n1", "--wait", "20")
    assert "give seconds" in line("drain", "n1", "--wait", "nan", code=2)
    assert "is drained already" in line("drain", "n1", code=1) and "no node 'n7'" in line("drain", "n7", code=1)
    assert line.json("ps")["tasks"][0]["phase"] in ("running", "healing")
    line("undrain", "n1")
    eventually(lambda: line.json("ps")["tasks"][0]["slots"] == 2, 20)
    assert [each for each in line.json("incidents")["incidents"] if each["severity"] != "INFO"] == []


def test_wrong_use(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("suspend", "resume", "drain", "undrain"):
        line(verb, code=2)
    line("submit", "none.yaml", code=1)
    assert "did you mean weight?" in line("submit", line.file("a", more="wieght: 2\n"), code=1)
    for verb in VERBS:
        capsys.readouterr()
        main([verb, "--help"])
        assert f"Example: unicron {verb}" in " ".join(capsys.readouterr().out.split()), verb
