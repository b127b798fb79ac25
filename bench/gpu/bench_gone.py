"""A worker with a busy GPU is killed: when does each sign of its end come, and when does its GPU stop writing?

A kernel of the victim counts up in arena memory without end; a witness reads the counter through a mapping of its own.
Signs: the robust mutex (native supervisor), the end of a socket with a low and with a high descriptor number (files are
closed in the order of their numbers), the pidfd. An arena may be adopted when the counter stands still for good.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
import common
from gpu_roles import Line
from unicron import _core

HIGH_DESCRIPTOR = 900
WATCHED_S = 3.0
COUNT = r"""
extern "C" __global__ void count_for_ever(volatile unsigned long long* word) {
  while (true) { word[0] = word[0] + 1; __threadfence_system(); }
}
"""


def victim(fd: int, pulse_fd: int, high: int, gib: int) -> None:
    import cupy

    os.dup2(high, HIGH_DESCRIPTOR)
    os.close(high)
    line = Line(socket.socket(fileno=fd))
    page = _core.PulsePage(pulse_fd, 0)
    ours, _theirs = socket.socketpair()
    monitor = _core.WorkerMonitor(ours.detach(), page)
    arena = _core.GpuArena(0, 0, True)
    address = arena.allocate(gib << 30)
    cupy.cuda.runtime.memset(address, 0, 16)
    kernel = cupy.RawKernel(COUNT, "count_for_ever")
    line.send({"sizes": [size for _, _, size in arena.slabs()]}, arena.export_all())
    kernel((1,), (1,), (cupy.uint64(address),))
    line.send({"running": True})
    time.sleep(60)
    del monitor


def witness_reader(mapping: Any, device: int) -> Any:
    import cupy

    cupy.cuda.Device(device).use()
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(mapping.address, 8, mapping, device), 0)
    word = cupy.ndarray((1,), dtype=cupy.uint64, memptr=memory)
    return lambda: int(word.get()[0])


def one_run(device: int, gib: int) -> dict[str, float]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    high_ours, high_theirs = socket.socketpair()
    pulse_fd = _core.create_pulse_pages(1)
    supervisor = _core.Supervisor()
    page = _core.PulsePage(pulse_fd, 0)
    passed = [theirs.fileno(), pulse_fd, high_theirs.fileno()]
    command = [sys.executable, __file__, "--victim", *map(str, passed), str(gib)]
    process = subprocess.Popen(command, pass_fds=passed)
    theirs.close()
    high_theirs.close()
    supervisor.watch(page, 0)
    line = Line(ours)
    told, fds = line.receive(90)
    read = witness_reader(_core.GpuMapping(fds[0], told["sizes"][0], device), device)
    line.receive(60)
    time.sleep(0.5)
    if read() == read():
        time.sleep(0.2)
    pidfd = os.pidfd_open(process.pid)
    signs = {supervisor.fileno(): "robust mutex", ours.fileno(): "low descriptor",
             high_ours.fileno(): "high descriptor", pidfd: "pidfd"}  # fmt: skip
    seen: dict[str, float] = {}
    killed = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    value, changed = 0, killed
    while time.monotonic() - killed < WATCHED_S:
        for fd in select.select([fd for fd, name in signs.items() if name not in seen], [], [], 0)[0]:
            seen[signs[fd]] = (time.monotonic() - killed) * 1000
        now = read()
        if now != value:
            value, changed = now, time.monotonic()
    seen["last write seen"] = (changed - killed) * 1000
    process.wait(30)
    supervisor.close()
    for fd in (*fds, pidfd, pulse_fd):
        os.close(fd)
    ours.close()
    high_ours.close()
    return seen


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--gib", type=int, nargs="*", default=[1, 32], help="the victim's GPU memory")
    parser.add_argument("--victim", type=int, nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.victim:
        victim(*options.victim)
        return
    device = 1 if _core.num_cuda_devices() > 1 else 0  # the witness's: no time slices shared with the victim
    bench = common.Bench("the end of a worker with a busy GPU", unit="ms", configuration={"witness_gpu": device})
    for gib in options.gib:
        runs = [one_run(device, gib) for _ in range(options.runs)]
        for name in ("robust mutex", "low descriptor", "high descriptor", "last write seen", "pidfd"):
            bench.add(f"{gib} GiB: {name}", [run.get(name, WATCHED_S * 1000) for run in runs])
    bench.finish(options)


if __name__ == "__main__":
    main()
