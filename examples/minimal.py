"""The least a training script needs to be healed: four lines of unicron around megatron-core.

    unicron run --agents 2 examples/minimal.py
    kill -9 one of its workers meanwhile (unicron describe has their pids), and watch the loss go on
"""

import functools

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import unicron
from unicron.training.data import ByteCorpus, ByteDataset
from unicron.training.megatron_cpu import CONFIG

ITERATIONS, SEQ_LENGTH = 200, 64


def build(layout):
    """Ordinary megatron-core code. CONFIG switches off what exists as a CUDA kernel only."""
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,  # required: the result must not depend on the width
        **({} if torch.cuda.is_available() else CONFIG),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=SEQ_LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=3e-3, clip_grad=1.0),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer


def forward_step(data_iterator, model):
    """Megatron's own contract: (output, loss function); that returns (sum, tokens, report)."""
    batch = next(data_iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, functools.partial(summed, batch["loss_mask"])


def summed(loss_mask, output):
    loss = (output.view(-1) * loss_mask.view(-1)).sum()
    tokens = loss_mask.sum().to(torch.int)
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.float()])}


def main():
    with unicron.join(micro_batch=2, num_micro_batches=8) as session:
        layout = session.layout
        dataset = ByteDataset(
            ByteCorpus.from_stdlib(), SEQ_LENGTH, layout.micro_batch, layout.num_micro_batches
        )
        model, optimizer = build(layout)
        session.manage(model, optimizer)
        for iteration in session.iterations(ITERATIONS):
            metrics = session.train_step(iteration, forward_step, dataset)
            session.save_if_due(iteration)  # where a checkpoint folder was given, and this iteration is one to save
            if session.speaks and iteration % 10 == 9:
                print(f"iteration {iteration + 1}: loss {metrics.loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
