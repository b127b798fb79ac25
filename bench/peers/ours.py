"""unicron as one of the systems: its local cluster in the place of commands, its incident's record of the detection."""

from __future__ import annotations

import contextlib
import re
import sys
import time

from peers import job
from peers.drive import START_S_MAX, Driver
from peers.systems import HERE, UNICRON
from unicron.coordinator.job import Job
from unicron.runtime.client import CoordinatorSilent
from unicron.runtime.local_cluster import OVER, LocalCluster
from unicron.types import Layout

NODES = 2
SLOTS = job.WORLD_SIZE // NODES
IMPORTS = "torch,megatron.core,unicron.training,unicron.demo.model,peers.work"
LAYOUT = Layout(tp=1, pp=1, dp=job.WORLD_SIZE, micro_batch=job.MICRO_BATCH, num_micro_batches=job.NUM_MICRO_BATCHES)
INCIDENT = re.compile(r"^(\d+):(\d+):([\d.]+) .* incident ", re.MULTILINE)


def since(at: float, hours: str, minutes: str, seconds: str) -> float:
    """From a moment to a local time of day that is at most half a day away."""
    local = time.localtime(at)
    of_day = 3600 * local.tm_hour + 60 * local.tm_min + local.tm_sec + at % 1
    difference = 3600 * int(hours) + 60 * int(minutes) + float(seconds) - of_day
    return (difference + 43_200) % 86_400 - 43_200


class UnicronDriver(Driver):
    def __init__(self, setting: str, fault: str) -> None:
        super().__init__(UNICRON, setting, fault)
        self._grace_ms = 0 if setting == "tuned" else Job(name="peers", command=("",)).stopped_grace_ms
        self._task = ""
        self._cluster = LocalCluster(
            num_agents=NODES, slots=SLOTS, understudies=1, imports=IMPORTS, log_dir=self.folder / "logs",
            environment=self.environment,
        )  # fmt: skip

    def start(self) -> None:
        self._cluster.start(START_S_MAX)
        self._task = self._cluster.submit(
            Job(
                name="peers", command=(sys.executable, str(HERE / "train_unicron.py")), layout=LAYOUT,
                env=self.environment, cwd=str(self.folder), log_dir=str(self.folder / "logs"), understudies=1,
                stopped_grace_ms=self._grace_ms,
            )
        )  # fmt: skip

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
        """From the coordinator's log: its first word about an incident since the fault."""
        struck = [event["t"] for event in self.events if event["event"] == "fault"]
        if not struck:
            return None
        at = time.time() - time.monotonic() + struck[0]
        log = (self.folder / "logs" / "coordinator.log").read_text()
        told = [since(at, *found) for found in INCIDENT.findall(log)]
        return next((seconds for seconds in told if seconds >= 0), None)

    def is_over(self) -> str:
        with contextlib.suppress(CoordinatorSilent):
            phase = self._cluster.task_row(self._task)["phase"]
            return f"ended: {phase}" if phase in OVER else ""
        return ""

    def stop(self) -> None:
        self._cluster.stop()
        super().stop()
