"""An understudy's first iteration, before it has a role: the kernels that the real one needs are loaded by then.

A process's first forward, backward and step cost about a second on a GPU (MECHANICS 4.3), which is what an heir would
pay inside the interrupted iteration. So the understudy runs one layer of the real model, the embedding, the loss and
the optimizer once, with real shapes, under the stand-in groups (nobody else takes part) and over the scratch block that
its arena shows instead of memory: values mean nothing and nothing of it is kept. One layer, because all of them
together would need a member's memory beside the member.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from unicron.training.chunks import Chunks
from unicron.training.gpu import give_memory_back
from unicron.training.gradients import squares_of
from unicron.training.optimizer_state import GroupCounts, inner_optimizers
from unicron.types import Layout


def rehearse(model: Chunks, optimizer: Any, layout: Layout, device: int) -> None:
    """Best effort: what a model does not have is left out, and said. Of several chunks the first stands for all."""
    gpt = model.first
    while hasattr(gpt, "module"):
        gpt = gpt.module
    states, counts = _random_states(), GroupCounts(inner_optimizers(optimizer))
    try:
        for part in (_layer, _embedding, _loss):
            try:
                part(gpt, layout, device)
            except Exception as error:
                print(f"unicron: not rehearsed: {part.__name__.strip('_')}: {error!r}", file=sys.stderr)
        _step(model, optimizer)
    except Exception as error:
        print(f"unicron: not rehearsed: step: {error!r}", file=sys.stderr)
    finally:
        _restore(states)
        counts.rewind()
        model.zero_grad_buffer()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            give_memory_back(device)


def _place(device: int) -> torch.device:
    return torch.device("cuda", device) if torch.cuda.is_available() else torch.device("cpu")


def _hidden(gpt: Any, layout: Layout, device: int) -> torch.Tensor:
    shape = (gpt.max_sequence_length, layout.micro_batch, gpt.config.hidden_size)
    return torch.ones(shape, dtype=gpt.config.params_dtype, device=_place(device), requires_grad=True)


def _tokens(gpt: Any, layout: Layout, device: int) -> torch.Tensor:
    return torch.zeros(layout.micro_batch, gpt.max_sequence_length, dtype=torch.long, device=_place(device))


def _layer(gpt: Any, layout: Layout, device: int) -> None:
    length = gpt.max_sequence_length
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=_place(device)).triu(1)
    result = gpt.decoder.layers[0](hidden_states=_hidden(gpt, layout, device), attention_mask=mask)
    output = result[0] if isinstance(result, tuple) else result
    output.float().sum().backward()


def _embedding(gpt: Any, layout: Layout, device: int) -> None:
    if getattr(gpt, "pre_process", False):
        tokens = _tokens(gpt, layout, device)
        positions = torch.arange(gpt.max_sequence_length, device=tokens.device).expand_as(tokens)
        gpt.embedding(input_ids=tokens, position_ids=positions).float().sum().backward()


def _loss(gpt: Any, layout: Layout, device: int) -> None:
    if not getattr(gpt, "post_process", False):
        return
    hidden = _hidden(gpt, layout, device)
    norm = gpt.decoder.final_layernorm
    shared = gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else None
    logits, _ = gpt.output_layer(hidden if norm is None else norm(hidden), weight=shared)
    loss = gpt.compute_language_model_loss(_tokens(gpt, layout, device), logits)
    loss.float().sum().backward()


def _step(model: Chunks, optimizer: Any) -> None:
    """Norm, scaling and update, as training/step.py does them."""
    for buffer in model.buffers:
        squares_of([buffer.grad_data])
        buffer.grad_data.zero_()
    optimizer.prepare_grads()
    optimizer.step_with_ready_grads()


def _random_states() -> tuple[Any, Any, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return torch.get_rng_state(), on_gpu, get_cuda_rng_tracker().get_states()


def _restore(states: tuple[Any, Any, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
    get_cuda_rng_tracker().set_states(states[2])
