"""What is left of a run that is over can still be asked; a script that is not there is said at once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from several import Cluster
from unicron.cli import main
from unicron.messages import Reply, Request
from unicron.runtime.files import FileProblem
from unicron.runtime.job_file import doubt_of, load_job, refuse_missing_script
from unicron.runtime.journal_sqlite import SqliteJournal
from unicron.runtime.kept_journal import EARLIER_MAX, earlier, find_journal, keep_earlier
from unicron.runtime.requests import answer


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


def test_a_later_run_leaves_the_journals_of_those_before(tmp_path: Path) -> None:
    for number in range(1, EARLIER_MAX + 4):
        keep_earlier(tmp_path)
        (tmp_path / "journal.db").write_text(f"run {number}")
        (tmp_path / "journal.db-wal").write_text(f"its end {number}")
    kept = earlier(tmp_path)
    assert len(kept) == EARLIER_MAX and kept[-1].name == f"journal-{EARLIER_MAX + 2}.db"
    assert (
        kept[-1].read_text() == f"run {EARLIER_MAX + 2}" and find_journal(tmp_path).read_text() != kept[-1].read_text()
    )
    assert len(list(tmp_path.iterdir())) == 2 * (EARLIER_MAX + 1)


def test_a_program_that_this_machine_does_not_have_is_doubted(tmp_path: Path) -> None:
    job = {"command": ["pyhton", "train.py"], "cwd": str(tmp_path)}
    assert "no program pyhton is in this machine's PATH" in doubt_of(job)
    assert doubt_of({**job, "command": ["python", "x"]}) == doubt_of({**job, "command": ["/only/nodes/python"]}) == ""
    (tmp_path / "pyhton").touch(mode=0o755)
    assert doubt_of({**job, "env": {"PATH": str(tmp_path)}}) == ""


def test_two_tasks_do_not_save_into_one_folder() -> None:
    """Each removed what it took for its own old checkpoints; a suspended task's last one was among them."""
    cluster = Cluster(nodes=2, slots=2)
    cluster.run("a", 2)
    state = cluster.machine.state
    task = state.tasks["a"]
    task.job = msgspec.structs.replace(task.job, cwd="/work", checkpoint_dir="ckpt")
    for folder, refused in (("/work/x/../ckpt", True), ("other", False), ("", False)):
        job = msgspec.to_builtins(msgspec.structs.replace(task.job, name="b", checkpoint_dir=folder))
        told = answer(Request("submit", {"job": job}), "r1", state, {}, 0.0)
        assert isinstance(told, Reply) == refused
        if isinstance(told, Reply):
            assert "is that of a, which is" in told.error


def test_a_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: a\ncommand: [python, train.py]\nlayouts: [{tp: 1, pp: 1, dp: 1}]\n")
    assert main(["submit", str(path)]) == 1
    assert f"no train.py in {tmp_path}" in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    refuse_missing_script(load_job(path))
    refuse_missing_script({**load_job(path), "cwd": "/only/the/nodes/have/it"})
