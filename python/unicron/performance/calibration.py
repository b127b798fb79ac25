"""What Megatron reaches of the data sheets: a few shares, each with a physical meaning, and what each release can do.

The values stand in calibration.json beside this file, with how they were got. A `Calibration` joins the shares with the
scale of one GPU type, precision and software generation; `scaled()` is how one measured point of a cluster enters.
"""

from __future__ import annotations

import functools
import json
import math
from importlib import resources
from typing import Any, NamedTuple

from unicron.performance.errors import PerformanceError

SCALE_MAX = 4.0  # a measurement further from the model than this is of something else


class Software(NamedTuple):
    """What a release of Megatron does, as the compiled model reads it."""

    fused_attention: bool  # scores never leave the chip (arXiv 2205.14135)
    sequence_parallel: bool  # arXiv 2205.05198, section 4.2
    interleaved: bool  # virtual stages, arXiv 2104.04473, section 2.2
    sharded_transfers: bool  # pipeline neighbours exchange 1/tp each: arXiv 2104.04473, section 4.1
    distributed_optimizer: bool  # optimizer state and update divided by dp
    overlapped_reduction: bool  # gradients are reduced under the backward pass
    overlapped_tensor: bool  # tensor-parallel traffic under the matrix products
    waited_transfers: int  # per micro-batch: 0 under the computation, 2 both ways at once, 4 one after the other
    fused_gradients: bool  # weight gradients are added to their sums where they are made
    gradient_bytes: int  # of one gradient element as it is reduced


class Efficiency(NamedTuple):
    """Shares of the data sheet that are reached, 0..1, unless it says else; none is of one model or layout."""

    matrix: float  # of peak_flops, by a large matrix product
    attention: float  # of matrix, by fused attention
    misaligned: float  # of matrix, by attention's products where a head is no multiple of 8 elements: vector units
    hbm: float  # of HBM bandwidth, by elementwise kernels
    link: float  # of the links inside a node, by collectives
    network: float  # of the network between nodes, with RDMA or slower than the host
    network_onload: float  # the same, of collectives, where the host's processors move the bytes
    hidden_tensor: float  # of tensor-parallel traffic, where it is overlapped
    hidden_reduction: float  # of gradient traffic, where it is overlapped
    tail_waves: float  # waves of tiles that starting and ending a matrix product costs
    tile_fill: float  # elements of inner extent that starting and ending one tile costs


class Calibration(NamedTuple):
    software: Software
    efficiency: Efficiency
    scale: float = 1.0  # measured over modelled throughput of this GPU type, precision and generation


@functools.cache
def stored() -> dict[str, Any]:
    """calibration.json, as it is."""
    text = resources.files("unicron.performance").joinpath("calibration.json").read_text(encoding="utf-8")
    result: dict[str, Any] = json.loads(text)
    return result


def generations() -> list[str]:
    return list(stored()["software"])


def calibration_of(gpu: str, *, precision: str = "bf16", generation: str = "core-2024") -> Calibration:
    """The stored calibration; a GPU type or generation that was never measured keeps the scale 1.

    Raises PerformanceError for an unknown generation.
    """
    known = stored()
    if generation not in known["software"]:
        raise PerformanceError(f"unknown software generation {generation!r}: {', '.join(known['software'])}")
    scale = (
        known["scale"]
        .get(gpu.split("-")[0], {})
        .get("bf16" if precision == "fp16" else precision, {})
        .get(generation, 1.0)
    )
    return Calibration(Software(**known["software"][generation]), Efficiency(**known["efficiency"]), scale)


def scaled(calibration: Calibration, *, modelled: float, measured: float) -> Calibration:
    """The calibration with one measured point: both in the same unit of throughput.

    Raises PerformanceError where either is not positive and finite, or they are further apart than SCALE_MAX.
    """
    for name, value in (("modelled", modelled), ("measured", measured)):
        if not (math.isfinite(value) and value > 0):
            raise PerformanceError(f"{name} throughput must be positive and finite, not {value!r}")
    scale = calibration.scale * measured / modelled
    if not 1 / SCALE_MAX <= scale <= SCALE_MAX:
        raise PerformanceError(f"measured throughput is {measured / modelled:.3g} of the model's: not the same task?")
    return calibration._replace(scale=scale)
