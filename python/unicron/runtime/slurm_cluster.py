"""A cluster inside a Slurm allocation: the coordinator beside `unicron run` in the batch script, an agent on every
node, each a step of its own.

Keys and journal lie in a folder that all nodes see and that outlives the job, so that a job that is requeued finds its
task where it was. A step that ends is begun again, a few times; then its node is left to the others' healing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from unicron.runtime.local_cluster import LocalCluster
from unicron.runtime.slurm import Allocation, own_address

STEPS_MAX = 5  # per node
STEP_WAIT_S = 5.0  # between two on one node
LIVES_MAX = 1000  # of an agent in one run of the job


class SlurmCluster(LocalCluster):
    def __init__(self, allocation: Allocation, slots: int, understudies: int, *, state: Path, **options: Any) -> None:
        """state: folder for keys and journal, on a file system that all nodes share."""
        super().__init__(len(allocation.nodes), slots, understudies, nodes=allocation.nodes, state=state, **options)
        self._allocation = allocation
        self._address = f"{own_address()}:0"
        self._incarnations = dict.fromkeys(self.nodes, allocation.restarts * LIVES_MAX)
        self._begun_s: dict[str, list[float]] = {node: [] for node in self.nodes}
        self.given_up: list[str] = []

    def start_template(self) -> None:
        """Each agent brings its own."""

    def start_agent(self, node: str) -> None:
        self._incarnations[node] += 1
        self._begun_s[node].append(time.monotonic())
        words = [
            sys.executable, "-m", "unicron.cli", "agent", "--coordinator", self._address, "--node", node,
            "--slots", str(self._slots), "--understudies", str(self._understudies), "--host", "auto",
            "--keys", str(self.state / "keys"), "--import", self._imports, "--metrics", "",
            "--run-dir", f"/tmp/unicron-{os.getuid()}-{self._allocation.job}-{node}",
            "--incarnation", str(self._incarnations[node]),
        ]  # fmt: skip
        self._spawn(node, self._allocation.agent_command(node, words))

    def tend(self) -> list[str]:
        again = []
        for name, daemon in self._daemons.items():
            if daemon.poll() is None or name in self.given_up:
                continue
            begun = self._begun_s.get(name)
            if begun is None:
                again.append(name)  # the coordinator
            elif len(begun) >= STEPS_MAX:
                self.given_up.append(name)
            elif time.monotonic() - begun[-1] >= STEP_WAIT_S:
                again.append(name)
        for name in again:
            if name == "coordinator":
                self.start_coordinator()
            else:
                self.start_agent(name)
        return again
