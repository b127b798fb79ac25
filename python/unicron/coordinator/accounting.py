"""What the cluster earned and what failures cost: WAF over time, ETTR, C_recovery (Unicron, cost model).

A task's time is divided into kinds; every change of kind, width or WAF is a journal entry, and the sums are made where
entries are applied, so they survive a restart; the time a coordinator was away counts as what it last knew. Times are
of one machine's monotonic clock: should a clock have begun anew, that one interval counts as nothing.

    C_recovery = detection + transition + sub-healthy, in GPU-seconds
    detection    the task's slots, from the failure until it is known
    transition   the task's slots, from then until the interrupted iteration is committed
    sub-healthy  the slots it lost, from then until their node is back and the task is as wide as was decided
"""

from __future__ import annotations

from unicron.coordinator.demand import throughput_of
from unicron.coordinator.incident import Incident
from unicron.coordinator.journal import Accounted, ThroughputMeasured, TransitionMeasured
from unicron.coordinator.state import TaskState
from unicron.coordinator.steering import renew_tables
from unicron.coordinator.step import Step
from unicron.coordinator.transitions import TaskPhase

METER_ITERATIONS = 10  # that a measurement of speed spans at least
METER_MS = 2_000.0
METER_CHANGE = 0.1  # a speed that differs by less is no news

KINDS = {
    TaskPhase.STARTING: "starting",
    TaskPhase.RUNNING: "running",
    TaskPhase.RECOVERING: "recovering",
    TaskPhase.HEALING: "recovering",
    TaskPhase.SUSPENDED: "suspended",
    TaskPhase.FINISHING: "over",
    TaskPhase.STOPPING: "over",
    TaskPhase.DONE: "over",
    TaskPhase.STOPPED: "over",
}


def kind_of(task: TaskState) -> str:
    if task.phase is TaskPhase.WAITING:
        return "waiting" if task.epoch or task.restart_count else "queued"
    return KINDS[task.phase]


def note_accounts(step: Step) -> None:
    """At the end of a step: one entry for every task whose kind, width or WAF changed."""
    for task in step.state.tasks.values():
        kind = kind_of(task)
        slots = 0 if kind in ("over", "queued", "waiting", "suspended") else len(task.slotted)
        replicas = slots // task.job.layout.replica_size
        waf = task.job.weight * throughput_of(task, replicas) if kind == "running" and replicas else 0.0
        known = task.accounts
        if (kind, slots, waf) != (known.kind, known.slots, known.waf):
            entry = Accounted(task.name, step.now_ms, kind, slots, waf)
            step.write(entry, f"{kind} on {slots} slots")


# ------------------------------------------------------------ incidents


def cost_of(incident: Incident, now_ms: float) -> dict[str, float]:
    """C_recovery of one incident in GPU-seconds; of one that is open or sub-healthy, until now."""
    detect_ms = incident.detect_ms or 0.0
    resume_ms = incident.resume_ms
    if resume_ms is None:
        over = incident.outcome is not None  # unaffected, stopped: nothing was waited for
        resume_ms = detect_ms if over else detect_ms + max(now_ms - incident.opened_ms, 0.0)
    lost_ms = 0.0
    if incident.missing_slots:
        since_ms = incident.opened_ms + resume_ms - detect_ms
        lost_ms = max((now_ms if incident.healthy_ms is None else incident.healthy_ms) - since_ms, 0.0)
    cost = {
        "detection_gpu_s": incident.slots * detect_ms / 1000,
        "transition_gpu_s": incident.slots * max(resume_ms - detect_ms, 0.0) / 1000,
        "sub_healthy_gpu_s": incident.missing_slots * lost_ms / 1000,
    }
    return {**cost, "total_gpu_s": sum(cost.values())}


def settle_health(step: Step, task: TaskState) -> None:
    """Sub-healthy until the node is back and the task is as wide as was decided, or it is over."""
    for name in sorted(step.state.sub_healthy):
        incident = step.state.incidents[name]
        if incident.task != task.name:
            continue
        node = step.state.nodes.get(incident.node)
        whole = task.placement == step.state.target(task.name) and (node is None or node.is_usable)
        if task.is_over or (whole and task.phase is TaskPhase.RUNNING):
            why = "the task is over" if task.is_over else "the task is as wide as was decided, its node is back"
            step.change_incident(incident, why, healthy_ms=step.now_ms)


# ------------------------------------------------------------ what the planner learns


def note_transition(step: Step, task: TaskState, kind: str) -> None:
    """D_transition of this kind, once more; nothing when another coordinator saw it begin."""
    if task.decided_ms is None:
        return
    seconds = max(step.now_ms - task.decided_ms, 0.0) / 1000
    task.decided_ms = None
    step.write(TransitionMeasured(kind, seconds), f"{task.name}: {kind} took {seconds:.3g} s")


def note_speed(step: Step, task: TaskState) -> None:
    """From the heartbeats: seconds of an iteration at the present width, where that is news."""
    plan = task.plan
    if plan is None or task.phase is not TaskPhase.RUNNING or task.leaving or task.guests:
        task.meter = None
        return
    if task.meter is None or task.meter[0] != plan.epoch:
        task.meter = (plan.epoch, task.iteration, step.now_ms)
        return
    _, iteration, since_ms = task.meter
    done, elapsed_ms = task.iteration - iteration, step.now_ms - since_ms
    if done < METER_ITERATIONS or elapsed_ms < METER_MS:
        return
    task.meter = (plan.epoch, task.iteration, step.now_ms)
    replicas, iteration_s = len(plan.replicas), elapsed_ms / 1000 / done
    known = task.measured_s.get(replicas)
    if known is None or abs(iteration_s / known - 1) > METER_CHANGE:
        entry = ThroughputMeasured(task.name, replicas, iteration_s)
        step.write(entry, f"{task.name}: {iteration_s:.3g} s an iteration on {replicas} replicas")
        if task.job.measured:
            renew_tables(step, f"{task.name} was measured")
