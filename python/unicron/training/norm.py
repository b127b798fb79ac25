"""LayerNorm for sequence parallelism without Transformer Engine or apex, and a layer specification with it.

Megatron's local specification takes torch's LayerNorm there and refuses it under sequence parallelism
(transformer/torch_norm.py). All that is missing is a mark: its parameters see a part of the sequence on each
tensor-parallel rank, so their gradients are summed over these ranks (finalize_model_grads; here: tie).
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class MarkedLayerNorm(torch.nn.LayerNorm):
    """Takes what Megatron's specifications give a norm: config, hidden_size, eps."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        if config.normalization != "LayerNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(f"{type(self).__name__} is a plain LayerNorm, not {config.normalization} or zero-centered")
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def with_marked_norms(layer_spec: Any, config: Any) -> Any:
    """Of this pipeline stage's block: layer_spec (get_gpt_layer_local_spec) with norms that are marked."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    spec = copy.deepcopy(layer_spec)
    spec.submodules.input_layernorm = MarkedLayerNorm
    spec.submodules.pre_mlp_layernorm = MarkedLayerNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=MarkedLayerNorm)
