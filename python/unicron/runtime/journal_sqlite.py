"""The coordinator's journal in SQLite: WAL, synchronous FULL, one transaction for the decisions of
one step.

What ``append`` returned from is on the disk. A database locked by another coordinator, a full disk
and a disk that fails are three errors that say what to do; after any of them nothing more may be
decided, and what was appended before is whole. Opaque bytes go in and come out in order: the codec
is the machine's (coordinator/journal.py).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from unicron.runtime.journal_problem import JournalBroken, JournalFull, JournalLocked, JournalProblem

LOCK_WAIT_S = 2.0  # a predecessor that is just dying still holds its lock for a moment
SCHEMA_VERSION = 1
ENTRY_BYTES_MAX = 8 << 20


class SqliteJournal:
    def __init__(self, path: Path, *, lock_wait_s: float = LOCK_WAIT_S, pages_max: int = 0) -> None:
        """pages_max: bound on the file's size, in pages (0: the disk's)."""
        self.path = path
        with self._named():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=lock_wait_s, isolation_level=None)
        try:
            with self._named():
                self._prepare(pages_max)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, pages_max: int) -> None:
        run = self._connection.execute
        # one coordinator at a time; the kernel frees it at our death
        run("PRAGMA locking_mode=EXCLUSIVE")  # one coordinator; freed when it dies
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        if pages_max:
            run(f"PRAGMA max_page_count={int(pages_max)}")
        run("BEGIN IMMEDIATE")
        (version,) = run("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise JournalBroken(
                f"{self.path} is a journal of version {version}, this one reads {SCHEMA_VERSION}:"
                " use the unicron that wrote it"
            )
        run("CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY, entry BLOB NOT NULL)")
        run(f"PRAGMA user_version={SCHEMA_VERSION}")
        run("COMMIT")

    def entries(self) -> Iterator[bytes]:
        with self._named():
            for (entry,) in self._connection.execute("SELECT entry FROM entries ORDER BY number"):
                yield entry

    def append(self, entries: Sequence[bytes]) -> None:
        """All of them, on the disk, or JournalProblem and none of them."""
        if not entries:
            return
        for entry in entries:
            if len(entry) > ENTRY_BYTES_MAX:
                raise JournalBroken(f"entry of {len(entry)} bytes, limit {ENTRY_BYTES_MAX}")
        with self._named():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                self._connection.executemany("INSERT INTO entries (entry) VALUES (?)", [(entry,) for entry in entries])
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _problem(self.path, error) from None
        except OSError as error:
            raise JournalBroken(f"cannot use {self.path}: {error.strerror or error}") from None


def _problem(path: Path, error: sqlite3.Error) -> JournalProblem:
    code = getattr(error, "sqlite_errorcode", None) or 0
    primary = code & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalLocked(f"{path} is in use by another coordinator: stop it, or give this one its own journal")
    if primary == sqlite3.SQLITE_FULL:
        return JournalFull(
            f"no space for the journal {path}: free some and start the coordinator again; training goes on meanwhile"
        )
    return JournalBroken(f"the journal {path} cannot be used: {error}")
