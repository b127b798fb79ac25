"""A job: what a user asks for, checked once at the door. A task is a job that was admitted."""

from __future__ import annotations

import msgspec

from unicron.types import Layout


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    command: tuple[str, ...]
    layout: Layout = Layout()
    cwd: str = ""
    env: dict[str, str] = {}
    log_dir: str = ""
    managed: bool = True  # False: a torchrun script that never joins
    understudies: int = 1  # per node that has members; at most what the agent offers
    stopped_grace_ms: int = 5_000  # 0: a stopped worker is ended at once
    stall_factor: float = 3.0
    checkpoint_dir: str = ""
    checkpoint_every: int = 0  # 0: never
    restart_max: int = 10  # workers (managed) or whole restarts (unmanaged)
    fatal_exit_codes: tuple[int, ...] = ()


def refusal_of(job: Job) -> str:
    """Why this job cannot be taken at all, one line; '' when it can."""
    layout = job.layout
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "micro_batch": layout.micro_batch}
    for name, size in sizes.items():
        if size < 1:
            return f"layout: {name} is {size}, must be at least 1"
    if layout.cp != 1 or layout.ep != 1:
        return f"layout: cp {layout.cp} and ep {layout.ep} must be 1"
    if not job.name:
        return "name is empty"
    if not job.command:
        return "command is empty"
    if job.managed and layout.num_micro_batches < layout.dp:
        return (
            f"layout: {layout.num_micro_batches} micro-batches do not reach {layout.dp} replicas; "
            "give at least one each"
        )
    if job.understudies < 0 or job.restart_max < 0 or job.stopped_grace_ms < 0:
        return "understudies, restart_max and stopped_grace_ms must not be negative"
    if job.stall_factor <= 1.0:
        return f"stall_factor is {job.stall_factor}, must be above 1"
    return ""
