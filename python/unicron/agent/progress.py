"""Does a worker's loop advance? Statistics per stage of what is usual here, from samples of the pulse pages.

A loop that stands still for stall_factor x the usual time of its stage is reported, together with whether it waits
in a collective: who waits is an echo, who does not may be the root (the coordinator compares). Starting, evaluation
and saving have budgets of their own; a worker that waits for a role has none.
"""

from __future__ import annotations

from collections import deque

from unicron.agent.events import Pulse, PulsesSampled
from unicron.agent.state import Worker
from unicron.agent.step import Step
from unicron.messages import WorkerContinued, WorkerStalled
from unicron.types import Stage

MEASURED = (Stage.COMPUTE, Stage.TIE, Stage.REDUCE, Stage.COMMIT, Stage.STEP, Stage.GATHER)
UNBOUNDED = (Stage.WAITING, Stage.DONE)  # a role, or the exit timer, ends these


def on_sampled(step: Step, event: PulsesSampled) -> None:
    for name, pulse in event.pulses:
        worker = step.state.workers.get(name)
        if worker is not None and worker.can_hear:
            _on_pulse(step, worker, pulse, event.now_ns)


def _on_pulse(step: Step, worker: Worker, pulse: Pulse, now_ns: int) -> None:
    before, worker.pulse = worker.pulse, pulse
    if worker.stall_rebase:
        worker.stall_rebase, worker.stall_reported = False, False
        worker.stall_base_ns = now_ns
        return
    if before is None or pulse.progress != before.progress:
        if before is not None:
            _learn(step, worker, before, pulse)
        if worker.stall_reported:
            worker.stall_reported = False
            again = WorkerContinued(step.config.node, worker.task, worker.name, worker.rank)
            step.report(again, f"{worker.name} advances again")
        return
    budget_ms = budget_of(step, worker, pulse.stage)
    stalled_ms = (now_ns - max(pulse.since_ns, worker.stall_base_ns)) / 1e6
    if budget_ms is None or stalled_ms <= budget_ms or worker.stall_reported or worker.is_stopped:
        return
    worker.stall_reported = True
    stalled = WorkerStalled(
        node=step.config.node,
        task=worker.task,
        worker=worker.name,
        rank=worker.rank,
        stage=pulse.stage,
        iteration=pulse.iteration,
        micro_batch=pulse.micro_batch,
        waiting_in_collective=pulse.waiting,
        stalled_ms=stalled_ms,
        budget_ms=budget_ms,
        fault_ns=pulse.fault_ns,
        seen_ns=now_ns,
    )
    step.report(stalled, f"{worker.name} stands still in {pulse.stage.name.lower()}")


def _learn(step: Step, worker: Worker, before: Pulse, pulse: Pulse) -> None:
    """The mean gap between two advances since the last sample: an estimate for the stage it was in."""
    advances = pulse.progress - before.progress
    if advances <= 0 or before.stage not in MEASURED:
        return
    kept = worker.usual_ms.setdefault(before.stage, deque(maxlen=step.config.usual_kept_max))
    kept.append((pulse.since_ns - before.since_ns) / 1e6 / advances)


def budget_of(step: Step, worker: Worker, stage: Stage) -> float | None:
    config = step.config
    if stage in UNBOUNDED:
        return None
    if stage in MEASURED:
        kept = worker.usual_ms.get(stage)
        if not kept:
            return config.start_ms_max  # the first iteration compiles, allocates, connects
        usual_ms = sorted(kept)[(3 * (len(kept) - 1)) // 4]
        return max(config.stall_ms_min, worker.stall_factor * usual_ms)
    return {
        Stage.STARTING: config.start_ms_max,
        Stage.IDLE: config.idle_ms_max,
        Stage.HEAL: config.heal_ms_max,
        Stage.EVALUATE: config.evaluate_ms_max,
        Stage.SAVE: config.save_ms_max,
    }[stage]
