"""The tasks of a simulated cluster: T(t, x) of the performance model at every number of nodes, and what laws need."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unicron.performance.calibration import calibration_of
from unicron.performance.machine import Machine, machine_of
from unicron.performance.memory import OPTIMIZER_BYTES, WEIGHT_BYTES, stage_parameters
from unicron.performance.search import TaskModel, throughput
from unicron.performance.shape import ModelShape, checked_shape, sample_flop

# GPT-3's published shapes; the global batches are ours where no source states one for that number of GPUs.
MODELS: dict[str, tuple[ModelShape, int]] = {
    "gpt3-1.3b": (ModelShape(24, 2048, 16, 2048, 51200), 512),
    "gpt3-7b": (ModelShape(32, 4096, 32, 2048, 51200), 1024),
    "gpt3-13b": (ModelShape(40, 5120, 40, 2048, 51200), 1024),
    "gpt3-70b": (ModelShape(80, 8192, 64, 2048, 51200), 1536),
    "gpt3-175b": (ModelShape(96, 12288, 96, 2048, 51200), 1536),
}


class SimTask(NamedTuple):
    """One task. flops[k]: T(t, 8 k), FLOP/s on k nodes, rising, index 0..nodes_max; 0 where it does not fit."""

    name: str
    weight: float
    flops: npt.NDArray[np.float64]
    replica_nodes: npt.NDArray[np.int32]  # nodes of one replica in the best layout on k nodes
    dp: npt.NDArray[np.int32]
    state_bytes: npt.NDArray[np.float64]  # per GPU: weights and optimizer
    batch_flop: float  # of one iteration
    gpus_per_node: int

    @property
    def nodes_max(self) -> int:
        return len(self.flops) - 1

    @property
    def nodes_min(self) -> int:
        return int(np.argmax(self.flops > 0))

    def waf(self, nodes: int) -> float:
        return self.weight * float(self.flops[min(nodes, self.nodes_max)])

    def iteration_s(self, nodes: int) -> float:
        flops = float(self.flops[min(nodes, self.nodes_max)])
        return self.batch_flop / flops if flops else math.inf

    def gpus(self, nodes: int) -> int:
        return nodes * self.gpus_per_node


def task_of(
    name: str, shape: ModelShape, global_batch: int, weight: float, nodes_max: int, gpu: str, gpus_per_node: int
) -> SimTask:
    """Raises PerformanceError for a model that fits nowhere."""
    machine = machine_of(gpu, gpus_per_node=gpus_per_node)
    flops, nodes, dp, state = _tables(checked_shape(shape), global_batch, nodes_max, gpu, machine)
    batch_flop = sample_flop(shape) * global_batch
    return SimTask(name, weight, flops, nodes, dp, state, batch_flop, gpus_per_node)


@functools.lru_cache(maxsize=64)
def _tables(
    shape: ModelShape, global_batch: int, nodes_max: int, gpu: str, machine: Machine
) -> tuple[
    npt.NDArray[np.float64], npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float64]
]:  # fmt: skip
    per_node = machine.gpus_per_node
    found = throughput(TaskModel(shape, global_batch, uneven=True), machine, calibration_of(gpu), nodes_max * per_node)
    flops = found.flops[::per_node].copy()
    replica_nodes, dp = np.ones(nodes_max + 1, np.int32), np.ones(nodes_max + 1, np.int32)
    state = np.zeros(nodes_max + 1)
    for nodes in range(nodes_max + 1):
        layout = found.layouts[nodes * per_node]
        if layout is None:
            continue
        replica_nodes[nodes] = max(1, math.ceil(layout.tp * layout.pp / per_node))
        dp[nodes] = layout.dp
        elements = stage_parameters(shape, layout.tp, layout.pp)
        state[nodes] = elements * (WEIGHT_BYTES + OPTIMIZER_BYTES)
    return flops, replica_nodes, dp, state
