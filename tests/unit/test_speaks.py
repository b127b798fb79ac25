"""Who prints: the lowest rank of the present plan, for rank 0 may be nobody's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unicron.training import session as module
from unicron.training.session import Session
from unicron.training.unmanaged import UnmanagedSession

ROOT = Path(__file__).parents[2]


def _session(
    rank: int, *, of_loop: Any = None, heard: Any = None, waiting: bool = False, member: Any = None
) -> Session:
    session = Session.__new__(Session)
    welcome = SimpleNamespace(waiting=waiting, warm_up=False)
    link: Any = SimpleNamespace(welcome=welcome, plan=heard, member=lambda: member)
    session._link, session.rank = link, rank
    engine: Any = SimpleNamespace(machine=SimpleNamespace(plan=of_loop))
    session._engine = engine if of_loop is not None else None
    return session


def _plan(*ranks: int) -> Any:
    return SimpleNamespace(ranks=ranks)


def test_the_lowest_rank_that_is_left_speaks() -> None:
    assert [_session(rank, of_loop=_plan(0, 1, 2)).speaks for rank in (0, 1, 2)] == [True, False, False]
    assert [_session(rank, of_loop=_plan(2, 1)).speaks for rank in (1, 2)] == [True, False]


def test_the_plan_of_the_loop_counts_not_one_that_it_has_not_met() -> None:
    assert not _session(1, of_loop=_plan(0, 1), heard=_plan(1)).speaks


def test_before_the_loop_the_plan_that_was_heard_counts() -> None:
    assert _session(1, heard=_plan(1, 2)).speaks and _session(0).speaks and not _session(1).speaks


def test_who_waits_for_a_role_is_silent() -> None:
    assert not _session(0, heard=_plan(0, 1), waiting=True).speaks
    assert _session(0, heard=_plan(0, 1), waiting=True, member=object()).speaks


def test_a_run_that_only_warms_up_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Session, "rehearses", property(lambda self: True))
    assert not _session(0).speaks


@pytest.mark.parametrize("rank", [0, 1])
def test_without_unicron_rank_0_speaks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert UnmanagedSession(1, 1, 1, 0).speaks is (rank == 0)


@pytest.mark.parametrize("path", ["README.md", "examples/minimal.py", "docs/TRAINING.md"])
def test_what_newcomers_copy_asks_who_speaks(path: str) -> None:
    text = (ROOT / path).read_text()
    assert "if session.speaks" in text and "if session.rank == 0" not in text
