"""The conversations of *.txt, word for word. `UNICRON_REWRITE=1 pytest tests/transcripts` writes the answers anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transcripts import run_file

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_transcript(path: Path) -> None:
    said, now = run_file(path, rewrite=os.environ.get("UNICRON_REWRITE") == "1")
    if os.environ.get("UNICRON_REWRITE") != "1":
        assert now == said


def test_there_are_some() -> None:
    assert len(FILES) >= 10
