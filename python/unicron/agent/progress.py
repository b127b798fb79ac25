"""Does a worker's loop advance? What is usual is learned from every interval (csrc/monitor/phase_times.h).

A loop that stands still for 1.5 times the usual of its stage is a suspicion, told together with two things that do
not come from its clock: whether it waits in a collective (who waits is an echo, who does not may be the root: the
coordinator compares), and what its threads did meanwhile. After 3 times the agent is sure. The first iteration,
evaluation, saving and what the script declares have bounds of their own; a worker that waits for a role has none.

Standing still is counted only as far as this agent watched it: an agent that was stopped itself, or a clock that was
set, makes nobody a suspect.
"""

from __future__ import annotations

from unicron._core import PhaseTimes
from unicron.agent.actions import SendCoordinator
from unicron.agent.events import Pulse, PulsesSampled
from unicron.agent.lives import must_leave
from unicron.agent.state import Standstill, Worker
from unicron.agent.step import Step
from unicron.messages import PaceSample, WorkerContinued, WorkerStalled, WorkerStopped, WorkersWait
from unicron.types import Cpu, Stage

MEASURED = (Stage.COMPUTE, Stage.TIE, Stage.REDUCE, Stage.COMMIT, Stage.STEP, Stage.GATHER)
UNBOUNDED = (Stage.WAITING, Stage.DONE)  # a role, or the exit timer, ends these
SUSPECT, SURE = 1, 2
WAITS_FACTOR = 1.5  # times the usual
HEIR_FACTOR = 3.0  # its first iteration may take so many times what makes others suspect for sure

Budget = tuple[float, float, float]  # usual (0: not learned), suspect, sure; ms


def on_sampled(step: Step, event: PulsesSampled) -> bool:
    """Whether the coordinator should hear of it at once: a worker has its first iteration behind it, so all of its task
    have met, and who fails from here on costs the others nothing they have computed."""
    is_news = False
    for name, pulse in event.pulses:
        worker = step.state.workers.get(name)
        if worker is not None and worker.can_hear:
            _learn(step, worker, pulse)
            _keep_pace(step, worker, pulse)
            is_news |= worker.pulse is not None and worker.pulse.iteration < 1 <= pulse.iteration
            _on_pulse(step, worker, pulse, event.now_ns)
            must_leave(step, worker)
    return is_news


def _on_pulse(step: Step, worker: Worker, pulse: Pulse, now_ns: int) -> None:
    before, worker.pulse = worker.pulse, pulse
    watched_ms = min(max((now_ns - worker.sampled_ns) / 1e6, 0.0), step.config.sample_ms_max)
    worker.sampled_ns = now_ns
    if worker.stall_rebase:  # a new epoch, or it was continued: its clock begins now
        worker.stall_rebase = False
        worker.rebased_iteration = pulse.iteration
        worker.still = Standstill(activity=pulse.activity)
        return
    if before is None or pulse.progress != before.progress:
        if worker.held:
            _release(step, worker)
            worker.held = ""
        if worker.still.level:
            again = WorkerContinued(step.config.node, worker.task, worker.name, worker.rank)
            step.report(again, f"{worker.name} advances again")
        worker.still = Standstill()
        if before is not None:  # it began somewhere since the last sample
            worker.still.stood_ms = min(watched_ms, max((now_ns - pulse.since_ns) / 1e6, 0.0))
        return
    still = worker.still
    if still.activity is None:
        still.activity = pulse.activity
    _note_held(step, worker, pulse, now_ns)
    if worker.is_stopped or worker.held:
        return
    still.stood_ms += watched_ms
    _judge(step, worker, pulse, now_ns)


def _note_held(step: Step, worker: Worker, pulse: Pulse, now_ns: int) -> None:
    """Somebody holds it on purpose: it does not stand still, and this is said, once."""
    if pulse.held and not worker.held and not worker.is_stopped:
        where = (step.config.node, worker.task, worker.name, worker.rank)
        held = WorkerStopped(*where, pulse.fault_ns, now_ns, traced=True, held=pulse.held)
        step.report(held, f"{worker.name}: {pulse.held}")
    elif worker.held and not pulse.held:
        _release(step, worker)
    worker.held = pulse.held


def _release(step: Step, worker: Worker) -> None:
    again = WorkerContinued(step.config.node, worker.task, worker.name, worker.rank)
    step.report(again, f"{worker.name} is held no more")
    worker.still = Standstill()


def _judge(step: Step, worker: Worker, pulse: Pulse, now_ns: int) -> None:
    still = worker.still
    budget = budget_of(step, worker, pulse)
    if budget is None:
        return
    usual_ms, suspect_ms, sure_ms = budget
    level = SURE if still.stood_ms > sure_ms else SUSPECT if still.stood_ms > suspect_ms else 0
    if level <= still.level:
        return
    still.level = level
    plan = step.state.plans.get(worker.task)
    stalled = WorkerStalled(
        node=step.config.node,
        task=worker.task,
        worker=worker.name,
        rank=worker.rank,
        stage=pulse.stage,
        iteration=pulse.iteration,
        micro_batch=pulse.micro_batch,
        waiting_in_collective=pulse.waiting,
        stalled_ms=still.stood_ms,
        budget_ms=sure_ms if level == SURE else suspect_ms,
        fault_ns=pulse.fault_ns,
        seen_ns=now_ns,
        is_sure=level == SURE,
        usual_ms=usual_ms,
        cpu=_cpu_of(still, pulse),
        epoch=plan.epoch if plan is not None else 0,
    )
    step.report(stalled, f"{worker.name} stands still in {pulse.stage.name.lower()}")


def tell_waits(step: Step, task: str) -> None:
    """A node is silent: whoever waits longer than is usual may wait for it, long before that would be told as a stall.
    By itself it is nothing (CPUs are busy, links are slow); the coordinator has other evidence against that node."""
    waits = tuple(w.name for w in step.state.of_task(task) if not w.is_dead and not w.waiting and _waits_long(step, w))
    answer = WorkersWait(step.config.node, task, waits)
    step.actions.append(SendCoordinator(answer, "asked who waits"))


def _waits_long(step: Step, worker: Worker) -> bool:
    pulse, stood_ms = worker.pulse, worker.still.stood_ms
    if pulse is None or not pulse.waiting:
        return False
    if pulse.stage is Stage.HEAL and pulse.declared_ms:  # behind its last iteration, for others who are in it
        return stood_ms > step.config.waits_ms_min
    if pulse.stage not in MEASURED:
        return False
    learned = times_of(step, worker).budget(int(pulse.stage))
    return learned is not None and stood_ms > max(step.config.waits_ms_min, WAITS_FACTOR * learned[0])


def _cpu_of(still: Standstill, pulse: Pulse) -> Cpu:
    """Of the time it stood still: a twentieth computing is busy, a fifth waiting for the processor is starved."""
    if still.activity is None or pulse.activity is None or still.stood_ms <= 0:
        return Cpu.UNKNOWN
    ran = (pulse.activity.ran_ms - still.activity.ran_ms) / still.stood_ms
    starved = (pulse.activity.starved_ms - still.activity.starved_ms) / still.stood_ms
    if starved >= 0.2:
        return Cpu.STARVED
    return Cpu.BUSY if ran >= 0.05 else Cpu.IDLE


# ------------------------------------------------------------ what is usual


def times_of(step: Step, worker: Worker) -> PhaseTimes:
    """Of the role: an heir is measured by what its predecessor showed."""
    key = (worker.task, worker.rank)
    times = step.state.times.get(key)
    if times is None:
        times = step.state.times[key] = PhaseTimes(worker.stall_factor, step.config.stall_ms_min)
    return times


def _learn(step: Step, worker: Worker, pulse: Pulse) -> None:
    """Every interval but those of the worker's first iteration, and of the one in which an epoch began."""
    if worker.stall_rebase or worker.is_stopped:
        return
    for stage, iteration, ms in pulse.intervals:
        if stage not in MEASURED and stage != Stage.IDLE:
            continue
        if worker.first_iteration is None:
            worker.first_iteration = iteration
        if iteration > worker.first_iteration and iteration != worker.rebased_iteration:
            times_of(step, worker).add(stage, ms)


def budget_of(step: Step, worker: Worker, pulse: Pulse) -> Budget | None:
    config, spec = step.config, step.state.specs[worker.task]
    stage, budgets = pulse.stage, spec.budgets
    if stage in UNBOUNDED:
        return None
    if stage in MEASURED:
        learned = times_of(step, worker).budget(int(stage))
        if learned is None or worker.first_iteration is None or pulse.iteration <= worker.first_iteration:
            return _first(learned, budgets.first_iteration_ms)
        return _declared(budgets.iteration_ms) if budgets.iteration_ms else learned
    if stage is Stage.IDLE:
        return _idle(times_of(step, worker).budget(int(stage)), config.idle_suspect_ms, config.idle_ms_max)
    declared_ms = {
        Stage.STARTING: config.start_ms_max,
        Stage.HEAL: config.heal_ms_max,
        Stage.EVALUATE: budgets.evaluation_ms,
        Stage.SAVE: budgets.save_ms,
    }[stage]
    return _declared(pulse.declared_ms or declared_ms)


def _first(learned: Budget | None, ms: float) -> Budget:
    """Where the role's former holder showed what is usual, an heir's first iteration is suspect long before its bound,
    which is then a verdict only with evidence."""
    if learned is None:
        return _declared(ms)
    usual_ms, _, sure_ms = learned
    return usual_ms, min(HEIR_FACTOR * sure_ms, ms), ms


def _idle(learned: Budget | None, suspect_ms: float, ms: float) -> Budget:
    """The script's own code: it may log, or write for a while, so only evidence makes a verdict before the bound."""
    if learned is None:
        return _declared(ms)
    return learned[0], min(max(learned[1], suspect_ms), ms), ms


def _declared(ms: float) -> Budget:
    """A bound that somebody stated is no statistic: there is nothing to suspect before it."""
    return 0.0, ms, ms


# ------------------------------------------------------------ pace, for comparison with others


def _keep_pace(step: Step, worker: Worker, pulse: Pulse) -> None:
    """Committed iterations, as the coordinator compares them (coordinator/slowness.py)."""
    for sums in pulse.iterations:
        before, worker.sums = worker.sums, sums
        if before is None or worker.stall_rebase:
            continue
        iterations, micro_batches = sums.iteration - before.iteration, sums.micro_batches - before.micro_batches
        if iterations < 1:
            continue  # back to a checkpoint
        compute_ms = (sums.compute_ns - before.compute_ns) / 1e6 / max(micro_batches, iterations)
        waits = zip(sums.waits_ns, before.waits_ns, strict=True)
        waits_ms = tuple((now - then) / 1e6 / iterations for now, then in waits)
        worker.pace.append(PaceSample(sums.iteration, compute_ms, waits_ms))
    while len(worker.pace) > step.config.pace_kept_max:
        worker.pace.popleft()
