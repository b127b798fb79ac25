"""Runs checks in a process of their own, each within its limit: a driver that hangs costs the answer, not the asker.

``python -m unicron.runtime.checks.supervise`` prints one JSON list of results (what an agent starts and reads); with
``--child`` it is the process that looks, and says a line before and after each check. A child that overruns is killed,
its check is unknown, and a new child goes on with the rest. A check that finds something bad looks again as often as it
says, and is bad only if it was bad each time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from unicron.runtime.checks.check import ADDRESSES, Answer, Check, Look, Result, known_checks, unknown
from unicron.runtime.files import write_atomically

PR_SET_PDEATHSIG = 1
NICE = 10
START_S_MAX = 60.0  # of a child's imports
MEMORY = "checks.json"  # counters of the run before
TEXT_CHARS_MAX = 500


class _Begun(msgspec.Struct, frozen=True, tag="begun"):
    check: str


class _Ended(msgspec.Struct, frozen=True, tag="ended"):
    result: Result


_decoder: msgspec.json.Decoder[_Begun | _Ended] = msgspec.json.Decoder(_Begun | _Ended)


def look_with(check: Check, look: Look) -> Result:
    """Bad only if it is bad as often in a row as the check says. Whatever a check raises is no evidence."""
    begun = time.monotonic()
    reading = unknown("")
    for attempt in range(check.tries):
        if attempt:
            time.sleep(check.pause_s)
        try:
            reading = check.run(look)
        except Exception as error:
            reading = unknown(f"{type(error).__name__}: {error}")
        if reading.answer is not Answer.BAD:
            if attempt:
                reading = unknown(f"bad once, and then not: {reading.reason}")
            break
    took_ms = (time.monotonic() - begun) * 1000
    return Result(check.name, reading.answer, reading.reason[:TEXT_CHARS_MAX], round(took_ms, 1))


def run_checks(
    folder: Path, *, is_idle: bool, only: Sequence[str] = (), checks: dict[str, Check] | None = None,
    child: Sequence[str] = (sys.executable, "-m", "unicron.runtime.checks.supervise"),
) -> list[Result]:  # fmt: skip
    """Of this machine. is_idle: no worker is on it. Names that are not known are unknown results, not errors."""
    known = checks if checks is not None else known_checks()
    wanted = list(only) or list(known)
    results = [Result(n, Answer.UNKNOWN, "no such check is installed here") for n in wanted if n not in known]
    left = []
    for name in (n for n in wanted if n in known):
        if known[name].disturbs and not is_idle:
            results.append(Result(name, Answer.UNKNOWN, "not while workers run here"))
        else:
            left.append(name)
    while left:
        done = _run_child([*child, "--child", "--folder", str(folder), "--only", ",".join(left)], known, left)
        results += done
        names = {result.check for result in done}
        left = [name for name in left if name not in names]
    order = {name: index for index, name in enumerate(wanted)}
    return sorted(results, key=lambda result: order[result.check])


def _run_child(command: Sequence[str], known: dict[str, Check], names: Sequence[str]) -> list[Result]:
    """What it answered; at least one result, so that the caller's loop ends."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=environment)
    results: list[Result] = []
    current, deadline = names[0], time.monotonic() + START_S_MAX
    assert process.stdout is not None
    pending = b""
    why = ""
    try:
        while len(results) < len(names):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
                why = f"no answer in {known[current].limit_s:g} s"
                break
            data = os.read(process.stdout.fileno(), 65536)
            if not data:
                why = "its process ended in the middle of it"
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                message = _decoder.decode(line)
                if isinstance(message, _Ended):
                    results.append(message.result)
                    continue
                current = message.check
                check = known[current]
                deadline = time.monotonic() + check.limit_s * check.tries + check.pause_s * (check.tries - 1)
    finally:
        process.kill()
        process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, where no signal reaches it
            process.wait(2.0)
    if why:
        results.append(Result(current, Answer.UNKNOWN, why))
    return results


def _be_child(folder: Path, names: Sequence[str]) -> None:
    known = known_checks()
    memory = folder / MEMORY
    look = Look(folder, addresses=tuple(os.environ.get(ADDRESSES, "").split()))
    with contextlib.suppress(OSError, msgspec.DecodeError):
        look.before = msgspec.json.decode(memory.read_bytes(), type=dict[str, dict[str, int]])
    for name in names:
        print(msgspec.json.encode(_Begun(name)).decode(), flush=True)
        result = look_with(known[name], look)
        # Before the result is told: after the last one we may be ended.
        with contextlib.suppress(OSError):
            write_atomically(memory, msgspec.json.encode({**look.before, **look.now}).decode())
        print(msgspec.json.encode(_Ended(result)).decode(), flush=True)


def verdict(results: Sequence[Result]) -> str:
    """Why the node is not fit; "" when nothing is bad."""
    return "; ".join(f"{r.check}: {r.reason}" for r in results if r.answer is Answer.BAD)


def _end_with_parent() -> None:
    """An agent that is killed leaves nothing behind, nor does a supervisor."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m unicron.runtime.checks.supervise")
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--only", default="", help="names, with commas between")
    parser.add_argument("--idle", action="store_true", help="no worker is on this machine")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--nice", action="store_true", help="workers come first")
    arguments = parser.parse_args()
    if arguments.child or arguments.nice:
        _end_with_parent()
    if arguments.nice:
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), NICE))  # its agent is above all
    names = [name for name in arguments.only.split(",") if name]
    if arguments.child:
        _be_child(arguments.folder, names)
        return 0
    results = run_checks(arguments.folder, is_idle=arguments.idle, only=names)
    sys.stdout.write(msgspec.json.encode(results).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
