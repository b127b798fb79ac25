"""The journal: in order, whole or not at all, and every problem says what to do."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

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
    with pytest.raises(JournalBroken, match="cannot be used"):
        SqliteJournal(path)
    with pytest.raises(JournalBroken, match="cannot use"):
        SqliteJournal(path / "below" / "a file")
    other = tmp_path / "other"
    with sqlite3.connect(other) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(JournalBroken, match="version 99"):
        SqliteJournal(other)
