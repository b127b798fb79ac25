"""What a policy is: how a system answers a failure, in seconds and nodes.

To add one: a class in a file here, its numbers in parameters.py with their sources, a line in __init__.py. It says

    steady(task)      share of Megatron's throughput that it reaches while nothing fails
    rate(job)         FLOP/s of the job as it stands, weighted
    hurt(...)         a process, a link or a hang of a job; the node is whole
    lost(...)         a node of a job is gone (world has taken it away already)
    moved(...)        planned: another machine takes the node's role, one for one
    returned(...)     a node came back

through world.pause, roll_back, take, give, put_away. Nothing else may change a world.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from unicron.simulate.history import Kind
from unicron.simulate.measured import Measured
from unicron.simulate.parameters import Values
from unicron.simulate.tasks import SimTask
from unicron.simulate.world import Incident, Job, World

# Megatron's framework restart by number of GPUs (TrainMover, the baseline of its downtime table); flat outside.
RESTART_GPUS = np.log2([32, 128, 256, 512, 1024])
RESTART_S = (80.0, 190.0, 230.0, 260.0, 300.0)
# Of it, by stage: TrainMover's breakdown of a restart at 8,192 GPUs.
SHARE_LOAD, SHARE_GROUPS, SHARE_WARM_UP = 0.351, 0.245, 0.404


class Setting(NamedTuple):
    """What every policy may know: not the history that is about to come."""

    values: Values  # parameters.py by name
    measured: Measured
    gpu: str
    detection: str  # own | same | none
    standbys: int
    failures_per_node_s: float  # as expected, not as drawn
    repair_s: float  # as expected


class Policy:
    name = ""
    says = ""  # one line: the model
    prefix = ""  # of its parameters; common.* belongs to all
    uses_standbys = False
    lacks = ""  # what an honest reader must know that no number here shows

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.values = setting.values
        self.num_standbys = setting.standbys if self.uses_standbys else 0

    def value(self, name: str) -> float:
        return self.values[f"{self.prefix}.{name}"]

    # ------------------------------------------------------------ to be said by each

    def steady(self, task: SimTask) -> float:
        return 1.0

    def begin(self, world: World) -> None:
        """Before the first event."""

    def rate(self, job: Job) -> float:
        return job.task.waf(job.width) * self.steady(job.task)

    def hurt(self, world: World, job: Job, incident: Incident) -> None:
        raise NotImplementedError

    def lost(self, world: World, job: Job, incident: Incident) -> None:
        raise NotImplementedError

    def returned(self, world: World, node: int) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ what they share

    def detect_s(self, job: Job, kind: Kind) -> float:
        """Counted for all policies or for none; `same` gives every one Unicron's published times."""
        if kind in (Kind.MOVE, Kind.PREEMPT) or self.setting.detection == "none":
            return 0.0
        if self.setting.detection == "same":
            return self.common_detect_s(job, kind)
        return self.own_detect_s(job, kind)

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        return self.common_detect_s(job, kind)

    def common_detect_s(self, job: Job, kind: Kind) -> float:
        if kind is Kind.HANG:
            return self.values["common.detect_hang_iterations"] * self.iteration_s(job)
        names = {Kind.NODE: "node", Kind.PROCESS: "process", Kind.LINK: "link"}
        return self.values[f"common.detect_{names[kind]}_s"]

    def iteration_s(self, job: Job) -> float:
        width = max(job.wanted, job.width, job.task.nodes_min)
        return job.task.iteration_s(width) / self.steady(job.task)

    def restart_s(self, job: Job) -> float:
        """Megatron's framework restart at the job's number of GPUs: load, groups, warm-up."""
        gpus = job.task.gpus(max(job.wanted, 1))
        seconds = float(np.interp(np.log2(max(gpus, 1)), RESTART_GPUS, RESTART_S))
        return seconds * self.values["common.framework_scale"]

    @property
    def infrastructure_s(self) -> float:
        return self.values["common.infrastructure_s"]


def oldest_waiting(world: World) -> Job | None:
    """The job that has waited longest for a node."""
    waiting = [job for job in world.jobs if job.missing]
    return min(waiting, key=lambda job: (job.missing_since_s, job.index), default=None)
