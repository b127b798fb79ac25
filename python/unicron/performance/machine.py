"""What it is trained on: GPU types by name, and nodes of them.

The numbers are the vendor's data sheets, dense, not what anybody reaches; what share of them Megatron reaches is
calibration.py's business.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from unicron.performance.errors import PerformanceError

GIB = float(1 << 30)


class Machine(NamedTuple):
    """One kind of node, as the compiled model reads it. Bandwidths count one direction."""

    peak_flops: float  # per GPU, at the training's precision
    hbm_bytes_per_s: float
    memory_bytes: float  # per GPU
    multiprocessors: int
    link_bytes_per_s: float  # per GPU, between the GPUs of a node
    network_bytes_per_s: float  # per node
    gpus_per_node: int
    network_onload: bool = False  # the host's processors move the bytes (Omni-Path): no RDMA from GPU memory


class GpuType(NamedTuple):
    """A data sheet's line."""

    bf16_flops: float  # fp16 on V100
    fp8_flops: float  # 0: has none
    hbm_bytes_per_s: float
    memory_gib: float
    multiprocessors: int
    link_bytes_per_s: float
    network_bytes_per_s: float  # per node of 8, as in the vendor's own systems
    gpus_per_node: int


GPU_TYPES = {
    "V100-16GB": GpuType(125e12, 0, 0.9e12, 16, 80, 150e9, 50e9, 8),
    "V100-32GB": GpuType(125e12, 0, 0.9e12, 32, 80, 150e9, 100e9, 16),
    "A100-40GB": GpuType(312e12, 0, 1.555e12, 40, 108, 300e9, 200e9, 8),
    "A100-80GB": GpuType(312e12, 0, 2.039e12, 80, 108, 300e9, 200e9, 8),
    "A800-80GB": GpuType(312e12, 0, 2.039e12, 80, 108, 200e9, 100e9, 8),
    "H100-80GB": GpuType(989e12, 1979e12, 3.35e12, 80, 132, 450e9, 400e9, 8),
    "H800-80GB": GpuType(989e12, 1979e12, 3.35e12, 80, 132, 200e9, 400e9, 8),
    "H200-141GB": GpuType(989e12, 1979e12, 4.8e12, 141, 132, 450e9, 400e9, 8),
    "B200-180GB": GpuType(2250e12, 4500e12, 7.7e12, 180, 148, 900e9, 400e9, 8),
    "GB200-186GB": GpuType(2450e12, 4900e12, 8.0e12, 186, 152, 900e9, 3600e9, 72),
    "GB300-279GB": GpuType(2450e12, 4900e12, 8.0e12, 279, 152, 900e9, 7200e9, 72),
}
PRECISIONS = ("bf16", "fp16", "fp8")


def machine_of(
    gpu: str,
    *,
    precision: str = "bf16",
    gpus_per_node: int = 0,
    network_bytes_per_s: float = 0.0,
    network_onload: bool = False,
) -> Machine:
    """A node of this GPU type; 0 takes the vendor's own system (8 GPUs, one adapter a GPU, RDMA).

    Raises PerformanceError for an unknown type or precision, and for numbers that are not positive and finite.
    """
    if gpu not in GPU_TYPES:
        raise PerformanceError(f"unknown GPU type {gpu!r}: {', '.join(GPU_TYPES)}")
    if precision not in PRECISIONS:
        raise PerformanceError(f"unknown precision {precision!r}: {', '.join(PRECISIONS)}")
    kind = GPU_TYPES[gpu]
    peak = kind.fp8_flops if precision == "fp8" else kind.bf16_flops
    if peak == 0:
        raise PerformanceError(f"{gpu} has no {precision}")
    result = Machine(
        peak_flops=peak,
        hbm_bytes_per_s=kind.hbm_bytes_per_s,
        memory_bytes=kind.memory_gib * GIB,
        multiprocessors=kind.multiprocessors,
        link_bytes_per_s=kind.link_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s or kind.network_bytes_per_s,
        gpus_per_node=gpus_per_node or kind.gpus_per_node,
        network_onload=network_onload,
    )
    return checked_machine(result)


def checked_machine(machine: Machine) -> Machine:
    """The machine itself. Raises PerformanceError unless every number of it is positive and finite."""
    for name, value in machine._asdict().items():
        if name != "network_onload" and not (math.isfinite(value) and value > 0):
            raise PerformanceError(f"machine.{name} must be positive and finite, not {value!r}")
    return machine
