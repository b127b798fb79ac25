"""A test's body in a process of its own, where torch.distributed and megatron's globals may be set up."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 100.0


def in_own_process(body: Callable[[], None]) -> None:
    """body: a function of a module. Raises AssertionError with its traceback."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    process = context.Process(target=_run, args=(body, results), daemon=True)
    process.start()
    process.join(TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"{body.__name__} did not end in {TIMEOUT_S:.0f} s")
    assert process.exitcode == 0, "" if results.empty() else results.get()


def _run(body: Callable[[], None], results: Any) -> None:
    try:
        import torch

        from unicron.training import megatron_cpu

        torch.set_num_threads(1)
        megatron_cpu.install()
        body()
    except BaseException:
        results.put(traceback.format_exc())
        raise
