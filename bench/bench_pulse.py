"""What the training loop pays for telling where it is: nanoseconds per call of the pulse page and the monitor.

Each number contains Python's own call; `empty method` is that cost alone.
"""

from __future__ import annotations

import socket
import timeit
from collections.abc import Callable

import common
from unicron import _core

CALLS = 200_000


class Empty:
    def method(self, stage: int, iteration: int, micro_batch: int) -> None:
        pass


def ns_per_call(call: Callable[[], object], runs: int) -> list[float]:
    timer = timeit.Timer(call)
    timer.timeit(CALLS // 10)  # warm
    return [timer.timeit(CALLS) / CALLS * 1e9 for _ in range(runs)]


def main() -> None:
    arguments = common.parser("What the training loop pays per fact it states.", runs=9).parse_args()
    bench = common.Bench("pulse page", "ns/call", "empty method", {"calls per run": CALLS})
    page = _core.PulsePage(_core.create_pulse_pages(1), 0)
    agent, worker = socket.socketpair()
    monitor = _core.WorkerMonitor(worker.detach(), page)
    empty = Empty()
    cases: dict[str, Callable[[], object]] = {
        "empty method": lambda: empty.method(2, 17, 3),
        "advance": lambda: page.advance(2, 17, 3),
        "set_waiting": lambda: page.set_waiting(True),
        "committed": lambda: page.committed(17, 3.25),
        "take_fault, nothing armed": lambda: page.take_fault(2, 17, 3),
        "newest_epoch": monitor.newest_epoch,
        "read one field (agent)": lambda: page.progress,
    }
    for case, call in cases.items():
        bench.add(case, ns_per_call(call, arguments.runs))
    page.arm_fault(1, 9, -1, -1)
    bench.add("take_fault, armed elsewhere", ns_per_call(lambda: page.take_fault(2, 17, 3), arguments.runs))
    bench.finish(arguments)
    monitor.close()
    agent.close()


if __name__ == "__main__":
    main()
