"""What is trained: a dense transformer's shape, its parameters and the FLOP that one sample costs.

FLOP are *model* FLOP, as WAF wants them: what the mathematics needs, without recomputation, so that a layout that
computes everything twice earns nothing by it. Attention is counted full, not causal, as every published Megatron
number does (arXiv 2104.04473, appendix; arXiv 2205.05198, appendix A).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from unicron.performance.errors import PerformanceError

EXTENT_MAX = 1 << 24  # of any one dimension; more is a slip of the hand


class ModelShape(NamedTuple):
    """A dense decoder. All counts; 0 for ffn and query_groups means the usual: 4 * hidden, one group a head."""

    layers: int
    hidden: int
    heads: int
    seq: int  # tokens in a sample
    vocab: int
    ffn: int = 0
    query_groups: int = 0  # heads of keys and values
    gated: bool = False  # SwiGLU: two matrices into the ffn
    tied: bool = True  # the head is the embedding's matrix


def checked_shape(shape: ModelShape) -> ModelShape:
    """The shape with its usual values filled in.

    Raises PerformanceError for what is not a positive whole number, and for heads that do not divide.
    """
    for name, value in shape._asdict().items():
        if isinstance(value, bool):
            continue
        least = 0 if name in ("ffn", "query_groups") else 1
        if not isinstance(value, int) or not least <= value <= EXTENT_MAX:
            raise PerformanceError(f"model.{name} must be a whole number from {least} to {EXTENT_MAX}, not {value!r}")
    shape = shape._replace(ffn=shape.ffn or 4 * shape.hidden, query_groups=shape.query_groups or shape.heads)
    if shape.hidden % shape.heads:
        raise PerformanceError(f"model.hidden {shape.hidden} is not divisible by its {shape.heads} heads")
    if shape.heads % shape.query_groups:
        raise PerformanceError(f"model.heads {shape.heads} is not divisible by its {shape.query_groups} query groups")
    return shape


def layer_parameters(shape: ModelShape) -> int:
    """Elements of one layer's matrices (biases and norms are left out: under 0.1 %)."""
    keys_and_values = 2 * shape.hidden * shape.query_groups // shape.heads
    attention = shape.hidden * (2 * shape.hidden + keys_and_values)
    return attention + (3 if shape.gated else 2) * shape.hidden * shape.ffn


def parameters(shape: ModelShape) -> int:
    """Elements of the whole model."""
    tables = shape.vocab * shape.hidden * (1 if shape.tied else 2)
    return shape.layers * layer_parameters(shape) + tables


def sample_flop(shape: ModelShape) -> float:
    """Model FLOP of one sample, forward and backward: 72 B s l h^2 (1 + s/6h + V/12hl) where ffn is 4 h.

    Source: arXiv 2104.04473, appendix, without its recomputed forward pass.
    """
    shape = checked_shape(shape)
    matrices = shape.layers * layer_parameters(shape) + shape.hidden * shape.vocab
    scores = shape.layers * 2 * shape.seq * shape.hidden
    return 6.0 * shape.seq * (matrices + scores)


def hardware_flop(shape: ModelShape) -> float:
    """FLOP of one sample with every layer's forward pass computed twice: 96 B s l h^2 (1 + s/6h + V/16hl)."""
    shape = checked_shape(shape)
    layers = shape.layers * (layer_parameters(shape) + 2 * shape.seq * shape.hidden)
    return 8.0 * shape.seq * layers + 6.0 * shape.seq * shape.hidden * shape.vocab


def divisors(number: int) -> list[int]:
    """In rising order."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})
