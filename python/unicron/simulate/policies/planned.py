"""Systems that plan the whole cluster: unicron, with and without standbys, and Unicron as published.

All three ask the planner that runs in production (csrc/planner through unicron.planner), with whole nodes as slots and
T(t, x) of the performance model. They differ in what a transition takes and in what may answer a failure.
"""

from __future__ import annotations

from collections.abc import Sequence

from unicron.planner import Cluster, Planner
from unicron.planner.cluster import Failures, Node, Task, Transitions, Workers
from unicron.simulate.history import Kind
from unicron.simulate.laws import Laws, laws_of
from unicron.simulate.policies.policy import Policy, Setting
from unicron.simulate.tasks import SimTask
from unicron.simulate.world import Incident, Job, World

POOL = "pool"  # one name for all nodes: which of them a task holds does not enter its reward here


def cluster_of(
    tasks: Sequence[SimTask], widths: Sequence[int], pool: int, standbys: int, setting: Setting, times: Transitions
) -> Cluster:
    """Whole nodes as slots. pool: nodes before the event, held or free."""
    per_node_s = 1.0 / setting.failures_per_node_s if setting.failures_per_node_s > 0 else 1e12
    rows = []
    for task, width in zip(tasks, widths, strict=True):
        least, most = task.nodes_min, min(task.nodes_max, pool)
        if least > most:
            continue  # it fits no longer
        flops = dict(zip(range(least, most + 1), task.flops[least : most + 1].tolist(), strict=True))
        holds = {POOL: width} if width else {}
        rows.append(Task(task.name, Workers(least, most), flops, task.weight, holds=holds))
    return Cluster(
        nodes=(Node(POOL, pool),),
        tasks=tuple(rows),
        standbys=standbys,
        waits=False,
        failures=Failures(prior=1.0, prior_slot_s=per_node_s),
        transitions=times,
    )


class Planned(Policy):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._plans: dict[tuple[object, ...], tuple[dict[str, int], str]] = {}

    # ------------------------------------------------------------ times, to be said by each

    def transitions(self, world: World) -> Transitions:
        """What the planner is told; the mean over tasks."""
        raise NotImplementedError

    def process_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        raise NotImplementedError

    def change_parts(self, job: Job, before: int, how: str, *, is_hurt: bool) -> dict[str, float]:
        raise NotImplementedError

    # ------------------------------------------------------------ events

    def begin(self, world: World) -> None:
        self._times = self.transitions(world)

    def hurt(self, world: World, job: Job, incident: Incident) -> None:
        if incident.kind is Kind.MOVE:
            world.pause(job, incident, self.change_parts(job, job.width - 1, "grow", is_hurt=False))
            return
        detection = {"detection": self.detect_s(job, incident.kind)}
        world.pause(job, incident, {**detection, **self.process_parts(job, incident.kind)})

    def lost(self, world: World, job: Job, incident: Incident) -> None:
        counts, how = self._plan(world, job)
        detection = {"detection": self.detect_s(job, incident.kind)}
        before = job.width + 1
        if how == "standby":
            world.take(job)
        changed = {job: before, **self._follow(world, counts)}
        parts = self.change_parts(job, before, how, is_hurt=incident.kind is not Kind.PREEMPT)
        world.pause(job, incident, {**detection, **parts})
        del changed[job]  # its own pause is the incident's
        self._pause(world, changed)

    def returned(self, world: World, node: int) -> None:
        if len(world.standbys) < self.num_standbys:
            world.put_away(node)
            return
        world.put_away(node)
        counts, _ = self._plan(world, None)
        self._pause(world, self._follow(world, counts))

    def _pause(self, world: World, changed: dict[Job, int]) -> None:
        for job, former in changed.items():
            how = "start" if former == 0 else "grow" if job.width > former else "shrink"
            world.pause(job, None, self.change_parts(job, former, how, is_hurt=False))

    def _follow(self, world: World, counts: dict[str, int]) -> dict[Job, int]:
        """Widths to what was planned; who changed -> what it had."""
        changed = {}
        for job in world.jobs:
            target = counts.get(job.task.name, 0)
            if job.width > target:
                changed[job] = job.width
                world.release(job, job.width - target)
        for job in world.jobs:
            target = counts.get(job.task.name, 0)
            if job.width < target:
                changed.setdefault(job, job.width)
                while job.width < target and world.free:
                    world.give(world.free.pop(), job)
        return changed

    # ------------------------------------------------------------ the planner

    def _plan(self, world: World, lost_by: Job | None) -> tuple[dict[str, int], str]:
        """Counts of nodes and how. The world has taken the lost node away already; the planner sees the time before.
        A node that came is there already: it holds nothing, so the best plan as things are is the answer."""
        events = () if lost_by is None else (f"slot:{lost_by.task.name}",)
        widths = tuple(job.width + (job is lost_by) for job in world.jobs)
        pool = sum(widths) + len(world.free)
        standbys = len(world.standbys)
        key = (widths, pool, standbys, events)
        if key not in self._plans:
            world.account.num_plans += 1
            tasks = [job.task for job in world.jobs]
            cluster = cluster_of(tasks, widths, pool, standbys, self.setting, self._times)
            planner = Planner(cluster, table=False)
            plan = planner.solve(events)
            names = [task.name for task in cluster.tasks]
            counts = dict(zip(names, (int(count) for count in plan.allocation), strict=True))
            how = "reconfigure" if lost_by is None else ("reconfigure", "standby")[plan.alternative]
            self._plans[key] = counts, how
        return self._plans[key]


class UnicronPublished(Planned):
    name = "unicron-published"
    prefix = "unicron_published"
    says = "Unicron's paper: retry, restart or replan the cluster; D_transition is a parameter"

    def transitions(self, world: World) -> Transitions:
        change_s = self.value("transition_s")
        return Transitions(
            start_s=change_s, stop_s=0.0, shrink_s=change_s, grow_s=change_s, restart_s=self.value("restart_s"),
            standby_s=change_s, replace_s=change_s, repair_s=max(self.setting.repair_s, 1.0),
        )  # fmt: skip

    def process_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        if kind is Kind.LINK:
            return {"transition": self.value("retry_s")}
        return {"transition": self.value("restart_s"), "recompute": self.iteration_s(job) / 2}

    def change_parts(self, job: Job, before: int, how: str, *, is_hurt: bool) -> dict[str, float]:
        dp = int(job.task.dp[job.width])
        again_s = self.iteration_s(job) / max(dp - 1, 1) if is_hurt else 0.0
        return {"transition": self.value("transition_s"), "recompute": again_s}


class Unicron(Planned):
    """Without standbys: a lost node's task shrinks, or takes what the plan gives it."""

    name = "unicron"
    prefix = "unicron"
    says = "this project: measured healing in place, planner over all tasks, no standbys"
    lacks = "its times were measured on two GPUs; beyond them laws.py says how they grow"

    def own_detect_s(self, job: Job, kind: Kind) -> float:
        if kind is Kind.NODE:
            return self.value("detect_node_s")
        if kind is Kind.HANG:
            return self.common_detect_s(job, kind)
        return self.setting.measured.detect_process_s

    def laws(self, job: Job) -> Laws:
        width = max(job.width, job.task.nodes_min)
        return laws_of(job.task, width, self.values, self.setting.measured, self.setting.gpu)

    def transitions(self, world: World) -> Transitions:
        laws = [self.laws(job) for job in world.jobs]
        mean = Laws(*(sum(column) / len(laws) for column in zip(*laws, strict=True)))
        return Transitions(
            start_s=self.value("start_s"), stop_s=0.0, shrink_s=mean.shrink_s + mean.again_shrink_s,
            grow_s=mean.grow_s, restart_s=mean.process_s + mean.again_s, standby_s=mean.standby_s + mean.again_s,
            replace_s=mean.standby_s + mean.again_s, repair_s=max(self.setting.repair_s, 1.0),
        )  # fmt: skip

    def process_parts(self, job: Job, kind: Kind) -> dict[str, float]:
        laws = self.laws(job)
        if kind is Kind.LINK:
            return {"transition": laws.reconnect_s, "recompute": laws.again_s}
        return {"transition": laws.process_s, "recompute": laws.again_s}

    def change_parts(self, job: Job, before: int, how: str, *, is_hurt: bool) -> dict[str, float]:
        laws = self.laws(job)
        if how == "start" or before == 0:
            return {"transition": self.value("start_s")}
        if how == "standby" or job.width >= before:
            return {"transition": laws.standby_s, "recompute": laws.again_s if is_hurt else 0.0}
        return {"transition": laws.shrink_s, "recompute": laws.again_shrink_s if is_hurt else 0.0}


class UnicronStandby(Unicron):
    name = "unicron-standby"
    says = "as unicron, and the planner may also spend a standby"
    uses_standbys = True
