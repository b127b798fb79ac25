"""JOB.yaml as people write it, into what the coordinator admits.

The fields are those of INTERFACES.md. What this version does not decide yet (weight, priority, a
range of workers, several layouts) is taken where it has one meaning and refused by name where it
would be ignored.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from unicron.coordinator.job import Job
from unicron.runtime.files import FileProblem, load_yaml
from unicron.types import Layout


class LayoutFields(msgspec.Struct, forbid_unknown_fields=True):
    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    num_micro_batches: int = 0  # 0: from global_batch, else 4 a replica


class CheckpointFields(msgspec.Struct, forbid_unknown_fields=True):
    dir: str = ""
    every: int = 0


class RestartFields(msgspec.Struct, forbid_unknown_fields=True):
    max: int = 10
    fatal_exit_codes: tuple[int, ...] = ()
    grace_s: float = 30.0
    stopped_grace_s: float = 5.0


class BackupFields(msgspec.Struct, forbid_unknown_fields=True):
    every: int = 0
    sync: bool = False


class JobFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    command: tuple[str, ...]
    cwd: str = ""
    env: dict[str, str] = {}
    log_dir: str = ""
    managed: bool = True
    understudies: int = 1
    layout: LayoutFields | None = None
    layouts: str | tuple[LayoutFields, ...] = ()
    global_batch: int = 0  # in samples
    checkpoint: CheckpointFields = msgspec.field(default_factory=CheckpointFields)
    restart: RestartFields = msgspec.field(default_factory=RestartFields)
    weight: float = 1.0
    priority: int = 0
    workers: dict[str, int] = {}
    model: dict[str, int] = {}
    throughput: Any = "measured"
    backup: BackupFields = msgspec.field(default_factory=BackupFields)
    recovery: str = "in-order"
    exact: bool = False
    timeouts: dict[str, Any] = {}


# field -> (values that say what happens anyway, what to do instead)
NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "weight": ((1.0,), "one task is planned at a time"),
    "priority": ((0,), "tasks are admitted in the order they come"),
    "throughput": (("measured",), "it is measured"),
    "recovery": (("in-order",), "recovery is in-order"),
    "exact": ((False,), "sums are in floating point"),
    "timeouts": (({},), "they are fixed"),
}


def load_job(path: Path) -> dict[str, Any]:
    """The job as the coordinator's `submit` takes it."""
    file = load_yaml(path, JobFile)
    try:
        job = job_of(file, path.resolve().parent)
    except FileProblem as problem:
        raise FileProblem(f"{path}: {problem}") from None
    return dict(msgspec.to_builtins(job))


def job_of(file: JobFile, directory: Path) -> Job:
    """Relative paths are the file's, not those of whoever submits it."""
    _refuse_what_would_be_ignored(file)
    checkpoint_dir = file.checkpoint.dir
    return Job(
        name=file.name,
        command=file.command,
        layout=_layout(file),
        cwd=str(directory / file.cwd),
        env=file.env,
        log_dir=str(directory / (file.log_dir or "unicron-logs")),
        managed=file.managed,
        understudies=file.understudies,
        stopped_grace_ms=round(file.restart.stopped_grace_s * 1000),
        checkpoint_dir=str(directory / checkpoint_dir) if checkpoint_dir else "",
        checkpoint_every=file.checkpoint.every,
        restart_max=file.restart.max,
        fatal_exit_codes=file.restart.fatal_exit_codes,
    )


def _refuse_what_would_be_ignored(file: JobFile) -> None:
    for name, (harmless, instead) in NOT_YET.items():
        if getattr(file, name) not in harmless:
            raise FileProblem(f"{name} cannot be chosen in this version: {instead}; leave it out")
    if file.backup.every:
        raise FileProblem("backup is not there in this version: leave it out, and use checkpoint")


def _layout(file: JobFile) -> Layout:
    """One layout: `layout`, or the only one of `layouts`; its workers lie within `workers`."""
    given = [
        *([file.layout] if file.layout else []),
        *(file.layouts if file.layouts != "auto" else ()),
    ]
    if len(given) > 1 or (isinstance(file.layouts, str) and file.layouts not in ("", "auto")):
        raise FileProblem("give one layout: several cannot be chosen from in this version")
    fields = given[0] if given else LayoutFields(dp=max(file.workers.get("min", 1), 1))
    if isinstance(fields, str):
        raise FileProblem(f"layouts: {fields!r} is none")
    layout = layout_of(fields, file.global_batch)
    least, most = file.workers.get("min", 1), file.workers.get("max", layout.world_size)
    if not least <= layout.world_size <= most:
        raise FileProblem(f"the layout has {layout.world_size} workers, outside {least} to {most}")
    return layout


def layout_of(fields: LayoutFields, global_batch: int = 0) -> Layout:
    count = fields.num_micro_batches
    if global_batch:
        if global_batch % fields.micro_batch:
            raise FileProblem(f"global_batch {global_batch} is no multiple of micro_batch {fields.micro_batch}")
        if count and count != global_batch // fields.micro_batch:
            raise FileProblem("num_micro_batches contradicts global_batch: leave one of them out")
        count = global_batch // fields.micro_batch
    return Layout(
        tp=fields.tp,
        pp=fields.pp,
        dp=fields.dp,
        micro_batch=fields.micro_batch,
        num_micro_batches=count or 4 * fields.dp,
    )


def world_layout(world: int, tp: int, pp: int, micro_batch: int, micro_batches: int) -> Layout:
    """The layout of `unicron run`: data-parallel over what tp and pp leave."""
    if min(world, tp, pp, micro_batch) < 1:
        raise FileProblem("workers, tp, pp and micro-batch must be at least 1")
    if world % (tp * pp):
        raise FileProblem(
            f"{world} workers do not divide into replicas of tp {tp} x pp {pp}: use a multiple of {tp * pp}"
        )
    fields = LayoutFields(tp, pp, world // (tp * pp), micro_batch, micro_batches)
    return layout_of(fields)


def absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""
