"""The journal: in order, whole or not at all, and every problem says what to do."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron.cli import main
from unicron.coordinator import journal
from unicron.coordinator.config import CoordinatorConfig
from unicron.coordinator.journal import (
    JOURNAL_VERSION,
    JOURNAL_VERSION_MIN,
    NodeDeclaredLost,
    NodeJoined,
    TaskHeld,
    WorkersStarted,
    encode_entry,
)
from unicron.runtime import journal_sqlite, keys
from unicron.runtime.coordinator_process import EXIT_JOURNAL, CoordinatorProcess
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.ending import Ending
from unicron.runtime.files import FileProblem, convert
from unicron.runtime.journal_problem import JournalBroken, JournalFull, JournalLocked
from unicron.runtime.journal_sqlite import SqliteJournal

pytestmark = pytest.mark.timeout(30)


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.db"
    journal = SqliteJournal(path)
    journal.append([b"a", b"b"])
    journal.append([])
    journal.append([b"c"])
    journal.close()
    again = SqliteJournal(path)
    assert list(again.entries()) == [b"a", b"b", b"c"]
    again.close()


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    first = SqliteJournal(tmp_path / "j")
    with pytest.raises(JournalLocked, match="another coordinator"):
        SqliteJournal(tmp_path / "j", lock_wait_s=0.1)
    first.append([b"a"])
    first.close()
    SqliteJournal(tmp_path / "j").close()


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "j", pages_max=10)
    with pytest.raises(JournalFull, match="free some"):
        for number in range(100):
            journal.append([b"%d" % number, b"x" * 4000])
            written = number
    kept = list(journal.entries())
    assert kept[::2] == [b"%d" % n for n in range(written + 1)]
    assert len(kept) == 2 * (written + 1)
    journal.close()


def test_not_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(JournalBroken, match="is no journal"):
        SqliteJournal(path)
    with pytest.raises(JournalBroken, match="cannot use"):
        SqliteJournal(path / "below" / "a file")
    other = tmp_path / "other"
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(JournalBroken, match="version 99"):
        SqliteJournal(other)


NEWER, DAMAGED = "was written by a newer unicron", "is damaged"
JOINED = encode_entry(NodeJoined("n1", 1, 2, 0, "tcp://127.0.0.1:1", "key"))
UNREADABLE: dict[str, tuple[Any, str]] = {
    "a newer version": (bytes((JOURNAL_VERSION + 1,)) + JOINED[1:], NEWER),
    "an unknown field": (JOINED[:1] + msgspec.msgpack.encode({"entry": "TermBegan", "term": 1, "colour": 2}), NEWER),
    "an unknown kind": (JOINED[:1] + msgspec.msgpack.encode({"entry": "Painted"}), NEWER),
    "an older version": (bytes((JOURNAL_VERSION_MIN - 1,)) + JOINED[1:], "was written by an older unicron"),
    "truncated": (JOINED[:-3], DAMAGED),
    "empty": (b"", DAMAGED),
    "text": ("hello", DAMAGED),
    "a number": (7, DAMAGED),
    "a node that nobody knows": (encode_entry(NodeDeclaredLost("n7", 1, "")), DAMAGED),
    "a task that nobody knows": (encode_entry(TaskHeld("t9", True, "")), DAMAGED),
    "workers of no task": (encode_entry(WorkersStarted("t9", "n1", (), 0)), DAMAGED),
}


def kept(path: Path, *entries: Any) -> Path:
    SqliteJournal(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.executemany("INSERT INTO entries (entry) VALUES (?)", [(entry,) for entry in entries])
    return path


def coordinator(path: Path, capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[int, str]:
    """(exit code, what it said at last) of one that ends in its beginning, in this process."""
    folder = path.parent / "keys"
    if not folder.exists():
        keys.make_directory(folder)
    given = CoordinatorSettings(listen="127.0.0.1:0", keys=str(folder), journal=str(path), metrics="", **settings)
    ending = Ending()
    try:
        code = CoordinatorProcess(given, SqliteJournal(path), ending).run()
    finally:
        ending.close()
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("entry", "what"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_entry_that_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: Any, what: str
) -> None:
    """By the coordinator, which ends with 74, and by those who read what is kept."""
    path = kept(tmp_path / "journal.db", JOINED, entry)
    code, said = coordinator(path, capsys)
    assert code == EXIT_JOURNAL and f"entry 2 of {path} {what}" in said, said
    assert "restore the copy" in said or "use " in said
    assert main(["incidents", "--log-dir", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"entry 2 of {path} {what}" in said and "unicron-read-" not in said and len(said.splitlines()) == 1


def test_an_entry_that_is_missing_is_named(tmp_path: Path) -> None:
    path = kept(tmp_path / "journal.db", *[JOINED] * 5)
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM entries WHERE number = 3")
    with contextlib.closing(SqliteJournal(path)) as holed:
        with pytest.raises(JournalBroken, match=rf"entry 3 of {path} is missing: restore"):
            list(holed.entries())


def test_entries_that_contradict_the_configuration_or_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = encode_entry(NodeJoined("n2", 1, 2, 0, "tcp://127.0.0.1:1", "key"))
    path = kept(tmp_path / "journal.db", JOINED, other)
    code, said = coordinator(path, capsys, machine=CoordinatorConfig(nodes_max=1))
    assert (
        code == EXIT_JOURNAL and str(path) in said and "2 nodes, machine.nodes_max is 1" in said and "restore" in said
    )


def test_later_versions_read_earlier_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "JOURNAL_VERSION", JOURNAL_VERSION + 1)
    assert journal.decode_entry(JOINED) == NodeJoined("n1", 1, 2, 0, "tcp://127.0.0.1:1", "key")


@pytest.mark.parametrize("version", [0, 1, 5])
@pytest.mark.parametrize("mode", ["DELETE", "WAL"])
def test_another_programs_database_stays_as_it_is(tmp_path: Path, version: int, mode: str) -> None:
    path = tmp_path / "theirs.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode={mode}")
        connection.execute("CREATE TABLE foo (x)")
        connection.execute(f"PRAGMA user_version={version}")
    before = path.read_bytes()
    with pytest.raises(JournalBroken, match=r"another program .it has the table foo.: give the journal a path"):
        SqliteJournal(path)
    assert path.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["theirs.db"]


def test_a_table_of_the_same_name_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "diary.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE entries (day, words)")
    with pytest.raises(JournalBroken, match="another program"):
        SqliteJournal(path)


def test_a_journal_that_is_damaged_says_so(tmp_path: Path) -> None:
    path = kept(tmp_path / "journal.db", *[JOINED * 100] * 50)
    data = bytearray(path.read_bytes())
    data[4096 : 3 * 4096] = b"\xff" * 2 * 4096
    path.write_bytes(data)
    with pytest.raises(JournalBroken, match=rf"{path} is damaged .*: restore the copy"):
        with contextlib.closing(SqliteJournal(path)) as broken:
            list(broken.entries())


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    assert "disk I/O error" in str(journal_sqlite._problem(tmp_path / "j", error))
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert f"{tmp_path} is read-only for this user" in str(journal_sqlite._problem(tmp_path / "j", error))


def test_bounds_of_the_machine_that_no_coordinator_could_keep() -> None:
    CoordinatorConfig(understudy_delay_ms=0.0)
    bounds = {n: v for n, v in msgspec.structs.asdict(CoordinatorConfig()).items() if not isinstance(v, str)}
    for name, bound in bounds.items():
        for wrong in (-1, float("nan"), float("inf")) if isinstance(bound, float) else (-1,):
            with pytest.raises(FileProblem, match=rf"{name} is .*: give a number"):
                convert({"machine": {name: wrong}}, CoordinatorSettings)
    with pytest.raises(FileProblem, match="nodes_max is 0: give a number above 0"):
        convert({"machine": {"nodes_max": 0}}, CoordinatorSettings)
