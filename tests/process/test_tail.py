"""What a script does behind its `with unicron.join()`: it is still its script, and a failure of it one of the task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from servers import ROOT
from unicron.demo.watch import failures

pytestmark = pytest.mark.timeout(120)

#: As the example, but for a moment only; then this, at the end of main().
SMALLER = {"ITERATIONS, SEQ_LENGTH = 200, 64": "ITERATIONS, SEQ_LENGTH = 6, 64", "num_layers=4": "num_layers=1"}
ONCE = """
    from pathlib import Path
    mark = Path("exported")
    if session.speaks and not mark.exists():
        mark.write_text("half")
        {how}
    if session.speaks:
        mark.write_text("whole")
"""
ALWAYS = """
    if session.speaks:
        raise RuntimeError("the disk of the export is full")
"""


def run(place: Path, tail: str) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    text = (ROOT / "examples" / "minimal.py").read_text()
    for old, new in SMALLER.items():
        assert old in text
        text = text.replace(old, new)
    head, mark, rest = text.rpartition("\n\nif __name__")
    (place / "script.py").write_text(head.rstrip() + "\n" + tail + mark + rest)
    command = [sys.executable, "-m", "unicron.cli", "run", "--agents", "2", "--json", "script.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=100)
    return ended, json.loads(ended.stdout)


@pytest.mark.parametrize("how", ["import os; os.kill(os.getpid(), 9)", "sys.exit(7)"])
def test_a_tail_that_fails_once_is_done_again(tmp_path: Path, how: str) -> None:
    ended, result = run(tmp_path, ONCE.format(how=f"import sys; {how}"))
    assert (ended.returncode, result["outcome"]) == (0, "done"), ended.stderr
    incidents = failures(result["incidents"])
    assert isinstance(incidents, list) and [i["outcome"] for i in incidents] == ["healed"], ended.stderr
    assert (tmp_path / "exported").read_text() == "whole"


def test_a_tail_that_always_fails_is_no_success(tmp_path: Path) -> None:
    ended, result = run(tmp_path, ALWAYS)
    assert ended.returncode == 1 and result["outcome"] == "stopped", ended.stderr
    assert "the disk of the export is full" in str(result["cause"])
