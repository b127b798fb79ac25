"""Tables of commands: in a narrow terminal fewer columns, and no name in them is cut."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from rich.text import Text

from several import Cluster
from unicron.cli import incidents, nodes, ps, top
from unicron.cli.common import print_table, sentences
from unicron.runtime.views import _throughput_from, cluster_view, incident_view, nodes_view, tasks_view

TASK = "gpt-small"


@pytest.fixture
def views() -> dict[str, Any]:
    cluster = Cluster(nodes=2, slots=2)
    cluster.run(TASK, 4)
    cluster.lose("n1")
    state = cluster.machine.state
    return {
        "cluster": cluster_view(state, 0.0),
        "tasks": tasks_view(state, 0.0),
        "nodes": nodes_view(state),
        "incidents": [incident_view(each, state, 0.0) for each in state.incidents.values()],
    }


def a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return Text.from_ansi(capsys.readouterr().out).plain.splitlines()  # without bold


@pytest.mark.parametrize(
    ("command", "of", "lacks"), [(ps, "tasks", "epoch"), (nodes, "nodes", "store"), (incidents, "incidents", "method")]
)
def test_a_narrow_terminal_gets_fewer_columns_and_whole_names(
    command: Any, of: str, lacks: str, views: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_terminal(monkeypatch, 80)
    rows = [command.row_of(row) for row in views[of]]
    fields = ("task", "phase", "outcome", "fault", "node")
    names = {row[field] for row in views[of] for field in fields if row.get(field)}
    print_table(rows, command.COLUMNS, "", narrow=command.NARROW)
    said = lines(capsys)
    assert list(command.NARROW) == said[0].split()
    assert "…" not in "".join(said) and all(name in " ".join(said) for name in names)
    assert max(map(len, said)) <= 80
    print_table(rows, command.COLUMNS, "", narrow=command.NARROW, wide=True)
    assert lacks in lines(capsys)[0]


def test_a_wide_terminal_and_a_pipe_get_all(
    views: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ps.row_of(row) for row in views["tasks"]]
    print_table(rows, ps.COLUMNS, "", narrow=ps.NARROW)
    piped = lines(capsys)[0]
    a_terminal(monkeypatch, 160)
    print_table(rows, ps.COLUMNS, "", narrow=ps.NARROW)
    assert lines(capsys)[0].split() == piped.split() == list(ps.COLUMNS)
    a_terminal(monkeypatch, 80)
    print_table([{**rows[0], "task": "t" * 90}], ps.COLUMNS, "", narrow=ps.NARROW)
    assert "t" * 90 in capsys.readouterr().out


def test_slots_that_are_not_what_was_decided(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], views: Any
) -> None:
    a_terminal(monkeypatch, 80)
    print_table([ps.row_of({**views["tasks"][0], "slots": 3, "target": 4})], ps.COLUMNS, "", narrow=ps.NARROW)
    assert "3/4" in capsys.readouterr().out


def test_top_looks_once_where_no_terminal_is(
    views: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, verb: str) -> Any:
            return views["tasks" if verb == "ps" else verb]

    views["nodes"][0]["drained"] = True
    monkeypatch.setattr("unicron.runtime.client.from_environment", lambda *_: Client())
    top.main()
    said = capsys.readouterr().out
    assert "\x1b" not in said and "slots in use" in said
    assert "yes" in said and "no" in said and "False" not in said


def test_a_decision_is_a_line_for_each_sentence() -> None:
    said = "16 slots for 3 tasks. a grows to 1.5 slots (from 2, +1.2 TFLOP/s). In all 3."
    assert sentences(said).splitlines() == [
        "16 slots for 3 tasks.", "  a grows to 1.5 slots (from 2, +1.2 TFLOP/s).", "  In all 3."
    ]  # fmt: skip


def test_what_is_assumed_is_called_so(views: Any) -> None:
    assert views["tasks"][0]["waf_from"] == "assumed"
    cluster = Cluster(nodes=1, slots=2)
    cluster.run("a", 2, measured=True, throughput={1: 1e12, 2: 1.9e12})
    task = cluster.machine.state.tasks["a"]
    assert [_throughput_from(task, width) for width in (1, 2)] == ["stated", "stated"]
    task.measured_s[2] = 1.0
    assert [_throughput_from(task, width) for width in (1, 2)] == ["stated", "measured"]
    assert top._task({**views["tasks"][0], "waf": 1e12})["waf"] == "1e+12 assumed"
    assert top._task({**views["tasks"][0], "waf": 1e12, "waf_from": "stated"})["waf"] == "1e+12"


def test_a_pipe_gets_a_line_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"task": "a", "why": "x" * 300, "slots": 1}, {"task": "bb", "why": "two\nlines", "slots": None}]
    print_table(rows, ("task", "slots", "why"), "")
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said] == [
        ["task", "slots", "why"],
        ["a", "1", "x" * 300],
        ["bb", "-", "two", "lines"],
    ]
    assert all(line == line.rstrip() for line in said) and said[1].index("1") == said[2].index("-")
