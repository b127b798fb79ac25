"""What can be wrong with a journal, whatever holds it (journal_sqlite.py, journal_etcd.py)."""

from __future__ import annotations


class JournalProblem(Exception):
    """The journal cannot be used; the text says why and what to do. Nothing may be decided any
    more.
    """


class JournalLocked(JournalProblem):
    pass


class JournalFull(JournalProblem):
    pass


class JournalBroken(JournalProblem):
    pass


class LeadershipLost(JournalProblem):
    """Another coordinator may decide now: stop deciding, and wait."""
