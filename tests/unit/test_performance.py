"""The performance model: FLOP against the published formulas, memory, search against brute force, T, and bad input."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from unicron.performance.calibration import calibration_of, generations, scaled
from unicron.performance.errors import PerformanceError
from unicron.performance.machine import GPU_TYPES, machine_of
from unicron.performance.measured import table_flops
from unicron.performance.memory import RECOMPUTE_FULL, RECOMPUTE_NONE, stage_layers
from unicron.performance.search import TaskLayout, TaskModel, estimate, refusal_of, throughput
from unicron.performance.shape import ModelShape, divisors, hardware_flop, parameters, sample_flop

pytestmark = pytest.mark.timeout(120)  # the first call compiles

SMALL = ModelShape(layers=4, hidden=512, heads=4, seq=256, vocab=1024)
GPT3 = ModelShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
A100 = machine_of("A100-80GB")
OLD = calibration_of("A100-80GB", generation="megatron-2021")
NEW = calibration_of("A100-80GB", generation="core-2023")


# ---------------------------------------------------------------- FLOP


@pytest.mark.parametrize("shape", [SMALL, GPT3])
def test_flop_are_those_of_the_papers(shape: ModelShape) -> None:
    """arXiv 2104.04473, appendix; arXiv 2205.05198, appendix A."""
    layers, hidden, seq, vocab = shape.layers, shape.hidden, shape.seq, shape.vocab
    model = 72 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * hidden * layers))
    recomputed = 96 * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * hidden * layers))
    assert sample_flop(shape) == pytest.approx(model)
    assert hardware_flop(shape) == pytest.approx(recomputed)


def test_parameters() -> None:
    assert parameters(GPT3._replace(ffn=4 * 12288, query_groups=96)) == pytest.approx(174.6e9, rel=0.005)


def test_gated_model_with_query_groups() -> None:
    llama = ModelShape(80, 8192, 64, 8192, 128256, ffn=28672, query_groups=8, gated=True, tied=False)
    assert parameters(llama) == pytest.approx(70.6e9, rel=0.005)


# ---------------------------------------------------------------- one layout


def memory(layout: TaskLayout, batch: int = 1536) -> float:
    return estimate(TaskModel(GPT3, batch), A100, NEW, layout).memory_bytes


def test_memory_falls_with_every_split_and_rises_with_the_micro_batch() -> None:
    base = TaskLayout(4, 8, 4, 1, 1, RECOMPUTE_NONE)
    assert memory(base._replace(tp=8)) < memory(base)
    assert memory(base._replace(pp=16)) < memory(base)
    assert memory(base._replace(dp=8)) < memory(base)  # distributed optimizer
    assert memory(base._replace(recompute=RECOMPUTE_FULL)) < memory(base)
    assert memory(base._replace(micro_batch=2)) > memory(base)
    assert memory(base._replace(vpp=2)) > memory(base)


def test_interleaving_shortens_the_bubble() -> None:
    task = TaskModel(GPT3, 64)
    plain = estimate(task, A100, NEW, TaskLayout(8, 8, 1, 1, 1, RECOMPUTE_FULL))
    virtual = estimate(task, A100, NEW, TaskLayout(8, 8, 1, 4, 1, RECOMPUTE_FULL))
    assert virtual.iteration_s < plain.iteration_s


def test_recomputation_costs_about_a_third() -> None:
    task = TaskModel(GPT3, 256)
    none = estimate(task, A100, OLD, TaskLayout(8, 8, 1, 1, 1, RECOMPUTE_NONE))
    full = estimate(task, A100, OLD, TaskLayout(8, 8, 1, 1, 1, RECOMPUTE_FULL))
    assert 1.2 < full.iteration_s / none.iteration_s < 1.4


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    task = TaskModel(GPT3, 64)
    layout = TaskLayout(8, 8, 1, 1, 1, RECOMPUTE_FULL)
    slow = A100._replace(network_bytes_per_s=50e9)
    inside = estimate(task, slow, OLD, layout)
    across = estimate(task, slow._replace(gpus_per_node=4), OLD, layout)
    assert across.iteration_s > 1.1 * inside.iteration_s


def test_a_network_that_the_host_moves_reduces_gradients_slowly() -> None:
    task = TaskModel(GPT3, 512)
    layout = TaskLayout(8, 4, 8, 1, 1, RECOMPUTE_FULL)
    rdma = estimate(task, A100, OLD, layout).iteration_s
    onload = estimate(task, A100._replace(network_onload=True), OLD, layout).iteration_s
    assert onload > rdma
    alone = layout._replace(dp=1)
    assert estimate(task, A100._replace(network_onload=True), OLD, alone) == estimate(task, A100, OLD, alone)


def test_layers_that_pp_does_not_divide() -> None:
    """7 stages of 48 layers: 7 layers each, 6 in the last, which has the head."""
    assert stage_layers(GPT3._replace(layers=48), 7) == 7
    assert stage_layers(GPT3._replace(layers=70), 12) == 6
    assert stage_layers(GPT3._replace(layers=4), 8) == 1


def test_small_micro_batches_pay_more_for_gradient_sums() -> None:
    """Weight gradients are added once per micro-batch, whatever its size."""
    task, layout = TaskModel(GPT3, 512), TaskLayout(8, 8, 2, 1, 1, RECOMPUTE_FULL)
    apart, fused = (OLD.software._replace(fused_gradients=value) for value in (False, True))

    def costs(size: int) -> float:
        seconds = [
            estimate(task, A100, OLD._replace(software=software), layout._replace(micro_batch=size)).iteration_s
            for software in (apart, fused)
        ]
        return seconds[0] - seconds[1]

    assert 3 < costs(1) / costs(4) < 4.5  # a bubble of longer micro-batches takes a part


def test_a_head_that_tensor_cores_cannot_take_is_slow() -> None:
    """4608 / 48 = 96 elements a head; 4608 / 36 = 128; 4680 / 36 = 130, which is no multiple of 8."""
    layout, task = TaskLayout(4, 1, 1, 1, 1, RECOMPUTE_FULL), TaskModel(GPT3._replace(layers=8, heads=36), 32)

    def flops(hidden: int, heads: int = 36) -> float:
        shape = task.shape._replace(hidden=hidden, heads=heads)
        return estimate(task._replace(shape=shape), A100, OLD, layout).flops

    assert flops(4680) < 0.85 * flops(4608)
    assert 0.85 < flops(4608, 48) / flops(4608) < 1.0  # more heads, more scores
    fused = OLD._replace(software=OLD.software._replace(fused_attention=True))
    padded = task._replace(shape=task.shape._replace(hidden=4680))
    assert estimate(padded, A100, fused, layout).flops > 1.2 * flops(4680)


def test_sequence_parallelism_hides_scatters_of_the_backward_pass() -> None:
    """Elementwise work is divided too, so that is left out by a memory of no cost."""
    free = A100._replace(hbm_bytes_per_s=1e30)
    task, layout = TaskModel(GPT3, 64), TaskLayout(8, 8, 1, 1, 1, RECOMPUTE_NONE)
    apart, whole = (OLD.software._replace(sequence_parallel=value) for value in (True, False))
    hidden = estimate(task, free, OLD._replace(software=apart), layout).iteration_s
    assert hidden < estimate(task, free, OLD._replace(software=whole), layout).iteration_s


@pytest.mark.parametrize("gpu", GPU_TYPES)
@pytest.mark.parametrize("generation", generations())
def test_nobody_exceeds_the_data_sheet(gpu: str, generation: str) -> None:
    machine = machine_of(gpu)
    calibration = calibration_of(gpu, generation=generation)
    found = estimate(TaskModel(GPT3, 512), machine, calibration, TaskLayout(8, 8, 2, 1, 1, RECOMPUTE_NONE))
    assert 0.02 < found.flops / 128 / machine.peak_flops < 1


# ---------------------------------------------------------------- search


def brute_force(task: TaskModel, gpus: int) -> float:
    """The best FLOP/s on exactly so many GPUs, layout by layout."""
    best = 0.0
    sizes = (1, 2, 4, 8, 16)
    for tp, pp, vpp, size, which in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), sizes, (0, 1, 2)):
        layout = TaskLayout(tp, pp, gpus // (tp * pp), vpp, size, which)
        if layout.gpus != gpus or refusal_of(task, OLD.software, layout):
            continue
        if vpp > 1 and math.ceil(task.global_batch / (size * layout.dp)) % pp:
            continue
        found = estimate(task, A100, OLD, layout)
        if found.memory_bytes <= A100.memory_bytes:
            best = max(best, found.flops)
    return best


@pytest.mark.parametrize("uneven", [False, True])
def test_search_is_brute_force(uneven: bool) -> None:
    task = TaskModel(SMALL, 16, uneven)
    exact = [0.0] + [brute_force(task, gpus) for gpus in range(1, 33)]
    found = throughput(task, A100, OLD, 32)
    np.testing.assert_allclose(found.flops, np.maximum.accumulate(exact), rtol=1e-9)
    for gpus in range(1, 33):
        layout = found.layouts[gpus]
        assert layout is not None and layout.gpus <= gpus
        assert estimate(task, A100, OLD, layout).flops == pytest.approx(found.flops[gpus])


def test_t_never_falls_and_begins_where_memory_allows() -> None:
    found = throughput(TaskModel(GPT3, 1536), A100, NEW, 512)
    assert (np.diff(found.flops) >= 0).all()
    first = int(np.argmax(found.flops > 0))
    assert first > 16  # 175 billion parameters need 18 bytes each, less what is divided
    assert found.layouts[first - 1] is None and found.layouts[first] is not None


def test_measured_replaces_the_model() -> None:
    task = TaskModel(SMALL, 16)
    model = throughput(task, A100, OLD, 16)
    measured = throughput(task, A100, OLD, 16, {8: float(model.flops[8]) * 0.5})
    np.testing.assert_allclose(measured.flops, model.flops * 0.5)


def test_one_point_scales_everything() -> None:
    half = scaled(OLD, modelled=2.0, measured=1.0)
    task, layout = TaskModel(SMALL, 16), TaskLayout(1, 1, 4, 1, 1, RECOMPUTE_NONE)
    assert estimate(task, A100, half, layout).flops == pytest.approx(estimate(task, A100, OLD, layout).flops / 2)


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize("gpus_max", [0, -1, 2.5, math.nan, 1 << 30])
def test_gpus_out_of_range(gpus_max: int) -> None:
    with pytest.raises(PerformanceError, match="gpus_max"):
        throughput(TaskModel(SMALL, 16), A100, OLD, gpus_max)


@pytest.mark.parametrize("field", ["layers", "hidden", "heads", "seq", "vocab"])
@pytest.mark.parametrize("value", [0, -1, math.nan, 1 << 40])
def test_shape_out_of_range(field: str, value: int) -> None:
    with pytest.raises(PerformanceError, match=field):
        sample_flop(SMALL._replace(**{field: value}))


def test_shape_that_does_not_divide() -> None:
    with pytest.raises(PerformanceError, match="not divisible by its 3 heads"):
        sample_flop(SMALL._replace(heads=3))
    with pytest.raises(PerformanceError, match="3 query groups"):
        sample_flop(SMALL._replace(query_groups=3))


def test_a_task_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(PerformanceError, match=r"no layout on up to 8 GPUs fits: the best needs \d+\.\d GiB"):
        throughput(TaskModel(GPT3, 1536), A100, NEW, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0])
def test_measurements_that_are_none(value: float) -> None:
    with pytest.raises(PerformanceError, match="positive and finite"):
        throughput(TaskModel(SMALL, 16), A100, OLD, 16, {8: value})
    with pytest.raises(PerformanceError, match="positive and finite"):
        scaled(OLD, modelled=1.0, measured=value)
    with pytest.raises(PerformanceError, match="positive and finite"):
        table_flops({2: 1.0, 4: value}, gpus_min=2, gpus_max=4, unit=2)


def test_table() -> None:
    found = table_flops({2: 1.0, 4: 3.0, 6: 2.0}, gpus_min=2, gpus_max=6, unit=2)
    assert found.tolist() == [0, 0, 1, 1, 3, 3, 3]


def test_table_with_a_hole() -> None:
    with pytest.raises(PerformanceError, match=r"holes: no entry for \[4\]"):
        table_flops({2: 1.0, 6: 2.0}, gpus_min=2, gpus_max=6, unit=2)
    with pytest.raises(PerformanceError, match=r"states \[3\] GPUs"):
        table_flops({2: 1.0, 3: 1.0, 4: 2.0}, gpus_min=2, gpus_max=4, unit=2)


def test_names_that_nobody_knows() -> None:
    with pytest.raises(PerformanceError, match="unknown GPU type 'B9'"):
        machine_of("B9")
    with pytest.raises(PerformanceError, match="unknown precision"):
        machine_of("A100-80GB", precision="fp1")
    with pytest.raises(PerformanceError, match="has no fp8"):
        machine_of("A100-80GB", precision="fp8")
    with pytest.raises(PerformanceError, match="unknown software generation"):
        calibration_of("A100-80GB", generation="later")


def test_a_machine_of_nan() -> None:
    with pytest.raises(PerformanceError, match="network_bytes_per_s"):
        throughput(TaskModel(SMALL, 16), A100._replace(network_bytes_per_s=math.nan), OLD, 16)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (TaskLayout(3, 1, 1, 1, 1, 0), "tp 3 does not divide"),
        (TaskLayout(1, 2, 1, 3, 1, 0), "cannot be cut"),
        (TaskLayout(1, 1, 3, 1, 1, 0), "do not divide the global batch"),
        (TaskLayout(1, 1, 32, 1, 1, 0), "exceed the global batch"),
        (TaskLayout(1, 1, 1, 2, 1, 0), "needs pp above 1"),
        (TaskLayout(0, 1, 1, 1, 1, 0), "below 1"),
    ],
)
def test_impossible_layouts(layout: TaskLayout, reason: str) -> None:
    with pytest.raises(PerformanceError, match=reason):
        estimate(TaskModel(SMALL, 16), A100, OLD, layout)
