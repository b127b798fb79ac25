"""What is left of a task that does not end: where its workers stand, and what they and the daemons said last."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITTEN_S = 2.0  # a worker writes its stacks in that time
LINES = 15  # of a log
STACK_LINES = 60  # of stderr, where faulthandler writes all threads
FILES_MAX = 12


def tell(cluster: Any, task: str, logs: Path) -> None:
    """Prints it. Workers write their stacks because they are aborted: call it when nothing is to be saved."""
    workers = _or_nothing(lambda: cluster.workers(task))
    incidents = _or_nothing(lambda: cluster.incidents(task))
    view = _or_nothing(lambda: [cluster.task(task)])
    print(f"\n--- {task} did not end: {view}\n--- incidents: {incidents}", flush=True)
    for worker in workers:
        print(f"--- rank {worker.rank} on {worker.node}, pid {worker.pid}, {_state(worker.pid)}")
        for number in (signal.SIGABRT, signal.SIGCONT):  # stopped, it writes nothing
            with contextlib.suppress(OSError):
                os.kill(worker.pid, number)
    time.sleep(WRITTEN_S)
    files = [path for path in logs.rglob("*") if path.is_file() and path.stat().st_size]
    daemons = [path for path in files if path.parent.name == "cluster"]
    own = [path for path in files if task in path.relative_to(logs).parts]
    for path in sorted(own, key=lambda path: path.stat().st_mtime)[-FILES_MAX:]:
        show(path, STACK_LINES if path.name == "stderr.log" else LINES)
    for path in daemons:
        show(path, LINES)
    sys.stdout.flush()


def show(path: Path, lines: int = LINES) -> None:
    text = path.read_text(encoding="utf-8", errors="replace").splitlines()
    print(f"--- {path}, the last {min(lines, len(text))} of {len(text)} lines")
    for line in text[-lines:]:
        print(f"    {line[:300]}")


def _or_nothing(ask: Callable[[], list[Any]]) -> list[Any]:
    """Asked twice: who was interrupted between a question and its answer gets that answer to the next question."""
    for is_last in (False, True):
        try:
            found = ask()
            if is_last:
                return found
        except Exception as error:
            if is_last:
                print(f"--- cannot be asked: {error}")
    return []


def _state(pid: int) -> str:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        kept = [line.replace("\t", " ") for line in lines if line.startswith(("State", "VmRSS", "Threads"))]
        return ", ".join(kept)
    return "gone"
