"""The demo's model: an ordinary megatron-core GPT, built with its own classes and nothing of
unicron.

4 layers x 64, 4 heads, 64 tokens, bytes as vocabulary: small enough for two CPU cores, with every
part that healing has to know: tensor-parallel layers, pipeline stages, embeddings tied between the
first and the last stage, DDP's flat gradient buffers, Megatron's optimizer and scheduler. What is
switched off for a CPU is listed in training/megatron_cpu.py (CONFIG)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig

from unicron.training import megatron_cpu
from unicron.types import Layout

NUM_LAYERS = 4
HIDDEN = 64
NUM_HEADS = 4
SEQ_LENGTH = 64
VOCABULARY = 256
LEARNING_RATE = 3e-3
WARMUP_ITERATIONS = 5
CLIP_GRAD = 1.0
MODEL_SEED = 1234


def build(layout: Layout) -> tuple[Any, Any, Any]:
    """(DDP model, Megatron optimizer, scheduler) of this rank. parallel_state must stand."""
    tensor_parallel.model_parallel_cuda_manual_seed(MODEL_SEED)
    config = transformer_config(layout)
    torch.manual_seed(MODEL_SEED)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    ddp = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=layout.sharded)
    model = DistributedDataParallel(config, ddp, model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=LEARNING_RATE, weight_decay=0.01, clip_grad=CLIP_GRAD,
            use_distributed_optimizer=layout.sharded,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer, build_scheduler(optimizer, layout)


def transformer_config(layout: Layout) -> TransformerConfig:
    # A pipeline of gloo sends needs to know its dtype; the summed loss makes width irrelevant.
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=NUM_HEADS,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        params_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        **megatron_cpu.CONFIG,
    )


def build_scheduler(optimizer: Any, layout: Layout) -> OptimizerParamScheduler:
    """A short warm-up, then a constant rate: nothing depends on where a run was meant to end.

    Megatron's scheduler counts samples."""
    batch = layout.micro_batch * layout.num_micro_batches
    return OptimizerParamScheduler(
        optimizer,
        init_lr=LEARNING_RATE / WARMUP_ITERATIONS,
        max_lr=LEARNING_RATE,
        min_lr=LEARNING_RATE,
        lr_warmup_steps=WARMUP_ITERATIONS * batch,
        lr_decay_steps=1 << 30,
        lr_decay_style="constant",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's contract: the output, and a function of it that gives (sum, tokens, report)."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, functools.partial(summed_loss, batch["loss_mask"])


def summed_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = torch.sum(output.float().view(-1) * loss_mask.view(-1))
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}
