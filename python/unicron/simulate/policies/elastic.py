"""Systems that go on with the nodes that are left, each task by itself; a returned node goes to who lost one."""

from __future__ import annotations

from unicron.simulate.history import Kind
from unicron.simulate.policies.policy import Policy
from unicron.simulate.tasks import SimTask
from unicron.simulate.world import Incident, Job, World


class Elastic(Policy):
    """leave_parts, join_parts: how long it stands still when a node goes, when one comes."""

    def interval_s(self, job: Job) -> float:
        return self.iteration_s(job)

    def leave_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        raise NotImplementedError

    def join_parts(self, job: Job) -> dict[str, float]:
        raise NotImplementedError

    def begin(self, world: World) -> None:
        self._lost: list[Job] = []  # who is owed a node, in order

    def steady(self, task: SimTask) -> float:
        return self.value("steady")

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        return self.value("detect_s")

    def hurt(self, world: World, job: Job, incident: Incident) -> None:
        """A process, a link, a move: the node goes and comes, as far as these systems see."""
        self._stand_still(world, job, incident)

    def lost(self, world: World, job: Job, incident: Incident) -> None:
        if not world.take(job):
            self._lost.append(job)
        self._stand_still(world, job, incident)

    def _stand_still(self, world: World, job: Job, incident: Incident) -> None:
        if incident.kind not in (Kind.MOVE, Kind.PREEMPT):  # announced: it saves first
            world.roll_back(job, self.interval_s(job))
        parts = {"detection": self.detect_s(job, incident.kind), **self.leave_parts(job, incident.kind)}
        world.pause(job, incident, parts)

    def returned(self, world: World, node: int) -> None:
        if not self._lost:
            world.put_away(node)
            return
        job = self._lost.pop(0)
        world.give(node, job)
        world.pause(job, None, self.join_parts(job))


class Varuna(Elastic):
    name = "varuna"
    prefix = "varuna"
    says = "restarts from a checkpoint with the best layout for the nodes that are left"

    def steady(self, task: SimTask) -> float:
        stall = self.values["common.checkpoint_stall_s"] / self.values["common.checkpoint_interval_s"]
        return self.value("steady") * (1 - stall)

    def interval_s(self, job: Job) -> float:
        return self.values["common.checkpoint_interval_s"]

    def leave_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        return {"transition": self.restart_s(job)}

    def join_parts(self, job: Job) -> dict[str, float]:
        return {"transition": self.restart_s(job)}  # it saves before it morphs: nothing is computed again


class Proportional(Elastic):
    """Throughput in proportion to the nodes, not by the best layout for them."""

    def rate(self, job: Job) -> float:
        if job.wanted == 0:
            return 0.0
        share = min(job.width / job.wanted, 1.0)
        return job.task.waf(job.wanted) * share * self.steady(job.task)


class Bamboo(Proportional):
    name = "bamboo"
    prefix = "bamboo"
    says = "a node's predecessor has its layers; two neighbours at once: checkpoint restart"

    def leave_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        """Expected over where it strikes: with m nodes missing of n, 2 m / n of the others are neighbours of one."""
        missing = max(job.wanted - job.width - 1, 0)
        risk = min(1.0, 2.0 * missing / max(job.wanted, 1))
        again_s = self.values["common.checkpoint_interval_s"] / 2
        return {
            "transition": (1 - risk) * self.value("takeover_s") + risk * self.restart_s(job),
            "recompute": risk * again_s,
        }

    def join_parts(self, job: Job) -> dict[str, float]:
        return {"transition": self.value("join_s")}


class Oobleck(Proportional):
    name = "oobleck"
    prefix = "oobleck"
    says = "pipeline templates made beforehand, state from replicas"
    lacks = "no distributed optimizer; its templates were not planned beyond 32 GPUs in TrainMover's test"

    def leave_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        return {"transition": self.value("leave_s")}

    def join_parts(self, job: Job) -> dict[str, float]:
        return {"transition": self.value("join_s")}


class TorchFT(Elastic):
    name = "torchft"
    prefix = "torchft"
    says = "the replica group that failed is dropped until it is back; the others go on"
    lacks = "a dropped group's part of the batch is lost: what is learned changes"

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        return 0.0  # in stall_s: the survivors' time-out is the detection

    def rate(self, job: Job) -> float:
        """Whole replica groups only."""
        size = int(job.task.replica_nodes[job.wanted]) if job.wanted else 1
        groups = job.wanted // size
        if groups == 0:
            return 0.0
        return job.task.waf(job.wanted) * min(job.width // size, groups) / groups * self.steady(job.task)

    def leave_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        groups = self._groups(job)
        back = self.restart_s(job) / groups if kind is not Kind.NODE and kind is not Kind.PREEMPT else 0.0
        if groups == 1:  # nobody is left to go on
            return {"transition": self.value("stall_s") + self.restart_s(job)}
        # One group of so many is away for its restart: as much as all of them for that part of it.
        return {"transition": self.value("stall_s") + back}

    def join_parts(self, job: Job) -> dict[str, float]:
        """One quorum; the weights come from a peer while the others train."""
        return {"transition": self.value("stall_s")}

    def _groups(self, job: Job) -> int:
        size = int(job.task.replica_nodes[job.wanted]) if job.wanted else 1
        return max(job.wanted // size, 1)
