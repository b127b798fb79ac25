"""What is left of a run that is over can still be asked; a script that is not there is said at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from several import Cluster
from unicron.cli import main
from unicron.runtime.files import FileProblem
from unicron.runtime.job_file import load_job, refuse_missing_script
from unicron.runtime.journal_sqlite import SqliteJournal
from unicron.runtime.kept_journal import find_journal


def test_incidents_of_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster(nodes=2, slots=2)
    cluster.run("a", 4)
    cluster.lose("n1")
    folder = tmp_path / "logs" / ".unicron"
    folder.mkdir(parents=True)
    journal = SqliteJournal(folder / "journal.db")
    journal.append(cluster.journal)
    assert main(["incidents", "--log-dir", str(tmp_path / "logs"), "--json"]) == 0  # also while it is in use
    journal.close()
    found = json.loads(capsys.readouterr().out)["incidents"]
    assert found and found[0]["id"] == "i1" and found[0]["root"]["node"] == "n1" and found[0]["timeline"]
    assert main(["incidents", "i1", "--log-dir", str(folder / "journal.db")]) == 0
    assert "node lost" in capsys.readouterr().out
    assert main(["incidents", "i9", "--log-dir", str(folder)]) == 1
    assert "no incident 'i9'" in capsys.readouterr().err
    with pytest.raises(FileProblem, match=re.escape("no journal.db in")):
        find_journal(tmp_path / "other")


def test_a_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ncommand: [python, train.py]\nlayouts: [{tp: 1, pp: 1, dp: 1}]\n")
    assert main(["submit", str(path)]) == 1
    assert f"no train.py in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    refuse_missing_script(load_job(path))
    refuse_missing_script({**load_job(path), "cwd": "/only/the/nodes/have/it"})
