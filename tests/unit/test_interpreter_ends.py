"""What is told of a script that has left its `with` block, until its interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import atexit, os, sys
from types import SimpleNamespace
from unicron import _core
from unicron.training.session import Session
from unicron.types import Stage

pulse = _core.PulsePage(_core.create_pulse_pages(1), 0)
session = object.__new__(Session)
session._link, session._next = SimpleNamespace(pulse=pulse), 3
session._tell = lambda error, thread: print("told", type(error).__name__, flush=True)
atexit.register(lambda: print("ends", Stage(pulse.stage).name, pulse.iteration, flush=True))
session._watch_tail()
child = os.fork()
if not child:
    sys.exit(0)
os.waitpid(child, 0)
raise ValueError("of the export")
"""


def test_the_end_of_a_forked_child_is_not_that_of_the_script() -> None:
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50)
    assert ended.stdout.splitlines() == ["ends EVALUATE 3", "told ValueError", "ends DONE 3"], ended.stderr
    assert ended.returncode == 1 and "ValueError: of the export" in ended.stderr
