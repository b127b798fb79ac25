"""Whose lines are whose: an understudy's log folder is named after the role that it was built for."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.cli import main
from unicron.runtime import log_role
from unicron.training.roles import overruled
from unicron.types import Layout


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for incarnation, rank, line in ((0, 0, "of rank 0"), (0, 1, "before"), (2, 0, "of its heir")):
        folder = tmp_path / "all" / str(incarnation) / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(line + "\n")
        if incarnation == 2:
            monkeypatch.setenv(log_role.ERROR_FILE_SETTING, str(folder / "error.json"))
            log_role.say(3)
            log_role.say(1)
    return tmp_path


def lines(capsys: pytest.CaptureFixture[str], logs: Path, *words: str) -> list[str]:
    assert main(["logs", "--log-dir", str(logs), *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_an_heirs_lines_are_those_of_its_role(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, logs, "--rank", "1") == ["[all/0/1 stdout] before", "[all/2/1 stdout] of its heir"]
    assert lines(capsys, logs, "--rank", "0") == ["[all/0/0 stdout] of rank 0"]
    assert lines(capsys, logs / "all" / "2" / "0", "--rank", "1") == ["[1 stdout] of its heir"]


def test_without_a_log_folder_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(log_role.ERROR_FILE_SETTING, raising=False)
    log_role.say(1)
    monkeypatch.setenv(log_role.ERROR_FILE_SETTING, str(tmp_path / "gone" / "error.json"))
    log_role.say(1)
    assert not list(tmp_path.iterdir())


def test_what_join_says_and_the_task_does_not_is_told() -> None:
    layout = Layout(dp=2, micro_batch=1, num_micro_batches=8)
    same = {"tp": 1, "micro_batch": 1, "num_micro_batches": 8}
    assert not overruled(same, layout) and not overruled({**same, "num_micro_batches": 0}, layout)
    told = overruled({**same, "micro_batch": 2, "tp": 2}, layout)
    assert "join(tp=2, micro_batch=2)" in told and "--tp 2 --micro-batch 2" in told and "micro_batch 1" in told
