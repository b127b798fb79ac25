"""What Slurm says of our job while it runs: its nodes, when it ends, and which nodes are drained.

A signal says less, and may not come: nobody signals a command under salloc, and a pre-emption moves the job's end
before it signals anything. A thread asks, because slurmctld may be slow to answer.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from unicron.runtime import slurm

LOOK_S = 5.0  # slurmctld serves the whole cluster: seldom
_FIELD = re.compile(r"(\w+)=(\S*)")
_REASON = re.compile(r"\bReason=(.*?) \[[^\s\]]+@[^\s\]]+\]")
_DRAINED = ("DRAIN", "DRAINED", "DRAINING")


@dataclass(frozen=True)
class Sight:
    nodes: tuple[str, ...]  # that the job still has
    ends_s: float | None = None  # Unix time; None: no limit
    preempted: bool = False
    drained: Mapping[str, str] = field(default_factory=dict)  # node -> reason


def sight(job: str, nodes: str) -> Sight:
    """job, nodes: what `scontrol --oneliner show` says of them."""
    of_job = dict(_FIELD.findall(job))
    drained = {}
    for line in nodes.splitlines():
        of_node = dict(_FIELD.findall(line))
        if any(word in _DRAINED for word in re.split(r"[^A-Z_]", of_node.get("State", ""))):
            reason = _REASON.search(line)
            drained[of_node.get("NodeName", "")] = reason[1] if reason else ""
    return Sight(
        slurm.expand(of_job["NodeList"]),
        _unix(of_job.get("EndTime", "")),
        _unix(of_job.get("PreemptTime", "")) is not None,
        drained,
    )


def _unix(text: str) -> float | None:
    """'Unknown' and 'None' are no time."""
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return None


class SlurmWatch:
    """``seen`` is the newest answer, at most ``every_s`` old unless slurmctld is silent."""

    def __init__(self, allocation: slurm.Allocation, every_s: float = LOOK_S) -> None:
        self.seen = Sight(allocation.nodes)
        self._allocation = allocation
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(self._every_s):
            with contextlib.suppress(slurm.SlurmProblem, KeyError):
                self.seen = sight(slurm.show_job(self._allocation.job), slurm.show_nodes(self._allocation.nodes))

    def close(self) -> None:
        self._over.set()
