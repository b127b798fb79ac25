"""Milliseconds from SIGKILL until each sign of a worker's death, by the worker's size.

`supervisor` is the robust mutex seen by the agent's native thread (its own clock reading); `agent's loop` is when
Python wakes from poll(); `owner gone` is when nothing of the worker can write any more, so that its arena may be
adopted; `connection ended` and `reaped` are what a launcher without the mutex has.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import time

import common
from unicron import _core

WAIT_S_MAX = 30.0

WORKER = """
import mmap, sys, time
from unicron import _core
pages_fd, control_fd, mebibytes = map(int, sys.argv[1:])
monitor = _core.WorkerMonitor(control_fd, _core.PulsePage(pages_fd, 0))
memory = mmap.mmap(-1, max(mebibytes, 1) << 20)
for at in range(0, len(memory), mmap.PAGESIZE):
    memory[at] = 1
monitor.send(b"ready", 10_000)
time.sleep(600)
"""


def readable(fd: int, what: str) -> int:
    """Waits, and returns the time."""
    if not select.select([fd], [], [], WAIT_S_MAX)[0]:
        raise SystemExit(f"no {what} within {WAIT_S_MAX} s")
    return time.monotonic_ns()


def one_death(pages_fd: int, mebibytes: int) -> dict[str, float]:
    page = _core.PulsePage(pages_fd, 0)
    page.reset()
    supervisor = _core.Supervisor()
    supervisor.watch(page, 0)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", WORKER, str(pages_fd), str(theirs.fileno()), str(mebibytes)]
    with subprocess.Popen(command, pass_fds=(pages_fd, theirs.fileno())) as worker, ours:
        theirs.close()
        readable(ours.fileno(), "worker")
        ours.recv(64)
        pidfd = os.pidfd_open(worker.pid)
        killed_ns = time.monotonic_ns()
        os.kill(worker.pid, signal.SIGKILL)
        loop_ns = readable(supervisor.fileno(), "death")
        ((_, supervisor_ns),) = supervisor.take_deaths()
        _core.wait_owner_gone(worker.pid, int(WAIT_S_MAX * 1000))
        gone_ns = time.monotonic_ns()
        connection_ns = readable(ours.fileno(), "end of the connection")
        readable(pidfd, "exit")
        worker.wait()
        reaped_ns = time.monotonic_ns()
        os.close(pidfd)
    supervisor.close()
    times_ns = {
        "supervisor": supervisor_ns,
        "agent's loop": loop_ns,
        "owner gone": gone_ns,
        "connection ended": connection_ns,
        "reaped": reaped_ns,
    }
    return {sign: (at_ns - killed_ns) / 1e6 for sign, at_ns in times_ns.items()}


def main() -> None:
    parser = common.parser("Milliseconds from SIGKILL until each sign of a worker's death.", runs=7)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[0, 256, 1024], help="sizes of the worker")
    arguments = parser.parse_args()
    has_waitv = os.environ.get("UNICRON_NO_FUTEX_WAITV") != "1"
    configuration = {"waits by": "futex_waitv" if has_waitv else "a thread per worker", "order": "sizes in turn"}
    bench = common.Bench("a worker's death", "ms", configuration=configuration)
    pages_fd = _core.create_pulse_pages(1)
    deaths: dict[int, list[dict[str, float]]] = {size: [] for size in arguments.mebibytes}
    for _ in range(arguments.runs):
        for size, found in deaths.items():
            found.append(one_death(pages_fd, size))
    for size, found in deaths.items():
        for sign in found[0]:
            samples = [death[sign] for death in found]
            reaped = [death["reaped"] for death in found]
            bench.add(
                f"{size} MiB: {sign}", samples, **{"x reaped": statistics.median(samples) / statistics.median(reaped)}
            )
    bench.finish(arguments)


if __name__ == "__main__":
    main()
