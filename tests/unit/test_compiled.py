"""Machine code that is kept on disk: not older than what it calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CALLED = "from unicron.performance.compiled import compiled\n@compiled\ndef called(x):\n    return x + {}\n"
CALLER = (
    "from called import called\nfrom unicron.performance.compiled import compiled\n"
    "@compiled\ndef caller(x):\n    return called(x)\n"
)
RUN = (
    "import sys; import unicron.performance.compiled as c; c.STAMP = sys.argv[1]; import caller;"
    "print(caller.caller(1.0), sum(caller.caller._cache_hits.values()))"
)


@pytest.mark.timeout(120)
def test_a_change_of_another_file_is_seen(tmp_path: Path) -> None:
    """numba looks at the caller's file alone: after an update of the sources a search went on with the old model."""

    def run(stamp: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-c", RUN, stamp]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.split()

    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "called.py").write_text(CALLED.format("1.0"))
    assert run("one") == ["2.0", "0"] and run("one") == ["2.0", "1"]  # the second time it is read from disk
    (tmp_path / "called.py").write_text(CALLED.format("20.0"))
    assert run("two") == ["21.0", "0"]
