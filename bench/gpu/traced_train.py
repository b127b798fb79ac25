"""The demo's training script with some of its iterations traced by torch's profiler; for bench_idle.py.

TRACE_INTO: folder for trace_RANK.json; TRACE_FIRST, TRACE_COUNT: which iterations. All else as unicron.demo.train.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

from torch import profiler

from unicron.training.session import Session
from unicron.training.unmanaged import UnmanagedSession

FIRST, COUNT = int(os.environ["TRACE_FIRST"]), int(os.environ["TRACE_COUNT"])


def trace(kind: Any) -> None:
    """Its train_step starts the profiler before iteration FIRST, and ends it behind the last."""
    if hasattr(kind, "traced"):  # the script runs again in this process
        return
    kind.traced = True
    step, under_way = kind.train_step, []

    def traced(self: Any, iteration: int, *words: Any) -> Any:
        if iteration == FIRST and not self.rehearses:
            under_way.append(profiler.profile(activities=list(profiler.supported_activities())))
            under_way[0].start()
        metrics = step(self, iteration, *words)
        if under_way and iteration == FIRST + COUNT - 1:
            tracer = under_way.pop()
            tracer.stop()
            tracer.export_chrome_trace(str(Path(os.environ["TRACE_INTO"]) / f"trace_{self.rank}.json"))
        return metrics

    kind.train_step = traced


for each in (Session, UnmanagedSession):
    trace(each)
runpy.run_module("unicron.demo.train", run_name="__main__")
