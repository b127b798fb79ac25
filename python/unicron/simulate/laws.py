"""How unicron's measured times grow from two GPUs to a cluster: a line of arithmetic each, modelled from there on.

    process replaced in place = measured detection + max(its end, regrouping) + adoption x memory + half an iteration
    regrouping                = one communicator as measured + a published slope per rank
    a node's role on another  = regrouping + its state over the network + half an iteration
    fewer replicas            = regrouping + its micro-batches on the others: iteration / (dp - 1)

Half an iteration: the mean of what a wounded replica computes again when the fault falls anywhere in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from unicron.performance.calibration import calibration_of
from unicron.performance.machine import machine_of
from unicron.simulate.measured import Measured
from unicron.simulate.tasks import SimTask

GIB = float(1 << 30)


class Laws(NamedTuple):
    """Seconds of one task at one width, without detection and without computing again."""

    process_s: float
    reconnect_s: float
    standby_s: float
    shrink_s: float
    grow_s: float
    again_s: float  # computed again where a role was replaced
    again_shrink_s: float


def laws_of(task: SimTask, nodes: int, values: Mapping[str, float], measured: Measured, gpu: str) -> Laws:
    nodes = max(min(nodes, task.nodes_max), 1)
    regroup_s = measured.group_s + values["unicron.group_per_rank_s"] * max(task.gpus(nodes) - 2, 0)
    state_bytes = float(task.state_bytes[nodes])
    machine = machine_of(gpu, gpus_per_node=task.gpus_per_node)
    network = machine.network_bytes_per_s / machine.gpus_per_node * calibration_of(gpu).efficiency.network
    fetch_s = state_bytes / network
    scale = values["unicron.adopt_scale"]
    # What the two-GPU runs lost beyond the parts named here: records, masks, the first kernels of an heir.
    rest_s = max(measured.heal_s - measured.gone_s - measured.group_s - measured.iteration_s / 2, 0.0)
    adopt_s = measured.adopt_s_per_gib * state_bytes / GIB
    own_s = (rest_s + adopt_s) * scale
    iteration_s = task.iteration_s(nodes) if task.flops[nodes] > 0 else 0.0
    dp = int(task.dp[nodes])
    return Laws(
        process_s=max(measured.gone_s, regroup_s) + own_s,
        reconnect_s=regroup_s + rest_s * scale,
        standby_s=regroup_s + rest_s * scale + fetch_s,
        shrink_s=regroup_s + rest_s * scale,
        grow_s=regroup_s + rest_s * scale + fetch_s,
        again_s=iteration_s / 2,
        again_shrink_s=iteration_s / max(dp - 1, 1),
    )
