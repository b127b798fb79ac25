"""The demo's model: an ordinary megatron-core GPT, built with its own classes and nothing of
unicron.

4 layers x 64, 4 heads, 64 tokens, bytes as vocabulary: small enough for two CPU cores (SIZES has a larger one, for a
GPU), with every part that healing has to know: tensor-parallel layers, pipeline stages, embeddings tied between the
first and the last stage, DDP's flat gradient buffers, Megatron's optimizer and scheduler. What is
switched off for a CPU is listed in training/megatron_cpu.py (CONFIG)."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from unicron.demo.variant import PLAIN, Variant
from unicron.training import megatron_cpu
from unicron.training.norm import with_marked_norms
from unicron.types import Layout

# layers, hidden size, heads, tokens, dtype; UNICRON_DEMO_SIZE chooses
SIZES = {
    "small": (4, 64, 4, 64, torch.float32),
    "small-bf16": (4, 64, 4, 64, torch.bfloat16),
    "350m": (30, 1024, 16, 1024, torch.bfloat16),
    "1b": (12, 2560, 20, 1024, torch.bfloat16),
}
NUM_LAYERS, HIDDEN, NUM_HEADS, SEQ_LENGTH, DTYPE = SIZES[os.environ.get("UNICRON_DEMO_SIZE", "small")]
VOCABULARY = 256
LEARNING_RATE = 3e-3
WARMUP_ITERATIONS = 5
CLIP_GRAD = 1.0
MODEL_SEED = 1234
INITIAL_LOSS_SCALE = 2.0**14  # too large at first: some steps are left out, as in every run with fp16
LOSS_SCALE_WINDOW = 6  # iterations without overflow after which it grows
OVERLAP_BUCKET = 40_000  # parameters in a bucket: several of them


def build(layout: Layout, variant: Variant = PLAIN) -> tuple[Any, Any, Any]:
    """(DDP model or its chunks, Megatron optimizer, scheduler) of this rank. parallel_state must stand."""
    interleaved = variant.virtual_pp > 1
    parallel_state.set_virtual_pipeline_model_parallel_world_size(variant.virtual_pp if interleaved else None)
    tensor_parallel.model_parallel_cuda_manual_seed(MODEL_SEED)
    if torch.cuda.is_available():
        make_deterministic()
    config = transformer_config(layout, variant)
    torch.manual_seed(MODEL_SEED)
    stages = range(variant.virtual_pp) if interleaved else [None]
    chunks = [wrap(build_chunk(config, stage), config, layout, variant) for stage in stages]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="sgd" if variant.sgd else "adam",
            lr=LEARNING_RATE,
            weight_decay=0.01,
            clip_grad=0.0 if variant.unclipped else CLIP_GRAD,
            use_distributed_optimizer=layout.sharded,
            overlap_param_gather=variant.overlap and layout.sharded,
            bf16=config.bf16,
            fp16=config.fp16,
            initial_loss_scale=INITIAL_LOSS_SCALE,
            loss_scale_window=LOSS_SCALE_WINDOW,
            params_dtype=config.params_dtype,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    config.grad_scale_func = optimizer.scale_loss if config.fp16 else None
    return chunks if interleaved else chunks[0], optimizer, build_scheduler(optimizer, layout)


def build_chunk(config: TransformerConfig, stage: int | None) -> GPTModel:
    """stage: the chunk's number in an interleaved pipeline."""
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    return GPTModel(
        config,
        with_marked_norms(spec, config) if config.sequence_parallel else spec,
        vocab_size=VOCABULARY,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
        vp_stage=stage,
    )


def wrap(model: GPTModel, config: TransformerConfig, layout: Layout, variant: Variant) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=variant.overlap,
        overlap_param_gather=variant.overlap and layout.sharded,
        bucket_size=OVERLAP_BUCKET if variant.overlap else None,
        use_distributed_optimizer=layout.sharded,
        num_distributed_optimizer_instances=layout.instances,
    )
    if torch.cuda.is_available():
        model = model.cuda()
    return DistributedDataParallel(config, ddp, Float16Module(config, model) if config.bf16 or config.fp16 else model)


def make_deterministic() -> None:
    """Equal digests need kernels whose sums have one order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def transformer_config(layout: Layout, variant: Variant = PLAIN) -> TransformerConfig:
    # A pipeline of gloo sends needs to know its dtype; the summed loss makes width irrelevant.
    dtype = torch.bfloat16 if variant.bf16 else torch.float16 if variant.fp16 else DTYPE
    return TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=NUM_HEADS,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=variant.virtual_pp if variant.virtual_pp > 1 else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        deterministic_mode=torch.cuda.is_available(),
        sequence_parallel=variant.sequence_parallel and layout.tp > 1,
        attention_dropout=variant.dropout,
        hidden_dropout=variant.dropout,
        calculate_per_token_loss=True,
        **(experts_config(layout, variant) if variant.experts else {}),
        **{**megatron_cpu.CONFIG, "use_cpu_initialization": not torch.cuda.is_available()},
    )


def experts_config(layout: Layout, variant: Variant) -> dict[str, Any]:
    """Two experts a token, as many of them on each lane; with the loss that keeps them equally busy."""
    return {
        "num_moe_experts": variant.experts,
        "expert_model_parallel_size": layout.ep,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_ffn_hidden_size": 2 * HIDDEN,
        "add_bias_linear": False,
    }


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
    if torch.cuda.is_available():
        batch = {name: value.cuda() if torch.is_tensor(value) else value for name, value in batch.items()}
    output = model(batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"])
    return output, functools.partial(summed_loss, batch["loss_mask"])


@torch.no_grad()
def evaluate(model: Any, dataset: Any, micro_batch: int, iteration: int = 0) -> None:
    """One forward through all stages of this replica, as a script would look at data it does not train on."""
    chunks = model if isinstance(model, list) else [model]
    count = parallel_state.get_pipeline_model_parallel_world_size()  # what an interleaved pipeline takes at least
    batches = [iter([dataset(iteration, number) for number in range(count)]) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches if len(chunks) > 1 else batches[0],
        model=chunks,
        num_microbatches=count,
        seq_length=SEQ_LENGTH,
        micro_batch_size=micro_batch,
        forward_only=True,
    )


def summed_loss(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    loss = torch.sum(output.float().view(-1) * loss_mask.view(-1))
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}
