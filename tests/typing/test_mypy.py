"""A user's code type-checks against the stub, and misuse does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def mypy(path: Path) -> str:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(path)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=150).stdout


@pytest.mark.timeout(180)
def test_right_use_type_checks() -> None:
    assert mypy(HERE / "example.py") == ""


@pytest.mark.timeout(180)
def test_wrong_use_does_not() -> None:
    source = (HERE / "wrong.py").read_text().splitlines()
    expected = {number: line.rsplit("# ", 1)[1] for number, line in enumerate(source, 1) if "  # " in line}
    found = {
        int(line): code
        for line, code in re.findall(r"wrong\.py:(\d+): error: .*\[([a-z-]+)\]", mypy(HERE / "wrong.py"))
    }
    assert found == expected
