"""A long run on several cores: chunks of seeds in processes of their own, each with a record that is then added up.

What crosses between the processes is the record's JSON, so a run that is ended loses at most the chunks under way.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from unicron.sim.record import Record

CHUNK = 100  # seeds: half a minute, beside a second of starting
LOOK_S = 0.2
END_S_MAX = 10.0


def chunks(seeds: list[int]) -> list[tuple[int, int]]:
    """(first, how many) of seeds in ascending order, none in it that is not among them."""
    found: list[tuple[int, int]] = []
    for seed in seeds:
        if found and seed == sum(found[-1]) and found[-1][1] < CHUNK:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((seed, 1))
    return found


def run_chunks(
    record: Record, seeds: list[int], jobs: int, extra: list[str], may_begin: Callable[[], bool],
    say: Callable[[int], None],
) -> None:  # fmt: skip
    """Adds everything to the record. extra: further arguments of the command; say: how many seeds are done.

    Raises RuntimeError where a process ended without a record: the simulator itself failed.
    """
    running: dict[Path, tuple[subprocess.Popen[bytes], int]] = {}
    waiting, done = chunks(seeds), 0
    with tempfile.TemporaryDirectory(prefix="unicron-sim-") as folder:
        try:
            while running or (waiting and may_begin()):
                while waiting and len(running) < jobs and may_begin():
                    first, count = waiting.pop(0)
                    path = Path(folder) / f"{first}.json"
                    running[path] = (_start(first, count, path, extra), count)
                for path in [path for path, (process, _) in running.items() if process.poll() is not None]:
                    count = running.pop(path)[1]
                    _add(record, path, count)
                    done += count
                    say(done)
                time.sleep(LOOK_S)
        finally:
            _end(running, folder)


def _end(running: dict[Path, tuple[subprocess.Popen[bytes], int]], folder: str) -> None:
    """Also the one that was just started when this process was told to end: nobody holds it yet."""
    held = {process.pid for process, _ in running.values()}
    for process, _ in running.values():
        process.kill()
        process.wait()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in held and any(word.startswith(folder) for word in child.cmdline()):
                child.kill()
                child.wait(END_S_MAX)


def _start(first: int, count: int, path: Path, extra: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unicron.sim", "--first", str(first), "--seeds", str(count)]
    command += ["--record", str(path), "--keep-going", *extra]
    with path.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log)


def _add(record: Record, path: Path, count: int) -> None:
    before = record.data["seeds"]
    if path.is_file():
        record.merge(path)
    if record.data["seeds"] != before + count:
        text = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace").replace("\r", "\n")
        raise RuntimeError(f"of {count} seeds from {path.stem} on not all were run:\n{text[-4000:]}")
