"""What is known of a job's T(t, x) before it runs: stated, modelled, or nothing (T(t, x) of the paper Unicron).

The analytic model needs the model's shape and the type of the cluster's GPUs. It is made here, by whoever submits, and
not in the coordinator: compiling and searching takes seconds. The coordinator gets numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from unicron.runtime.files import FileProblem
from unicron.types import Layout


class ModelFields(msgspec.Struct, forbid_unknown_fields=True):
    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int
    ffn: int = 0  # 0: 4 x hidden
    query_groups: int = 0  # 0: one a head
    gated: bool = False
    tied: bool = True


class Asked(NamedTuple):
    model: ModelFields | None
    global_batch: int
    layout: Layout  # full width
    least: int  # replicas; 0: see Job.replicas_min
    unit: int  # replicas
    gpu: str
    others: tuple[int, ...] = ()  # slots of the other layouts it may take

    @property
    def counts(self) -> list[int]:
        """Numbers of replicas it may have."""
        return list(range(self.least or 1, self.layout.num_replicas + 1, self.unit))

    @property
    def samples(self) -> int:
        return self.layout.num_micro_batches * self.layout.micro_batch


class Known(NamedTuple):
    flops: dict[int, float]  # slots -> FLOP/s; {}: nothing
    is_measured: bool  # what it shows replaces that
    iteration_flop: float


def known(asked: Asked, throughput: str | Mapping[int, float | str]) -> Known:
    """Raises FileProblem for a table with a hole, for a model that fits no layout, and for `model` without one."""
    iteration_flop = _iteration_flop(asked)
    if not isinstance(throughput, str):
        return Known(_table(asked, throughput), False, iteration_flop)
    if asked.model is not None and asked.gpu:
        return Known(_modelled(asked), throughput == "measured", iteration_flop)
    if throughput == "model":
        missing = "model" if asked.model is None else "the cluster's GPU type (gpu in the coordinator's CONFIG)"
        raise FileProblem(f"throughput: model needs {missing}; give it, or a table, or use measured")
    return Known({}, True, iteration_flop)


def _table(asked: Asked, table: Mapping[int, float | str]) -> dict[int, float]:
    size = asked.layout.replica_size
    wanted = [count * size for count in asked.counts]
    if holes := [slots for slots in wanted if slots not in table]:
        raise FileProblem(f"throughput has no value for {_few(holes)} workers, which workers and layouts allow")
    allowed = {count * size for count in range(asked.least or 1, asked.layout.num_replicas + 1)}
    allowed |= set(asked.others)
    if strange := sorted(table.keys() - allowed):
        raise FileProblem(f"throughput names {_few(strange)} workers, which workers and layouts do not allow")
    flops = {}
    for slots, value in table.items():
        try:
            flops[slots] = float(value)
        except ValueError:
            flops[slots] = math.nan
        if not math.isfinite(flops[slots]) or flops[slots] < 0:
            raise FileProblem(f"throughput at {slots} workers is {value}: give FLOP/s of 0 or more")
    return flops


def _few(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _shape(model: ModelFields) -> Any:
    from unicron.performance.errors import PerformanceError
    from unicron.performance.shape import ModelShape, checked_shape

    try:
        return checked_shape(ModelShape(**msgspec.structs.asdict(model)))
    except PerformanceError as error:
        raise FileProblem(str(error)) from None


def _iteration_flop(asked: Asked) -> float:
    if asked.model is None:
        return 0.0
    from unicron.performance.shape import sample_flop

    return float(sample_flop(_shape(asked.model)) * asked.samples)


def _modelled(asked: Asked) -> dict[int, float]:
    """Of this very layout at each of its widths. A width that does not fit the memory earns nothing."""
    from unicron.performance.errors import PerformanceError
    from unicron.performance.memory import RECOMPUTE_FULL, RECOMPUTE_NONE
    from unicron.performance.search import TaskLayout, TaskModel, estimate

    assert asked.model is not None
    layout = asked.layout
    task = TaskModel(_shape(asked.model), asked.samples, uneven=True)
    machine, calibration = _machine(asked.gpu)
    flops, least_gib = {}, math.inf
    for count in range(asked.least or 1, layout.num_replicas + 1):
        best = 0.0
        for which in (RECOMPUTE_NONE, RECOMPUTE_FULL):
            try:
                found = estimate(
                    task,
                    machine,
                    calibration,
                    TaskLayout(layout.tp, layout.pp, count * layout.ep, 1, layout.micro_batch, which),
                )
            except PerformanceError as error:
                raise FileProblem(str(error)) from None
            least_gib = min(least_gib, found.memory_bytes / 2**30)
            if found.memory_bytes <= machine.memory_bytes:
                best = max(best, found.flops)
        flops[count * layout.replica_size] = best
    if not any(flops.values()):
        raise FileProblem(
            f"it fits no layout: tp {layout.tp} x pp {layout.pp} needs at least {least_gib:.1f} GiB a slot, "
            f"{asked.gpu} has {machine.memory_bytes / 2**30:.1f}; use a larger tp or pp"
        )
    return flops


def _machine(gpu: str) -> Any:
    from unicron.performance.calibration import calibration_of
    from unicron.performance.errors import PerformanceError
    from unicron.performance.machine import machine_of

    try:
        return machine_of(gpu), calibration_of(gpu)
    except PerformanceError as error:
        raise FileProblem(str(error)) from None


def best_layout(model: ModelFields, global_batch: int, gpu: str, workers: tuple[int, int, int]) -> tuple[int, int, int]:
    """(tp, pp, micro-batch) with the greatest T over the widths, among those whose replica divides workers.unit and
    min. workers: (min, max, unit). Raises FileProblem when none fits the memory."""
    from unicron.performance.errors import PerformanceError
    from unicron.performance.search import TaskModel, candidates, micro_batch_sizes

    low, high, unit = workers
    if not global_batch:
        raise FileProblem("layouts: auto needs global_batch where the model chooses")
    task = TaskModel(_shape(model), global_batch, uneven=False)
    machine, calibration = _machine(gpu)
    try:
        rows = candidates(task, machine, calibration.software, high)
    except PerformanceError as error:
        raise FileProblem(str(error)) from None
    splits = sorted({(int(r[0]), int(r[1])) for r in rows if low % (r[0] * r[1]) == 0 and unit % (r[0] * r[1]) == 0})
    best: tuple[float, tuple[int, int, int]] | None = None
    reasons: list[str] = []
    for tp, pp in splits:
        for size in micro_batch_sizes(task):
            layout = Layout(tp, pp, high // (tp * pp), micro_batch=size, num_micro_batches=global_batch // size)
            asked = Asked(model, global_batch, layout, low // (tp * pp), unit // (tp * pp), gpu)
            if layout.num_micro_batches < layout.dp:
                continue
            try:
                flops = _modelled(asked)
            except FileProblem as problem:
                reasons.append(str(problem))
                continue
            worth = sum(flops.values())
            if best is None or worth > best[0]:
                best = (worth, (tp, pp, size))
    if best is None:
        none = f"layouts: auto finds none of {low} to {high} workers, unit {unit}"
        raise FileProblem(reasons[-1] if reasons else none)
    return best[1]
