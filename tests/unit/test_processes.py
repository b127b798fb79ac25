"""Who is ended when a template is gone: what its own workers started, and nobody else's, whatever their names."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from unicron.runtime import processes

SLEEPS = "import time; print(flush=True); time.sleep(60)"
#: As a worker has it: the title of a fork, the environment that the template was executed with.
TITLED = """
import sys, time
from unicron.runtime.child import set_title
set_title("unicron worker n0.w1: train.py")
print(flush=True)
time.sleep(60)
"""


class Started:
    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def __call__(self, program: str, **environment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE)
        self.all.append(process)
        assert process.stdout is not None and process.stdout.readline()  # it has its environment and title
        return process


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    for process in started.all:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def ends(process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 5
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.poll() is not None


def test_workers_of_the_same_name_in_another_cluster_live_on(start: Started) -> None:
    """Two runs on one machine both have n0.w1; the end of one killed the other's."""
    ours, theirs = Path("/tmp/ours/template.sock"), "/tmp/theirs/template.sock"
    mark = processes.TEMPLATE_MARK
    executed = start(SLEEPS, UNICRON_WORKER="n0.w1", **{mark: str(ours)})
    forked = start(TITLED, **{mark: str(ours)})
    others = [
        start(SLEEPS, UNICRON_WORKER="n0.w1", **{mark: theirs}),
        start(TITLED, **{mark: theirs}),
        start(SLEEPS, UNICRON_WORKER="n0.w1"),  # whose it is nobody can say
        start(SLEEPS, UNICRON_WORKER="n0.w2", **{mark: str(ours)}),
    ]
    ended = processes.end_of_workers(["n0.w1"], ours)
    assert sorted(ended) == sorted([executed.pid, forked.pid])
    assert ends(executed) and ends(forked)
    assert [other.poll() for other in others] == [None] * 4
