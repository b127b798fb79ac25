"""What a layout holds in a GPU's memory: weights, gradients, optimizer, activations of the micro-batches in flight.

Activations after arXiv 2205.05198 (section 4, tables 2 and 3), its constants split into what tensor parallelism divides
and what it does not. The fullest stage counts: the first holds most micro-batches, the last the logits.
"""

from __future__ import annotations

import math

from unicron.performance.calibration import Software
from unicron.performance.compiled import compiled
from unicron.performance.shape import ModelShape

WEIGHT_BYTES = 2.0
OPTIMIZER_BYTES = 12.0  # Adam: weight and two moments in fp32
RESERVED_BYTES = 3.0 * (1 << 30)  # context, communication buffers, work space of the libraries
FRAGMENTATION = 1.04  # of activations: what the allocator cannot use

RECOMPUTE_NONE, RECOMPUTE_SELECTIVE, RECOMPUTE_FULL = 0, 1, 2


@compiled
def stage_layers(shape: ModelShape, pp: int) -> int:
    """Layers of the fullest stage; where pp does not divide them, the last one, which has the head, has fewer."""
    return math.ceil(shape.layers / pp)


@compiled
def stage_parameters(shape: ModelShape, tp: int, pp: int) -> float:
    """Elements that one GPU of the fullest stage holds."""
    attention = shape.hidden * (2.0 * shape.hidden + 2.0 * shape.hidden * shape.query_groups / shape.heads)
    mlp = (3.0 if shape.gated else 2.0) * shape.hidden * shape.ffn
    tables = float(shape.vocab) * shape.hidden
    if pp == 1 and not shape.tied:
        tables *= 2.0
    return (stage_layers(shape, pp) * (attention + mlp) + tables) / tp


@compiled
def layer_activation_bytes(shape: ModelShape, software: Software, micro_batch: int, tp: int, recompute: int) -> float:
    """Kept from one layer's forward pass to its backward pass, for one micro-batch."""
    tokens = float(micro_batch) * shape.seq
    replicated = 10.0 * shape.hidden  # norms, dropouts, inputs
    if software.sequence_parallel:
        replicated /= tp
    if recompute == RECOMPUTE_FULL:
        return 2.0 * tokens * shape.hidden / (tp if software.sequence_parallel else 1)
    inner = shape.hidden * (4.0 + 4.0 * shape.query_groups / shape.heads) + (6.0 if shape.gated else 4.0) * shape.ffn
    scores = 0.0
    if not software.fused_attention and recompute == RECOMPUTE_NONE:
        scores = 5.0 * shape.heads * shape.seq
    return tokens * (replicated + (inner + scores) / tp)


@compiled
def gpu_memory_bytes(
    shape: ModelShape,
    software: Software,
    split: tuple[int, int, int, int],
    micro_batches: int,
    recompute: tuple[int, int],
) -> float:
    """Bytes on the fullest GPU. split: (tp, pp, dp, vpp); recompute: (which, micro-batch's samples)."""
    tp, pp, dp, vpp = split
    which, micro_batch = recompute
    elements = stage_parameters(shape, tp, pp)
    optimizer = OPTIMIZER_BYTES / dp if software.distributed_optimizer else OPTIMIZER_BYTES
    states = elements * (WEIGHT_BYTES + software.gradient_bytes + optimizer)
    in_flight = min(float(pp), float(micro_batches))
    if vpp > 1:
        in_flight = pp * (1.0 + (pp - 1.0) / (pp * vpp))
    layer = layer_activation_bytes(shape, software, micro_batch, tp, which)
    first = layer * stage_layers(shape, pp) * in_flight
    if which == RECOMPUTE_FULL:
        first += layer_activation_bytes(shape, software, micro_batch, tp, RECOMPUTE_NONE)
    logits = 8.0 * micro_batch * shape.seq * shape.vocab / tp  # fp32, and its gradient
    last = layer * stage_layers(shape, pp) * min(in_flight, 1.0 if pp > 1 else in_flight) + logits
    return states + FRAGMENTATION * max(first, last) + RESERVED_BYTES
