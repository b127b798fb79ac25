"""A job: what a user asks for, checked once at the door. A task is a job that was admitted."""

from __future__ import annotations

import msgspec

from unicron.planner.cluster import FLOPS_MAX, NAME, WEIGHT_MAX
from unicron.types import Budgets, Layout, refusal_of_instances

ITERATION_FLOP_MAX = 1e30  # above any model's, as FLOPS_MAX is above any task's FLOP/s


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    command: tuple[str, ...]
    layout: Layout = Layout()
    layouts: tuple[Layout, ...] = ()  # that it may be brought into while it runs; (): it keeps tp, pp and sharding
    cwd: str = ""
    env: dict[str, str] = {}
    log_dir: str = ""
    managed: bool = True  # False: a torchrun script that never joins
    understudies: int = 1  # per node that has members; at most what the agent offers
    standbys: int = 0  # whole nodes that stand warm beside it, at most: how many and which is decided (standbys.py)
    stopped_grace_ms: int = 5_000  # 0: a stopped worker is ended at once
    stop_grace_ms: int = 30_000  # from SIGTERM to SIGKILL when the task is stopped; 0: killed at once
    stall_factor: float = 3.0
    budgets: Budgets = Budgets()
    observe_only: bool = False  # nothing is ended for standing still; the incident says what would have been
    slow_ratio: float = 1.05  # a rank that computes so much longer than its peers is told
    checkpoint_dir: str = ""
    checkpoint_every: int = 0  # 0: never
    restart_max: int = 10  # workers (managed) or whole restarts (unmanaged)
    fatal_exit_codes: tuple[int, ...] = ()
    # what the planner needs
    weight: float = 1.0  # w(t) of its FLOP/s
    priority: int = 0  # order of admission, higher first
    replicas_min: int = 0  # T_necessary(t); 0: all of the layout to begin with, and then whatever survives
    replicas_unit: int = 1  # its widths lie so many replicas apart
    throughput: dict[int, float] = {}  # T(t, x): slots -> FLOP/s, as stated or modelled; {}: nothing is known
    measured: bool = True  # what it shows while it runs replaces that
    iteration_flop: float = 0.0  # FLOP of one iteration: makes FLOP/s of its speed; 0: only ratios of speeds count


def refusal_of(job: Job) -> str:
    """Why this job cannot be taken at all, one line; '' when it can."""
    layout = job.layout
    sizes = {
        "tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "micro_batch": layout.micro_batch,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 1:
            return f"layout: {name} is {size}, must be at least 1"
    if layout.cp != 1:
        return f"layout: cp {layout.cp} must be 1: context parallelism cannot be healed"
    if why := _experts_refusal(job):
        return why
    if why := refusal_of_instances(layout):
        return f"layout: {why}"
    for other in job.layouts:
        if why := _layout_refusal(layout, other):
            return why
    if not NAME.fullmatch(job.name):
        return f"name {job.name!r}: letters, digits, '_', '.' and '-' only, at most 128"
    if not job.command:
        return "command is empty"
    if job.managed and layout.num_micro_batches < layout.dp:
        return (
            f"layout: {layout.num_micro_batches} micro-batches do not reach {layout.dp} "
            f"{'replicas' if layout.ep == 1 else 'lanes'}; give at least one each"
        )
    if min(job.understudies, job.standbys, job.restart_max, job.stopped_grace_ms, job.stop_grace_ms) < 0:
        return "understudies, standbys, restart_max, stopped_grace_ms and stop_grace_ms must not be negative"
    if job.stall_factor <= 1.0:
        return f"stall_factor is {job.stall_factor}, must be above 1"
    if not job.slow_ratio > 1.0:
        return f"slow_ratio is {job.slow_ratio}, must be above 1"
    budgets = job.budgets
    if budgets.iteration_ms < 0:
        return f"budgets: iteration_ms is {budgets.iteration_ms}, must be 0 (learned) or more"
    if min(budgets.first_iteration_ms, budgets.evaluation_ms, budgets.save_ms) <= 0:
        return "budgets: the first iteration, evaluation and saving need more than 0 ms"
    return _planning_refusal(job)


def _experts_refusal(job: Job) -> str:
    """Why experts cannot be spread so; '' when they can."""
    layout = job.layout
    if layout.dp % layout.ep:
        return (
            f"layout: dp {layout.dp} is no multiple of ep {layout.ep}: experts are spread over so many of its indices"
        )
    if layout.ep > 1 and layout.num_micro_batches % layout.ep:
        return (
            f"layout: {layout.num_micro_batches} micro-batches are no multiple of ep {layout.ep}: the lanes of a "
            "replica compute in step, one micro-batch each"
        )
    if layout.ep > 1 and job.layouts:
        return "layouts: with ep above 1 a running task keeps its layout; leave layouts out"
    return ""


def _layout_refusal(first: Layout, other: Layout) -> str:
    """Why the job cannot go over to this layout; '' when it can."""
    named = f"layouts: {other.tp},{other.pp},{other.dp}"
    if min(other.tp, other.pp, other.dp) < 1 or other.cp != 1 or other.ep != 1:
        return f"{named}: tp, pp and dp must be at least 1, cp and ep 1"
    for name in ("micro_batch", "num_micro_batches", "exact"):
        if getattr(first, name) != getattr(other, name):
            return f"{named}: {name} must be that of the first layout: what is learned shall not change with the layout"
    if why := refusal_of_instances(msgspec.structs.replace(other, buddy=first.buddy)):
        return f"{named}: {why}"
    if other.num_micro_batches < other.dp:
        return f"{named}: {other.num_micro_batches} micro-batches do not reach {other.dp} replicas"
    return ""


def _planning_refusal(job: Job) -> str:
    layout = job.layout
    if not 0 <= job.weight <= WEIGHT_MAX:
        return f"weight {job.weight} must be a number of 0 to {WEIGHT_MAX:g}"
    if not 0 <= job.iteration_flop <= ITERATION_FLOP_MAX:
        return f"iteration_flop {job.iteration_flop} must be a number of 0 to {ITERATION_FLOP_MAX:g}"
    most, named = layout.num_replicas, f"dp {layout.dp}" if layout.ep == 1 else f"{layout.num_replicas} replicas"
    if not 0 <= job.replicas_min <= most:
        return f"replicas_min {job.replicas_min} is outside 0 to {named}"
    if job.replicas_unit < 1 or (job.replicas_min and (most - job.replicas_min) % job.replicas_unit):
        return f"replicas_unit {job.replicas_unit} does not lead from {job.replicas_min} to {named}"
    for slots, flops in job.throughput.items():
        if not 0 <= flops <= FLOPS_MAX:
            return f"throughput at {slots} slots is {flops}; give FLOP/s of 0 to {FLOPS_MAX:g}"
    if job.throughput:
        least = job.replicas_min or 1
        wanted = {r * layout.replica_size for r in range(least, most + 1)}
        needed = {r * layout.replica_size for r in range(least, most + 1, job.replicas_unit)}
        if holes := sorted(needed - job.throughput.keys()):
            return f"throughput has no value for {holes[:5]} slots, which its workers allow"
        wanted |= {other.world_size for other in job.layouts}
        if strange := sorted(job.throughput.keys() - wanted):
            return f"throughput names {strange[:5]} slots, which its workers do not allow"
    return ""
