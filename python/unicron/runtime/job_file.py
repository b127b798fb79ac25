"""JOB.yaml as people write it, into what the coordinator admits.

Its fields are explained in examples/job.yaml and docs/OPERATION.md. What this version does not do (other recoveries,
copies every N iterations) is refused by name where it would be ignored. T(t, x) is made in job_throughput.py.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from unicron.coordinator.job import Job, refusal_of
from unicron.healing.buddies import EVERY_MIN
from unicron.runtime import job_throughput
from unicron.runtime.files import FileProblem, load_yaml
from unicron.runtime.job_throughput import Asked, ModelFields
from unicron.types import Budgets, Layout


class LayoutFields(msgspec.Struct, forbid_unknown_fields=True):
    tp: int = 1
    pp: int = 1
    dp: int = 0  # 0: as many as workers.max allows
    ep: int = 1  # experts are spread over so many of the dp indices, which are then one replica
    micro_batch: int = 1
    num_micro_batches: int = 0  # 0: from global_batch, else 4 a replica
    optimizer: Literal["plain", "distributed"] = "plain"  # distributed: each replica holds a shard of its state
    optimizer_instances: int = 1  # of the distributed optimizer: so many replicas hold each shard


class WorkerFields(msgspec.Struct, forbid_unknown_fields=True):
    min: int = 0  # 0: all of the layout to begin with, and then whatever survives
    max: int = 0  # 0: the layout's
    unit: int = 0  # 0: one replica


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


class TimeoutFields(msgspec.Struct, forbid_unknown_fields=True):
    iteration_s: float | Literal["auto"] = "auto"
    first_iteration_s: float = 1800.0
    evaluation_s: float = 3600.0
    save_s: float = 1800.0


class JobFile(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    command: tuple[str, ...]
    cwd: str = ""
    env: dict[str, str] = {}
    log_dir: str = ""
    managed: bool = True
    understudies: int = 1
    standbys: int = 0
    layout: LayoutFields | None = None
    layouts: Literal["auto"] | tuple[LayoutFields, ...] = "auto"
    global_batch: int = 0  # in samples
    checkpoint: CheckpointFields = msgspec.field(default_factory=CheckpointFields)
    restart: RestartFields = msgspec.field(default_factory=RestartFields)
    weight: float = 1.0
    priority: int = 0
    workers: WorkerFields = msgspec.field(default_factory=WorkerFields)
    model: ModelFields | None = None
    throughput: Literal["measured", "model"] | dict[int, float | str] = "measured"
    backup: BackupFields = msgspec.field(default_factory=BackupFields)
    recovery: Literal["in-order", "fastest"] = "in-order"
    exact: bool = False
    timeouts: TimeoutFields = msgspec.field(default_factory=TimeoutFields)
    observe_only: bool = False


# field -> (the value that says what happens anyway, what happens)
NOT_YET: dict[str, tuple[Any, str]] = {
    "recovery": ("in-order", "recovery is in-order"),
}


def load_job(path: Path, gpu: str = "") -> dict[str, Any]:
    """The job as the coordinator's `submit` takes it. gpu: type of the cluster's slots, '' where there are none.

    Raises FileProblem with the file's name and what is wrong, in one line.
    """
    file = load_yaml(path, JobFile)
    try:
        job = job_of(file, path.resolve().parent, gpu)
    except FileProblem as problem:
        raise FileProblem(f"{path}: {problem}") from None
    return dict(msgspec.to_builtins(job))


def refuse_missing_script(job: Mapping[str, Any]) -> None:
    """Said before it is submitted, and not by every worker in turn. A folder that only the nodes have is not judged."""
    folder = Path(job["cwd"])
    script = next((word for word in job["command"][1:2] if word.endswith(".py")), "")
    if script and folder.is_dir() and not (folder / script).is_file():
        raise FileProblem(f"command: no {script} in {folder}, where relative paths begin (cwd, else the file's folder)")


def doubt_of(job: Mapping[str, Any]) -> str:
    """What may be a slip in the program's name; the nodes may have what this machine does not."""
    program, path = job["command"][0], (job.get("env") or {}).get("PATH")
    if os.sep in program or shutil.which(program, path=path) is not None:
        return ""
    return f"no program {program} is in this machine's PATH: do the nodes have it?"


def job_of(file: JobFile, directory: Path, gpu: str = "") -> Job:
    """Relative paths are the file's, not those of whoever submits it."""
    _refuse_what_would_be_ignored(file)
    _refuse_numbers(file)
    checkpoint_dir = file.checkpoint.dir
    layout, least, unit = _widths(file, gpu)
    layout = msgspec.structs.replace(layout, exact=file.exact, **_buddies(file.backup, layout))
    others = tuple(
        msgspec.structs.replace(layout_of(fields), num_micro_batches=layout.num_micro_batches, exact=file.exact)
        for fields in _listed(file)
    )
    slots = tuple(other.world_size for other in others)
    asked = Asked(file.model, file.global_batch, layout, least, unit, gpu, slots)
    known = job_throughput.known(asked, file.throughput)
    job = Job(
        name=file.name,
        command=file.command,
        layout=layout,
        layouts=others,
        cwd=str(directory / file.cwd),
        env=file.env,
        log_dir=str(directory / (file.log_dir or "unicron-logs")),
        managed=file.managed,
        understudies=file.understudies,
        standbys=file.standbys,
        stop_grace_ms=round(file.restart.grace_s * 1000),
        stopped_grace_ms=round(file.restart.stopped_grace_s * 1000),
        checkpoint_dir=str(directory / checkpoint_dir) if checkpoint_dir else "",
        checkpoint_every=file.checkpoint.every,
        restart_max=file.restart.max,
        fatal_exit_codes=file.restart.fatal_exit_codes,
        weight=file.weight,
        priority=file.priority,
        replicas_min=least,
        replicas_unit=unit,
        throughput=known.flops,
        measured=known.is_measured,
        iteration_flop=known.iteration_flop,
        budgets=_budgets(file.timeouts),
        observe_only=file.observe_only,
    )
    if why := refusal_of(job):
        raise FileProblem(why)
    return job


def _buddies(backup: BackupFields, layout: Layout) -> dict[str, Any]:
    """Copies of what has no replica (training/buddies.py): of every step, or every so many beside the training."""
    wants = backup.sync or backup.every > 0
    if wants and (not layout.sharded or layout.num_replicas < 2):
        raise FileProblem(
            "backup: what is copied are the shards of a distributed optimizer: layout.optimizer must be distributed, "
            "and dp at least 2 x ep"
        )
    if backup.sync and backup.every:
        raise FileProblem("backup: sync: true copies after every iteration: leave out every, or say sync: false")
    if backup.every < 0 or 0 < backup.every < EVERY_MIN:
        raise FileProblem(
            f"backup: every is {backup.every}, must be at least {EVERY_MIN} (after each iteration: sync: true)"
        )
    return {"buddy": wants, "buddy_every": backup.every}


def _budgets(fields: TimeoutFields) -> Budgets:
    return Budgets(
        iteration_ms=0.0 if fields.iteration_s == "auto" else fields.iteration_s * 1000,
        first_iteration_ms=fields.first_iteration_s * 1000,
        evaluation_ms=fields.evaluation_s * 1000,
        save_ms=fields.save_s * 1000,
    )


def _refuse_what_would_be_ignored(file: JobFile) -> None:
    for name, (harmless, happens) in NOT_YET.items():
        if getattr(file, name) != harmless:
            raise FileProblem(f"{name} cannot be chosen in this version: {happens}; leave it out")


def _refuse_numbers(file: JobFile) -> None:
    """What no plan and no process could mean, by its name in the file."""
    numbers = {
        "weight": file.weight,
        "restart.grace_s": file.restart.grace_s,
        "restart.stopped_grace_s": file.restart.stopped_grace_s,
        "restart.max": file.restart.max,
        "checkpoint.every": file.checkpoint.every,
        "global_batch": file.global_batch,
        "understudies": file.understudies,
        "standbys": file.standbys,
        "workers.min": file.workers.min,
        "workers.max": file.workers.max,
        "workers.unit": file.workers.unit,
    }
    bounds = msgspec.structs.asdict(file.timeouts)
    for name, bound in bounds.items():
        if bound != "auto" and not (math.isfinite(bound) and bound > 0):
            raise FileProblem(f"timeouts.{name} is {bound}: give seconds above 0")
    for name, value in numbers.items():
        if not math.isfinite(value) or value < 0:
            raise FileProblem(f"{name} is {value}: give a number of 0 or more")
    if file.checkpoint.every and not file.checkpoint.dir:
        raise FileProblem("checkpoint.every without checkpoint.dir: say where checkpoints go")


# ------------------------------------------------------------ layouts


def _widths(file: JobFile, gpu: str) -> tuple[Layout, int, int]:
    """(full layout, least replicas or 0, step in replicas)."""
    given = [file.layout] if file.layout is not None else list(file.layouts if file.layouts != "auto" else ())
    if file.layout is not None and file.layouts != "auto":
        raise FileProblem("give layout or layouts, not both")
    workers = file.workers
    if workers.max and workers.max < workers.min:
        raise FileProblem(f"workers.max {workers.max} is below workers.min {workers.min}")
    if len(given) > 1 and not _listed(file):
        return _of_list(file, given)
    fields = given[0] if given else _chosen(file, gpu)
    _check_sizes(fields)
    size = fields.tp * fields.pp * fields.ep
    dp = fields.dp or (workers.max or workers.min or size) // size * fields.ep
    if dp == 0:
        raise FileProblem(f"workers.max {workers.max} is less than one replica of {_named(fields)}")
    layout = layout_of(msgspec.structs.replace(fields, dp=dp), file.global_batch)
    least, most = workers.min or 1, workers.max or layout.world_size
    if not least <= layout.world_size <= most:
        raise FileProblem(f"the layout has {layout.world_size} workers, outside {least} to {most}")
    return layout, *_steps(workers, layout)


def _listed(file: JobFile) -> tuple[LayoutFields, ...]:
    """The layouts that a running task may be brought into, the one it begins with first; () where only dp differs:
    those are widths of one layout."""
    given = () if file.layouts == "auto" else file.layouts
    shapes = {(fields.tp, fields.pp, fields.ep, fields.optimizer) for fields in given}
    if len(shapes) < 2:
        return ()
    for fields in given:
        _check_sizes(fields)
        if fields.dp < 1:
            raise FileProblem("layouts: several need dp, each its own")
    return given


def _check_sizes(fields: LayoutFields) -> None:
    for name in ("tp", "pp", "ep", "micro_batch"):
        if getattr(fields, name) < 1:
            raise FileProblem(f"layout: {name} is {getattr(fields, name)}, must be at least 1")
    if fields.dp < 0 or fields.num_micro_batches < 0:
        raise FileProblem("layout: dp and num_micro_batches must not be negative")


def _steps(workers: WorkerFields, layout: Layout) -> tuple[int, int]:
    """(least replicas, step). A width changes by whole replicas, so min and unit are multiples of one."""
    size = layout.replica_size
    if workers.unit % size:
        raise FileProblem(f"workers.unit {workers.unit} is no multiple of a replica's {size} workers (tp x pp)")
    step = max(workers.unit // size, 1)
    if not workers.min:
        if step > 1:
            raise FileProblem("workers.unit without workers.min: say the least number of workers")
        return 0, 1
    if workers.min % size:
        raise FileProblem(f"workers.min {workers.min} is no multiple of a replica's {size} workers (tp x pp)")
    least = workers.min // size
    if (layout.num_replicas - least) % step:
        raise FileProblem(
            f"{layout.world_size} workers are not workers.min {workers.min} and a multiple of unit {workers.unit}"
        )
    return least, step


def _of_list(file: JobFile, given: Sequence[LayoutFields]) -> tuple[Layout, int, int]:
    """Several layouts that differ in dp only: the widths of one task."""
    for fields in given:
        _check_sizes(fields)
        if fields.dp < 1:
            raise FileProblem("layouts: several need dp, each its own")
    first = given[0]
    if len({fields.micro_batch for fields in given}) > 1:
        raise FileProblem("layouts differ in micro_batch: what is learned shall not change with the layout; keep one")
    size = first.tp * first.pp
    low, high = file.workers.min or size, file.workers.max or max(f.dp for f in given) * size
    widths = sorted({f.dp for f in given if low <= f.dp * size <= high})
    if any(dp % first.ep for dp in widths):
        raise FileProblem(f"layouts: dp {widths} are not all multiples of ep {first.ep}")
    if not widths:
        raise FileProblem(f"no layout of the list has {low} to {high} workers")
    steps = {b - a for a, b in itertools.pairwise(widths)}
    if len(steps) > 1:
        raise FileProblem(f"layouts: dp {widths} are not evenly spaced: leave out or add some")
    layout = layout_of(msgspec.structs.replace(first, dp=widths[-1]), file.global_batch)
    return layout, widths[0] // first.ep, steps.pop() // first.ep if steps else 1


def _chosen(file: JobFile, gpu: str) -> LayoutFields:
    """layouts: auto. By the model, if the cluster's GPU type and the task's model are known; else one worker a
    replica."""
    workers = file.workers
    if file.model is None or not gpu or not workers.max:
        return LayoutFields()
    tp, pp, micro_batch = job_throughput.best_layout(
        file.model, file.global_batch, gpu, (workers.min or workers.max, workers.max, max(workers.unit, 1))
    )
    return LayoutFields(tp, pp, 0, micro_batch=micro_batch)


def layout_of(fields: LayoutFields, global_batch: int = 0) -> Layout:
    count = fields.num_micro_batches
    dp = fields.dp or 1
    if global_batch:
        if global_batch % fields.micro_batch:
            raise FileProblem(f"global_batch {global_batch} is no multiple of micro_batch {fields.micro_batch}")
        if count and count != global_batch // fields.micro_batch:
            raise FileProblem("num_micro_batches contradicts global_batch: leave one of them out")
        count = global_batch // fields.micro_batch
    return Layout(
        tp=fields.tp,
        pp=fields.pp,
        dp=dp,
        ep=fields.ep,
        micro_batch=fields.micro_batch,
        num_micro_batches=count or 4 * dp,
        sharded=fields.optimizer == "distributed",
        instances=fields.optimizer_instances,
    )


def _named(fields: LayoutFields) -> str:
    return f"tp {fields.tp} x pp {fields.pp}" + (f" x ep {fields.ep}" if fields.ep > 1 else "")


def world_layout(world: int, tp: int, pp: int, micro_batch: int, micro_batches: int, *, ep: int = 1) -> Layout:
    """The layout of `unicron run`: data-parallel over what tp and pp leave."""
    if min(world, tp, pp, ep, micro_batch) < 1:
        raise FileProblem("workers, tp, pp, ep and micro-batch must be at least 1")
    fields = LayoutFields(tp, pp, world // (tp * pp), ep, micro_batch, micro_batches)
    size = tp * pp * ep
    if world % size:
        raise FileProblem(f"{world} workers do not divide into replicas of {_named(fields)}: use a multiple of {size}")
    return layout_of(fields)


def absolute(path: str) -> str:
    return os.path.abspath(path) if path else ""
