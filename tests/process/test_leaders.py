"""Several coordinators on etcd, and a journal that moves there: one round of every fault; more with `make leaders`."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from clusters import eventually
from etcd_members import EtcdMembers
from leader_rounds import FAULTS, Rounds, faults_of
from servers import program
from unicron.cli import main
from unicron.runtime import keys, processes
from unicron.runtime.client import CoordinatorClient, CoordinatorSilent
from unicron.runtime.coordinator_daemon import new_client
from unicron.runtime.coordinator_process import EXIT_FOLLOWED, CoordinatorProcess
from unicron.runtime.coordinator_settings import CoordinatorSettings, EtcdSettings
from unicron.runtime.ending import Ending
from unicron.runtime.files import FileProblem, convert
from unicron.runtime.journal_problem import LeadershipLost
from unicron.runtime.journal_sqlite import SqliteJournal

SEED = 1


@pytest.mark.timeout(180)
def test_a_leader_that_is_lost_in_any_way_has_a_successor(tmp_path: Path) -> None:
    program("etcd")
    rounds = Rounds(SEED, tmp_path)
    try:
        rounds.run(faults_of(SEED, len(FAULTS)))
    finally:
        left = rounds.close()
    assert left == [] and processes.find(rounds.cluster.directory) == []


def daemon(settings: CoordinatorSettings, folder: Path) -> subprocess.CompletedProcess[str]:
    """A coordinator that is expected to end by itself."""
    config = folder / "c.json"
    config.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "unicron.runtime.coordinator_daemon", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.timeout(150)
def test_a_journal_moves_from_sqlite_to_etcd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, config = tmp_path / "journal.db", tmp_path / "c.yaml"
    journal = SqliteJournal(path)
    journal.append([b"\x02\x81", b"b"])
    keys.make_directory(tmp_path / "keys")
    copy = ["coordinator", str(config), "--copy-from", str(path)]
    with EtcdMembers(tmp_path, 1) as etcd:
        settings = CoordinatorSettings(
            listen="127.0.0.1:0", keys=str(tmp_path / "keys"), journal=str(path), metrics="", etcd=etcd.settings()
        )
        config.write_bytes(msgspec.yaml.encode(settings))
        assert main(copy) == 1 and "in use by another coordinator" in capsys.readouterr().err
        journal.close()
        forgets = daemon(settings, tmp_path)  # it would begin with nothing
        assert forgets.returncode == 74 and f"--copy-from {path}" in forgets.stderr
        assert main(copy) == 0 and "copied 2 entries" in capsys.readouterr().out
        assert main(copy) == 1 and "already" in capsys.readouterr().err
        begins = daemon(settings, tmp_path)  # it reads them: these two are no entries of this version
        assert begins.returncode == 74 and "truncated" in begins.stderr and "--copy-from" not in begins.stderr


class LostTerm:
    """A right to decide that ends when the test says so."""

    offset_ms = 0.0
    is_lost = False

    def require(self) -> None:
        if self.is_lost:
            raise LeadershipLost("it was frozen")


def test_who_may_not_decide_answers_nobody(tmp_path: Path) -> None:
    """Before it reads anything more: even a look at its state would be an old one."""
    pairs = keys.make_directory(tmp_path / "keys")
    settings = CoordinatorSettings(listen="127.0.0.1:0", keys=str(tmp_path / "keys"), metrics="")
    ending, term = Ending(), LostTerm()
    made: list[CoordinatorProcess] = []
    codes: list[int] = []

    def life() -> None:
        made.append(CoordinatorProcess(settings, SqliteJournal(tmp_path / "j"), ending, term))
        codes.append(made[0].run())

    thread = threading.Thread(target=life)
    thread.start()
    eventually(lambda: made)
    with CoordinatorClient(made[0].endpoint, pairs["coordinator"].public, pairs["client"]) as client:
        assert client.ask("ping")["term"] == 1
        term.is_lost = True
        with pytest.raises(CoordinatorSilent):
            client.ask("ping", timeout_ms=2000)
    thread.join(10)
    ending.close()
    assert codes == [EXIT_FOLLOWED]


def test_etcd_that_cannot_be_is_named() -> None:
    for etcd, said in (
        ({"endpoints": []}, "etcd.endpoints is empty"),
        ({"endpoints": ["nowhere"]}, "'nowhere' is not host:port"),
        ({"endpoints": ["127.0.0.1:1"], "lease_s": 1}, "must be 2 at least"),
        ({"endpoint": ["a"]}, "did you mean endpoints?"),
    ):
        with pytest.raises(FileProblem, match=re.escape(said)):
            new_client(convert(etcd, EtcdSettings))
    assert CoordinatorSettings().etcd is None
