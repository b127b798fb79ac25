"""Systems whose layout does not change: a standby or a free node replaces a lost one, or the job waits."""

from __future__ import annotations

import numpy as np

from unicron.simulate.history import Kind
from unicron.simulate.policies.policy import (
    SHARE_GROUPS,
    SHARE_LOAD,
    SHARE_WARM_UP,
    Policy,
    oldest_waiting,
)
from unicron.simulate.tasks import SimTask
from unicron.simulate.world import Incident, Job, World

# TrainMover's own table (GPUs -> seconds): expected, and unexpected with a standby.
SWITCH_GPUS = (32, 128, 256, 512, 1024)
EXPECTED_S = (11.5, 14.5, 15.5, 14.2, 16.6)
UNEXPECTED_S = (19.6, 20.2, 20.4, 20.4, 21.1)


class Fixed(Policy):
    """restart_parts: how long it takes, by where the replacement comes from: standby | free | same (no node lost)."""

    def interval_s(self, job: Job) -> float:
        """Of the versions that a failure returns to."""
        return self.iteration_s(job)

    def restart_parts(self, job: Job, source: str, kind: Kind) -> dict[str, float]:
        raise NotImplementedError

    def hurt(self, world: World, job: Job, incident: Incident) -> None:
        self._restart(world, job, incident, "same")

    def lost(self, world: World, job: Job, incident: Incident) -> None:
        source = world.take(job)
        if source and not job.missing:
            self._restart(world, job, incident, source)
            return
        if not job.missing:
            job.missing_since_s = world.now_s
            self._fall_back(world, job, incident.kind)
            self._record_wait(world, job, incident)
        if not source:
            job.missing += 1

    def _record_wait(self, world: World, job: Job, incident: Incident) -> None:
        """The parts that come beside the waiting, when the node is there."""
        parts = {"detection": self.detect_s(job, incident.kind), **self.restart_parts(job, "free", incident.kind)}
        world.pause(job, incident, parts)

    def returned(self, world: World, node: int) -> None:
        job = oldest_waiting(world)
        if job is None:
            world.put_away(node)
            return
        world.give(node, job)
        job.missing -= 1
        # Its pause is still there and runs now: what it takes to start again on the new node.

    def _restart(self, world: World, job: Job, incident: Incident, source: str) -> None:
        if job.missing:
            return  # nothing runs
        self._fall_back(world, job, incident.kind)
        parts = {"detection": self.detect_s(job, incident.kind), **self.restart_parts(job, source, incident.kind)}
        world.pause(job, incident, parts)

    def _fall_back(self, world: World, job: Job, kind: Kind) -> None:
        if kind not in (Kind.MOVE, Kind.PREEMPT):  # announced: it saves first
            world.roll_back(job, self.interval_s(job))


class Megatron(Fixed):
    name = "megatron"
    prefix = "megatron"
    says = "checkpoint restart with the same layout; a spare node takes the place, else it waits for one"
    uses_standbys = True  # as cold spares

    def steady(self, task: SimTask) -> float:
        return 1 - self.values["common.checkpoint_stall_s"] / self.values["common.checkpoint_interval_s"]

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        return self.value("detect_node_s") if kind is Kind.NODE else self.value("detect_other_s")

    def interval_s(self, job: Job) -> float:
        return self.values["common.checkpoint_interval_s"]

    def restart_parts(self, job: Job, source: str, kind: Kind) -> dict[str, float]:
        return {"infrastructure": self.infrastructure_s, "transition": self.restart_s(job)}


class TrainMover(Fixed):
    name = "trainmover"
    prefix = "trainmover"
    says = "a standby takes the leaver's role, groups by difference; same layout; detection as Unicron published it"
    uses_standbys = True
    lacks = "its own numbers leave detection out; every failure moves a whole machine"

    def restart_parts(self, job: Job, source: str, kind: Kind) -> dict[str, float]:
        scale = self.value("scale")
        if kind in (Kind.MOVE, Kind.PREEMPT):
            return {"transition": by_gpus(job, EXPECTED_S) * scale}
        if source == "standby":
            return {"transition": by_gpus(job, UNEXPECTED_S) * scale}
        infrastructure_s = self.infrastructure_s if source == "free" else 0.0
        return {"infrastructure": infrastructure_s, "transition": self.value("no_standby_s")}

    def hurt(self, world: World, job: Job, incident: Incident) -> None:
        """A standby takes over; the node whose process failed stands by next, as if warm at once."""
        if not world.standbys or job.missing or incident.kind is Kind.MOVE:
            super().hurt(world, job, incident)
            return
        job.nodes.remove(incident.node)
        world.take(job)
        world.put_away(incident.node)
        self._restart(world, job, incident, "standby")


def by_gpus(job: Job, seconds: tuple[float, ...]) -> float:
    """Between the published scales by the logarithm of the number of GPUs; flat outside."""
    gpus = max(job.task.gpus(max(job.wanted, 1)), 1)
    return float(np.interp(np.log2(gpus), np.log2(SWITCH_GPUS), seconds))


class ByteRobust(Fixed):
    name = "byterobust"
    prefix = "byterobust"
    says = "evicts, wakes a standby, restarts the whole job from a copy in memory of the last step"
    uses_standbys = True
    lacks = "evicts whole parallel groups on a hang; here one node"

    def steady(self, task: SimTask) -> float:
        return self.value("steady")

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        names = {Kind.NODE: "detect_node_s", Kind.HANG: "detect_hang_s"}
        return self.value(names.get(kind, "detect_process_s"))

    def restart_parts(self, job: Job, source: str, kind: Kind) -> dict[str, float]:
        parts = {"transition": self.value("wake_s") + self.restart_s(job) * (SHARE_GROUPS + SHARE_WARM_UP)}
        if source == "free":
            parts["infrastructure"] = self.infrastructure_s
        return parts


class NVRx(Fixed):
    name = "nvrx"
    prefix = "nvrx"
    says = "in-process restart: same processes, groups made again, local checkpoint read; idle ranks in reserve"
    uses_standbys = True
    lacks = "the loss of rank 0's node ends the job with its default store; not modelled"

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        return self.value("detect_hang_s") if kind is Kind.HANG else self.value("detect_s")

    def interval_s(self, job: Job) -> float:
        return self.value("checkpoint_interval_s")

    def restart_parts(self, job: Job, source: str, kind: Kind) -> dict[str, float]:
        parts = {"transition": self.value("restart_s") + self.restart_s(job) * (SHARE_GROUPS + SHARE_LOAD)}
        if source == "free":
            parts["infrastructure"] = self.infrastructure_s
        return parts
