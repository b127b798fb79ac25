"""The work under unicron: the same GPT inside megatron-core's DDP, with megatron-core's Adam.

What stands before join() is done by understudies too, while they wait for a role: imports, data, a first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import MegatronModule

import unicron
from peers import job, work
from peers.record import Recorder
from unicron.demo import model as demo


class Wrapped(MegatronModule):
    """The GPT with what megatron's schedule asks of a model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gpt = work.build().to(torch.cuda.current_device() if job.ON_GPUS else "cpu")
        self.max_sequence_length = job.SEQ_LENGTH
        self.model_type = ModelType.encoder_or_decoder

    def set_input_tensor(self, _: Any) -> None:
        """A pipeline's; here is none."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, labels)


def main() -> None:
    data = prepared()
    with unicron.join(micro_batch=job.MICRO_BATCH, num_micro_batches=job.NUM_MICRO_BATCHES) as session:
        recorder = Recorder(session.rank)
        model, optimizer, scheduler = build(session.layout)
        device = next(model.parameters()).device
        session.manage(model, optimizer, scheduler)
        recorder.say("ready")

        def forward_step(batches: Iterator[Any], gpt: Any) -> tuple[torch.Tensor, Any]:
            batch = next(batches)
            recorder.begins(*batch["address"])
            return gpt(batch["tokens"].to(device), batch["labels"].to(device)), summed

        for iteration in session.iterations(1 << 30):
            if iteration >= recorder.told_end():
                break
            metrics = session.train_step(iteration, forward_step, data)
            recorder.committed(iteration, session.layout.dp, metrics.loss, metrics.tokens)
            recorder.compared(iteration, lambda: work.weights(model))
        recorder.say("end")


def prepared() -> work.Data:
    """On a GPU unicron itself warms an understudy up, and gives it one only then."""
    if job.ON_GPUS:
        work.fix_order()
        return work.Data()
    warm = work.Trainer(0)
    warm.warm_up()
    return warm.data


def summed(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return output.sum(), torch.tensor(output.numel(), dtype=torch.int, device=output.device), {}


def build(layout: Any) -> tuple[Any, Any, Any]:
    config = demo.transformer_config(layout)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, Wrapped(config))
    rates = {"lr": job.LEARNING_RATE, "weight_decay": job.WEIGHT_DECAY, "clip_grad": job.CLIP}
    settings = OptimizerConfig(optimizer="adam", params_dtype=torch.float32, **rates)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    rate, decay = job.LEARNING_RATE, job.WEIGHT_DECAY
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=rate, max_lr=rate, min_lr=rate, lr_warmup_steps=0, lr_decay_steps=1 << 30,
        lr_decay_style="constant", start_wd=decay, end_wd=decay, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    return model, optimizer, scheduler


if __name__ == "__main__":
    main()
