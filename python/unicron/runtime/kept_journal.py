"""What a journal says without a coordinator: of a `unicron run` that is over, or of a cluster that stands still."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

from unicron.coordinator.journal import Accounted, Entry, JournalUnreadable
from unicron.coordinator.replay import apply_entry, replay
from unicron.coordinator.state import State
from unicron.runtime.files import FileProblem
from unicron.runtime.journal_problem import JournalProblem
from unicron.runtime.journal_sqlite import SqliteJournal

NAME = "journal.db"
EARLIER_MAX = 20  # journals of runs before the last one in a log folder


def find_journal(place: Path) -> Path:
    """The journal itself, or the newest below a run's log folder."""
    if place.is_file():
        return place
    found = [*place.glob(NAME), *place.glob(f".unicron*/{NAME}")]
    if not found:
        raise FileProblem(f"no {NAME} in {place} or its .unicron: give the --log-dir of a run that is over")
    return max(found, key=lambda path: path.stat().st_mtime)


def keep_earlier(folder: Path) -> None:
    """A run's journal makes room for the next one's: journal-1.db, journal-2.db ..., the last ones (EARLIER_MAX)."""
    if not (folder / NAME).is_file():
        return
    known = earlier(folder)
    number = 1 + max((_number(path) for path in known), default=0)
    for path in folder.glob(f"{NAME}*"):
        with contextlib.suppress(OSError):
            path.rename(folder / path.name.replace(NAME, f"journal-{number}.db"))
    for path in known[: -(EARLIER_MAX - 1)]:
        for each in folder.glob(f"{path.name}*"):
            each.unlink(missing_ok=True)


def earlier(folder: Path) -> list[Path]:
    """Journals of runs before the last one, oldest first."""
    return sorted((path for path in folder.glob("journal-*.db") if _number(path)), key=_number)


def _number(path: Path) -> int:
    text = path.name.removeprefix("journal-").removesuffix(".db")
    return int(text) if text.isdecimal() else 0


def read_state(path: Path) -> tuple[State, float]:
    """(the state it makes, the last time in it). It is read as a copy: a coordinator that runs keeps its lock."""
    state, now_ms = State(), 0.0

    def apply(entry: Entry) -> None:
        nonlocal now_ms
        if isinstance(entry, Accounted):
            now_ms = max(now_ms, entry.at_ms)
        apply_entry(entry, state)

    with tempfile.TemporaryDirectory(prefix="unicron-read-") as folder:
        for each in path.parent.glob(f"{path.name}*"):
            shutil.copyfile(each, Path(folder) / each.name)  # without its mode: the copy is written
        try:
            with contextlib.closing(SqliteJournal(Path(folder) / path.name, called=path)) as journal:
                replay(journal.entries(), str(path), apply)
        except (JournalProblem, JournalUnreadable) as problem:
            raise FileProblem(str(problem)) from None
    told = [at_ms for incident in state.incidents.values() for at_ms, _ in incident.timeline]
    return state, max([now_ms, *told])
