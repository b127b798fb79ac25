"""What a restart under torchrun cost, out of the commits that rank 0 wrote."""

from __future__ import annotations

import torchrun_restart

MS = 1_000_000


def commits(*, after_kill_ms: int) -> list[tuple[int, int]]:
    """100 ms each; rank 0 commits iteration 7 so long after the kill; it goes on from 5, 9 s later."""
    killed = 800
    first = [(i, (i + 1) * 100 * MS) for i in range(7)] + [(7, (killed + after_kill_ms) * MS)]
    return first + [(5 + n, (killed + 9_000 + n * 100) * MS) for n in range(9)]


def test_a_commit_after_the_kill_is_no_restart() -> None:
    """On a GPU the victim is ahead of rank 0: iteration 7 was missing, and KeyError ended the bench."""
    for late_ms in (-5, 5):
        found = torchrun_restart.restart_of(commits(after_kill_ms=late_ms), 800 * MS)
        assert (found.again, found.caught_up, found.usual) == (9_000.0, 9_300.0, 100.0)
        assert found.lost == 9_300.0 - late_ms - 100.0
