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


def find_journal(place: Path) -> Path:
    """The journal itself, or the newest below a run's log folder."""
    if place.is_file():
        return place
    found = [*place.glob(NAME), *place.glob(f".unicron*/{NAME}")]
    if not found:
        raise FileProblem(f"no {NAME} in {place} or its .unicron: give the --log-dir of a run that is over")
    return max(found, key=lambda path: path.stat().st_mtime)


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
