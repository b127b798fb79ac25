"""unicron as one of the systems: its local cluster in the place of commands, its incident's record of the detection."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from typing import Any

from peers import job
from peers.drive import START_S_MAX, Driver
from peers.systems import HERE, UNICRON
from unicron.coordinator.job import Job
from unicron.runtime.client import CoordinatorSilent
from unicron.runtime.local_cluster import OVER, LocalCluster
from unicron.types import Layout

NODES, SLOTS = 2, 2
IMPORTS = "torch,megatron.core,unicron.training,unicron.demo.model,peers.work"
LAYOUT = Layout(tp=1, pp=1, dp=job.WORLD_SIZE, micro_batch=job.MICRO_BATCH, num_micro_batches=job.NUM_MICRO_BATCHES)


class UnicronDriver(Driver):
    def __init__(self, setting: str, fault: str) -> None:
        super().__init__(UNICRON, setting, fault)
        self._grace = {"stopped_grace_ms": 0} if setting == "tuned" else {}
        self._task = ""
        self._cluster = LocalCluster(
            num_agents=NODES, slots=SLOTS, understudies=1, imports=IMPORTS, log_dir=self.folder / "logs",
            environment=self.environment,
        )  # fmt: skip

    def start(self) -> None:
        self._cluster.start(START_S_MAX)
        job: dict[str, Any] = {"understudies": 1, "cwd": str(self.folder), "log_dir": str(self.folder / "logs")}
        command = (sys.executable, str(HERE / "train_unicron.py"))
        self._task = self._cluster.submit(
            Job(name="peers", command=command, layout=LAYOUT, env=self.environment, **job, **self._grace)
        )

    def strike(self, fault: str) -> None:
        self.say("fault", 0, fault=fault)
        if fault == "coordinator":
            self._cluster.kill_coordinator()
        elif fault == "node":
            self._cluster.kill_agent(self._cluster.nodes[1])
        else:
            self._cluster.kill_agent_alone(self._cluster.nodes[1])

    def revive(self, fault: str) -> None:
        if fault == "coordinator":
            self._cluster.start_coordinator()
        else:
            self._cluster.start_agent(self._cluster.nodes[1])

    def detected_s(self) -> float | None:
        """From the coordinator's log: its first word about an incident."""
        struck = [event["t"] for event in self.events if event["event"] == "fault"]
        told = re.search(
            r"^(\d+):(\d+):([\d.]+) .* incident ", (self.folder / "logs/coordinator.log").read_text(), re.M
        )
        if not struck or not told:
            return None
        at = time.localtime(time.time() - time.monotonic() + struck[0])
        fraction = (time.time() - time.monotonic() + struck[0]) % 1
        of_day = 3600 * at.tm_hour + 60 * at.tm_min + at.tm_sec + fraction
        seconds = 3600 * int(told[1]) + 60 * int(told[2]) + float(told[3]) - of_day
        return max(0.0, seconds % 86400 if seconds < -43200 else seconds)

    def is_over(self) -> str:
        with contextlib.suppress(CoordinatorSilent):
            phase = self._cluster.task_row(self._task)["phase"]
            return f"ended: {phase}" if phase in OVER else ""
        return ""

    def stop(self) -> None:
        self._cluster.stop()
        super().stop()
