"""How long one iteration of one layout takes: kernels by shape, traffic by link, the pipeline around them.

    iteration = pipeline (steady stage x micro-batches + fill and drain) + exposed gradient traffic + optimizer

after arXiv 2104.04473, section 3 (bubble (p - 1) / (v m), traffic of each kind of parallelism) and arXiv 2205.05198
(recomputation, sequence parallelism). A kernel takes what its padded shape and its memory traffic take at the shares of
calibration.py. Rejected: a regression on throughput itself, which fits published rows better and extrapolates to
nothing.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from unicron.performance.calibration import Efficiency, Software
from unicron.performance.compiled import compiled
from unicron.performance.machine import Machine
from unicron.performance.memory import RECOMPUTE_FULL, RECOMPUTE_SELECTIVE, stage_layers, stage_parameters
from unicron.performance.shape import ModelShape

ELEMENT_BYTES = 2.0
ALIGNED_ELEMENTS = 8  # tensor cores want inner extents of 16 bytes
COLLECTIVE_S = 20e-6  # start of one collective
OPTIMIZER_TRAFFIC_BYTES = 30.0  # read and written per element by Adam: gradient, three fp32 states, weight


class StageTimes(NamedTuple):
    """Seconds of one micro-batch, and what one GPU of the fullest stage holds."""

    steady_s: float  # forward and backward on the slowest stage, transfers included
    mean_s: float  # the same on the mean stage: what filling the pipeline costs a stage
    backward_s: float  # backward on the slowest stage, under which gradients may be reduced
    elements: float


@compiled
def waves(machine: Machine, efficiency: Efficiency, tiles: float) -> float:
    """How often every multiprocessor computes a tile until so many are done."""
    return math.ceil(tiles / machine.multiprocessors) + efficiency.tail_waves


@compiled
def product_s(
    machine: Machine, efficiency: Efficiency, m: float, k: float, n: float, batch: float = 1.0, share: float = 1.0
) -> float:
    """Matrix products of (m, k) by (k, n): whole tiles in whole waves over the multiprocessors, or their traffic.

    batch: how many one call computes; share: of the tensor cores' rate, where other units compute them.
    """
    # A library takes the largest tile, unless a smaller one, slower by a tenth each time, fills the chip better.
    high, low = math.ceil(m / 256.0), math.ceil(m / 128.0)
    tiles_s = min(
        waves(machine, efficiency, batch * high * math.ceil(n / 128.0)) * 256.0 * 128.0,
        waves(machine, efficiency, batch * low * math.ceil(n / 128.0)) * 128.0 * 128.0 / 0.9,
        waves(machine, efficiency, batch * low * math.ceil(n / 64.0)) * 128.0 * 64.0 / 0.8,
    )
    per_multiprocessor = machine.peak_flops * efficiency.matrix / machine.multiprocessors
    compute_s = 2.0 * (k / share + efficiency.tile_fill) * tiles_s / per_multiprocessor
    traffic_s = ELEMENT_BYTES * batch * (m * k + k * n + m * n) / (machine.hbm_bytes_per_s * efficiency.hbm)
    return max(compute_s, traffic_s)


@compiled
def attention_s(
    shape: ModelShape, machine: Machine, software: Software, efficiency: Efficiency, micro_batch: int, tp: int
) -> tuple[float, float]:
    """Scores, softmax, dropout and weighted values of one layer: forward, backward.

    Fused (arXiv 2205.14135): two products forward and five backward, which computes the scores again; causal, so the
    upper half is never computed. Else two and four, with what lies between them going through memory.
    """
    head = float(shape.hidden // shape.heads)
    seq = float(shape.seq)
    batch = float(micro_batch) * shape.heads / tp
    scores = batch * seq * seq
    if software.fused_attention:
        product = scores * head / (machine.peak_flops * efficiency.matrix * efficiency.attention)
        return 2.0 * product, 5.0 * product
    share = 1.0 if head % ALIGNED_ELEMENTS == 0 else efficiency.misaligned
    across = product_s(machine, efficiency, seq, head, seq, batch, share)  # over the head: scores, their gradient
    along = product_s(machine, efficiency, seq, seq, head, batch, share)  # over the sequence: the others
    memory = machine.hbm_bytes_per_s * efficiency.hbm
    # forward: softmax reads and writes, dropout too, and writes a mask; backward: dropout 5 bytes a score, softmax 6
    return across + along + 9.0 * scores / memory, across + 3.0 * along + 11.0 * scores / memory


@compiled
def network_bytes_per_s(machine: Machine, efficiency: Efficiency) -> float:
    """Of a node, as collectives reach it."""
    return machine.network_bytes_per_s * (efficiency.network_onload if machine.network_onload else efficiency.network)


@compiled
def tensor_traffic_s(
    shape: ModelShape, machine: Machine, software: Software, efficiency: Efficiency, micro_batch: int, tp: int
) -> tuple[float, float]:
    """What one layer waits for its tensor-parallel group: forward, backward.

    Each way two all-reduces, or two gather and scatter pairs. With sequence parallelism (arXiv 2205.05198, section
    4.2.2) the backward pass gathers two inputs once more, which with its two scatters hides under gradient products.
    """
    if tp == 1:
        return 0.0, 0.0
    rate = machine.link_bytes_per_s * efficiency.link
    if tp > machine.gpus_per_node:
        rate = min(rate, network_bytes_per_s(machine, efficiency))
    payload = ELEMENT_BYTES * micro_batch * shape.seq * shape.hidden
    one_s = (tp - 1.0) / tp * payload / rate + COLLECTIVE_S / 2.0  # a gather, a scatter, or half an all-reduce
    exposed = 1.0 - efficiency.hidden_tensor
    forward_s = 4.0 * one_s * (exposed if software.overlapped_tensor else 1.0)
    if not software.sequence_parallel:
        return forward_s, forward_s
    return forward_s, forward_s / 2.0 + 4.0 * one_s * exposed


@compiled
def product_both_s(machine: Machine, efficiency: Efficiency, m: float, k: float, n: float) -> tuple[float, float]:
    """Forward, and backward: the gradients of its input and of its weights, whose inner extents are n and m."""
    backward_s = product_s(machine, efficiency, m, n, k) + product_s(machine, efficiency, k, m, n)
    return product_s(machine, efficiency, m, k, n), backward_s


@compiled
def layer_s(
    shape: ModelShape, machine: Machine, software: Software, efficiency: Efficiency, micro_batch: int, tp: int
) -> tuple[float, float]:
    """Computation of one layer's forward and backward pass, without attention's core and without traffic."""
    tokens = float(micro_batch) * shape.seq
    hidden = float(shape.hidden)
    projected = hidden * (1.0 + 2.0 * shape.query_groups / shape.heads)
    inwards = shape.ffn * (2.0 if shape.gated else 1.0)
    inner = float(shape.ffn)
    query = product_both_s(machine, efficiency, tokens, hidden, projected / tp)
    output = product_both_s(machine, efficiency, tokens, hidden / tp, hidden)
    widen = product_both_s(machine, efficiency, tokens, hidden, inwards / tp)
    narrow = product_both_s(machine, efficiency, tokens, inner / tp, hidden)
    memory = machine.hbm_bytes_per_s * efficiency.hbm
    # norms 8, dropouts and residuals 14 bytes an element; activation function reads and writes the ffn
    whole = 22.0 * hidden / (tp if software.sequence_parallel else 1)
    elementwise_s = tokens * (whole + ELEMENT_BYTES * (inwards + shape.ffn) / tp) / memory
    # Each micro-batch's weight gradients are written, read, and added to the sums, unless the product does that itself:
    # there it hides under the computation.
    weights = (hidden * (projected + hidden) + hidden * inwards + inner * hidden) / tp
    added = 0.0 if software.fused_gradients else 2.0 * (ELEMENT_BYTES + software.gradient_bytes)
    forward_s = query[0] + output[0] + widen[0] + narrow[0] + elementwise_s
    backward_s = query[1] + output[1] + widen[1] + narrow[1] + 2.0 * elementwise_s + weights * added / memory
    return forward_s, backward_s


@compiled
def head_s(shape: ModelShape, machine: Machine, efficiency: Efficiency, micro_batch: int, tp: int) -> float:
    """Logits and loss, forward and backward: three products, and what the loss moves through memory.

    Megatron's vocabulary-parallel loss moves 58 bytes a logit: 16-bit written, read, cast; maximum, difference,
    exponential, sum and quotient in fp32; the gradient in fp32, cast, and read by two products.
    """
    tokens = float(micro_batch) * shape.seq
    columns = float(shape.vocab) / tp
    traffic_s = 58.0 * tokens * columns / (machine.hbm_bytes_per_s * efficiency.hbm)
    forward_s, backward_s = product_both_s(machine, efficiency, tokens, float(shape.hidden), columns)
    return forward_s + backward_s + traffic_s


@compiled
def transfer_s(
    shape: ModelShape,
    machine: Machine,
    software: Software,
    efficiency: Efficiency,
    micro_batch: int,
    split: tuple[int, int, int, int],
) -> float:
    """What a stage waits for its neighbours in one micro-batch: activations one way, gradients the other."""
    tp, pp, dp, vpp = split
    if pp == 1:
        return 0.0
    payload = ELEMENT_BYTES * micro_batch * shape.seq * shape.hidden
    if software.sharded_transfers:
        payload /= tp
    # Megatron's order tp-dp-pp: the neighbour is tp * dp ranks away.
    inside = tp * dp * pp <= machine.gpus_per_node
    rate = machine.link_bytes_per_s * efficiency.link
    if not inside:  # also through a host it passes but once, and is not added up
        rate = min(rate, machine.network_bytes_per_s * efficiency.network / machine.gpus_per_node)
    return software.waited_transfers * vpp * payload / rate


@compiled
def stage_times(
    shape: ModelShape,
    machine: Machine,
    software: Software,
    efficiency: Efficiency,
    split: tuple[int, int, int, int],
    recompute: tuple[int, int],
) -> StageTimes:
    """One micro-batch through one stage. split: (tp, pp, dp, vpp); recompute: (which, micro-batch's samples)."""
    tp, pp, _, _ = split
    which, micro_batch = recompute
    core = attention_s(shape, machine, software, efficiency, micro_batch, tp)
    traffic = tensor_traffic_s(shape, machine, software, efficiency, micro_batch, tp)
    forward_s, backward_s = layer_s(shape, machine, software, efficiency, micro_batch, tp)
    forward_s += core[0] + traffic[0]
    backward_s += core[1] + traffic[1]
    if which == RECOMPUTE_FULL:
        backward_s += forward_s
    elif which == RECOMPUTE_SELECTIVE and not software.fused_attention:
        backward_s += core[0]
    logits_s = head_s(shape, machine, efficiency, micro_batch, tp)
    both_s = forward_s + backward_s
    layers = stage_layers(shape, pp)
    last_s = layers * both_s + logits_s
    if shape.layers % pp:
        last_s = max(layers * both_s, last_s - both_s)
    wait_s = transfer_s(shape, machine, software, efficiency, micro_batch, split)
    mean_s = (shape.layers * both_s + logits_s) / pp
    elements = stage_parameters(shape, tp, pp)
    return StageTimes(last_s + wait_s, mean_s + wait_s, layers * backward_s, elements)


@compiled
def reduction_s(
    machine: Machine, software: Software, efficiency: Efficiency, stage: StageTimes, split: tuple[int, int, int, int]
) -> float:
    """Gradients to all replicas (and weights back, where the optimizer is distributed), as far as nothing hides it."""
    tp, _, dp, _ = split
    if dp == 1:
        return 0.0
    per_node = max(1, machine.gpus_per_node // tp)  # members of one group on one node
    rate = machine.link_bytes_per_s * efficiency.link
    if dp > per_node:
        groups = machine.gpus_per_node / per_node  # of one node, sharing its network
        rate = min(rate, network_bytes_per_s(machine, efficiency) / groups)
    share = (dp - 1.0) / dp * stage.elements / rate
    gradients_s = share * software.gradient_bytes
    weights_s = share * (ELEMENT_BYTES if software.distributed_optimizer else software.gradient_bytes)
    if not software.overlapped_reduction:
        return gradients_s + weights_s
    # Under one micro-batch's backward pass at most, and the weights under the next forward pass, half as long.
    hidden_s = efficiency.hidden_reduction * min(gradients_s, stage.backward_s)
    hidden_s += efficiency.hidden_reduction * min(weights_s, stage.backward_s / 2.0)
    return gradients_s + weights_s - hidden_s


@compiled
def iteration_s(
    machine: Machine,
    software: Software,
    efficiency: Efficiency,
    stage: StageTimes,
    split: tuple[int, int, int, int],
    micro_batches: int,
) -> float:
    """Seconds of one iteration in which a replica computes `micro_batches` of them."""
    _, pp, dp, vpp = split
    pipeline_s = micro_batches * stage.steady_s + (pp - 1.0) * stage.mean_s / vpp
    updated = stage.elements / dp if software.distributed_optimizer else stage.elements
    optimizer_s = updated * OPTIMIZER_TRAFFIC_BYTES / (machine.hbm_bytes_per_s * efficiency.hbm)
    return pipeline_s + reduction_s(machine, software, efficiency, stage, split) + optimizer_s
