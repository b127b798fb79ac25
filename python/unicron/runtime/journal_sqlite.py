"""The coordinator's journal in SQLite: WAL, synchronous FULL, one transaction for the decisions of
one step.

What ``append`` returned from is on the disk. A database locked by another coordinator, a full disk
and a disk that fails are three errors that say what to do; after any of them nothing more may be
decided, and what was appended before is whole. Opaque bytes go in and come out in order: the codec
is the machine's (coordinator/journal.py).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from unicron.runtime.journal_problem import JournalBroken, JournalFull, JournalLocked, JournalProblem

LOCK_WAIT_S = 2.0  # a predecessor that is just dying still holds its lock for a moment
SCHEMA_VERSION = 1
ENTRY_BYTES_MAX = 8 << 20


class SqliteJournal:
    def __init__(
        self, path: Path, *, lock_wait_s: float = LOCK_WAIT_S, pages_max: int = 0, called: Path | None = None
    ) -> None:
        """pages_max: bound on the file's size, in pages (0: the disk's). called: its name for people, of a copy."""
        self.path = called or path
        with self._named():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._refuse_before_it_is_touched(path)
            self._connection = sqlite3.connect(path, timeout=lock_wait_s, isolation_level=None)
        try:
            with self._named():
                self._prepare(pages_max)
        except BaseException:
            self._connection.close()
            raise

    def _prepare(self, pages_max: int) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")  # one coordinator; freed when it dies
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        if pages_max:
            run(f"PRAGMA max_page_count={int(pages_max)}")
        run("BEGIN IMMEDIATE")
        self._refuse_what_is_none(self._connection)
        run("CREATE TABLE IF NOT EXISTS entries (number INTEGER PRIMARY KEY, entry BLOB NOT NULL)")
        run(f"PRAGMA user_version={SCHEMA_VERSION}")
        run("COMMIT")

    def _refuse_before_it_is_touched(self, path: Path) -> None:
        """Another program's database shall not even change its mode. A look without locks sees what is checkpointed,
        and proves nothing where it fails: the one under the lock follows."""
        with contextlib.suppress(sqlite3.Error):
            look = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
            with contextlib.closing(look):
                self._refuse_what_is_none(look)

    def _refuse_what_is_none(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        found = connection.execute(
            "SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite~_%' ESCAPE '~'"
        )
        tables = {name for (name,) in found}
        others = sorted(tables - {"entries"} if version else tables)  # ours gets its table and its version together
        if others and not (version > SCHEMA_VERSION and "entries" in tables):
            raise JournalBroken(
                f"{self.path} is a database of another program (it has the table {others[0]}): give the journal a path"
                " of its own"
            )
        if version not in (0, SCHEMA_VERSION):
            raise JournalBroken(
                f"{self.path} is a journal of version {version}, this one reads {SCHEMA_VERSION}:"
                " use the unicron that wrote it"
            )

    def entries(self) -> Iterator[bytes]:
        """In order. JournalBroken names the first that is missing, or is none."""
        with self._named():
            found = self._connection.execute("SELECT number, entry FROM entries ORDER BY number")
            for expected, (number, entry) in enumerate(found, 1):
                if number != expected:
                    raise JournalBroken(f"entry {expected} of {self.path} is missing: restore the copy of the journal")
                if not isinstance(entry, bytes):
                    kind = type(entry).__name__
                    raise JournalBroken(
                        f"entry {number} of {self.path} is damaged ({kind}, not bytes): restore the copy of the journal"
                    )
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
    if primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and (
        why := _unwritable(path)
    ):
        return JournalBroken(f"the journal {path} cannot be written: {why}")
    if primary == sqlite3.SQLITE_CORRUPT:
        return JournalBroken(f"the journal {path} is damaged ({error}): restore the copy of it")
    if primary == sqlite3.SQLITE_NOTADB:
        return JournalBroken(
            f"{path} is no journal ({error}): restore the copy of it, or give the journal another path"
        )
    return JournalBroken(f"the journal {path} cannot be used: {error}")


def _unwritable(path: Path) -> str:
    """What the disk's error is about, if it is that."""
    for place in (path.parent, path):
        if place.exists() and os.statvfs(place).f_flag & os.ST_RDONLY:
            return (
                f"{place} lies on a file system that is mounted read-only: mount it for writing, or give another path"
            )
        if place.exists() and not os.access(place, os.W_OK):
            return f"{place} is read-only for this user: give the user the right to write, or give another path"
    return ""
