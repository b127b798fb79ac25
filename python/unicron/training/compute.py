"""Forward and backward of given micro-batches through Megatron's own schedule, and what comes back.

Megatron's schedule is used unchanged: `config.finalize_model_grads_func` is ours (the reduction is done apart), the
data iterator is ours (it knows which micro-batch is next, moves the pulse and is where a fault can be armed), and
forward_step is wrapped to record the loss, because forward_data_store is local to the schedule and dies with it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from unicron.training.chunks import Chunks, padded
from unicron.training.randomness import Randomness
from unicron.types import Layout

ForwardStep = Callable[[Iterator[Any], Any], tuple[Any, Any]]
Dataset = Callable[[int, int], Any]
LOSS_SCALE = float(1 << 20)  # in exact mode losses are summed in multiples of this part of one


class PerTokenLossRequired(ValueError):
    """calculate_per_token_loss is off: the mean of means depends on how micro-batches are grouped."""


class ParallelismRefused(ValueError):
    """The model is spread in a way that unicron cannot heal."""


#: Sizes in a TransformerConfig that must be 1.
REFUSED_SIZES = {"context_parallel_size": "context"}


def rounded_loss(loss: torch.Tensor) -> torch.Tensor:
    """A float64 that is added to others of its kind without rounding (exact mode)."""
    return torch.round(loss.double() * LOSS_SCALE) / LOSS_SCALE


def check_config(config: Any) -> None:
    """Refuse by name what would make the result depend on width or history, or cannot be healed."""
    for name, what in REFUSED_SIZES.items():
        size = getattr(config, name, 1)
        if size > 1:
            raise ParallelismRefused(
                f"TransformerConfig.{name} is {size}: {what} parallelism cannot be healed in this version; set it to 1 "
                "(tp, pp, ep and dp can be as they like)"
            )
    _check_pipeline(config)
    if getattr(config, "num_moe_experts", None):
        _check_experts(config)
    if not getattr(config, "calculate_per_token_loss", False):
        raise PerTokenLossRequired(
            "TransformerConfig.calculate_per_token_loss is False: set it to True and return (sum, tokens, dict) "
            "from loss_func; a mean of means depends on the data-parallel width"
        )


def check_ddp_config(ddp: Any, layout: Layout) -> None:
    """Refuse by name what puts state where unicron does not look for it."""
    instances = getattr(ddp, "num_distributed_optimizer_instances", 1)
    if instances != layout.instances:
        raise ParallelismRefused(
            f"DistributedDataParallelConfig.num_distributed_optimizer_instances is {instances}, the task's "
            f"{layout.instances}: set it to session.layout.instances, and say the number that you want with "
            "--optimizer-instances or layout.optimizer_instances"
        )
    for name in ("use_megatron_fsdp", "use_custom_fsdp"):
        if getattr(ddp, name, False):
            raise ParallelismRefused(
                f"DistributedDataParallelConfig.{name} is on: sharded parameters cannot be healed in this version; "
                "leave it out, and use the distributed optimizer"
            )


def _check_pipeline(config: Any) -> None:
    """Of two stages, which are each other's both neighbours."""
    if getattr(config, "pipeline_model_parallel_size", 1) != 2:
        return
    if not getattr(config, "batch_p2p_comm", True):
        raise ParallelismRefused(
            "TransformerConfig.batch_p2p_comm is False with two pipeline stages: Megatron then sends over the group of "
            "all ranks, which a failure anywhere ends; set batch_p2p_comm=True and overlap_p2p_comm=False"
        )
    if getattr(config, "virtual_pipeline_model_parallel_size", None) and torch.cuda.is_available():
        raise ParallelismRefused(
            "an interleaved pipeline of two stages: NCCL takes what goes forward and what goes back for one another; "
            "use pp of 3 or more, or leave virtual_pipeline_model_parallel_size out"
        )


def _check_experts(config: Any) -> None:
    """Refuse by name what mixes micro-batches of several replicas, or of one replica's past, into a forward."""
    size, expert_tp = config.tensor_model_parallel_size, getattr(config, "expert_tensor_parallel_size", None)
    if expert_tp not in (None, size):
        raise ParallelismRefused(
            f"TransformerConfig.expert_tensor_parallel_size is {expert_tp}, tensor_model_parallel_size {size}: experts "
            "that are cut otherwise than the rest lie in replicas of another size; leave it out"
        )
    kinds = config.moe_router_load_balancing_type
    if "global_aux_loss" in ([kinds] if isinstance(kinds, str) else kinds):
        raise ParallelismRefused(
            "TransformerConfig.moe_router_load_balancing_type has global_aux_loss: it sums over all replicas inside "
            "the forward, and over the micro-batches before, so what a micro-batch gives depends on the width and on "
            "failures; use aux_loss or seq_aux_loss"
        )
    if getattr(config, "moe_token_dispatcher_type", "") == "flex":
        raise ParallelismRefused(
            "TransformerConfig.moe_token_dispatcher_type is flex: it exchanges tokens in buffers of its own (DeepEP, "
            "HybridEP), which nobody here can end when a rank is lost; use alltoall or allgather"
        )
    if config.moe_router_enable_expert_bias:
        raise ParallelismRefused(
            "TransformerConfig.moe_router_enable_expert_bias is on: the bias follows counts of tokens that are kept "
            "outside of gradients and optimizer, and would be lost or counted twice in a failure; use aux_loss"
        )


class Computation:
    """A rank's forwards and backwards. `scalars` (in the arena) collects tokens and loss of the last stage."""

    def __init__(self, model: Chunks, layout: Layout, scalars: torch.Tensor) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.utils import get_model_config

        self.model, self.layout, self.scalars = model, layout, scalars
        self.config = get_model_config(model.first)
        check_config(self.config)
        spread = getattr(self.config, "expert_model_parallel_size", 1)
        if spread != layout.ep:
            raise ParallelismRefused(
                f"TransformerConfig.expert_model_parallel_size is {spread}, the task's ep {layout.ep}: set "
                "expert_model_parallel_size=session.layout.ep, and say the ep that you want with --ep or layout.ep"
            )
        for chunk in model.chunks:
            check_ddp_config(chunk.ddp_config, layout)
        self.config.finalize_model_grads_func = self._finalize
        self._schedule = get_forward_backward_func
        self.extra_metrics: list[Any] = []
        self.forward_done: Callable[[int], None] = lambda micro_batch: None
        self.backward_begins: Callable[[int, int], None] = lambda chunk, micro_batch: None
        self.last_backward: Callable[[int], None] = lambda chunk: None  # of a chunk of the model begins, in one run()
        self.randomness: Randomness | None = None  # None: as the script's generators go
        self._fetched: list[int] = []
        self._last_number = -1  # of a chunk's backwards, which come in the order of its forwards

    def _finalize(self, model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        if num_tokens is not None:
            # Added as tensors: on a GPU nothing waits for the number.
            self.scalars[0].add_(torch.as_tensor(num_tokens).to(self.scalars.device).reshape(()))

    def run(
        self, iteration: int, micro_batches: Sequence[int], forward_step: ForwardStep, dataset: Dataset,
        begin: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Sums of these micro-batches are added to the gradient buffers. begin(m) is called when m is fetched."""
        self.extra_metrics = []
        if not micro_batches:
            return
        self._fetched = []
        chunks = self.model.chunks
        forwards = list(micro_batches)
        if len(chunks) > 1:
            missing = padded(micro_batches, self.config.microbatch_group_size_per_vp_stage) - len(micro_batches)
            forwards += [micro_batches[-1]] * missing

        def batches(chunk: int) -> Iterator[Any]:
            for number, micro_batch in enumerate(forwards):
                if chunk == 0 and number < len(micro_batches):
                    begin(micro_batch)
                    self._fetched.append(micro_batch)
                yield dataset(iteration, micro_batch)

        iterators = [batches(chunk) for chunk in range(len(chunks))]
        order = [iter(enumerate(forwards)) for _ in chunks]
        self._last_number = len(forwards) - 1
        with contextlib.nullcontext() if self.randomness is None else self.randomness.kept():
            self.extra_metrics = self._schedule()(
                forward_step_func=self._recording(forward_step, iteration, order, len(micro_batches)),
                data_iterator=iterators if len(chunks) > 1 else iterators[0],
                model=chunks,
                num_microbatches=len(forwards),
                seq_length=self._sequence_length(dataset),
                micro_batch_size=self.layout.micro_batch,
                forward_only=False,
            )

    def _recording(
        self, forward_step: ForwardStep, iteration: int, order: Sequence[Iterator[tuple[int, int]]], count: int
    ) -> ForwardStep:
        """order: (number, micro-batch) of each chunk's forwards: they come in this order, also where a stage fetches
        none. From number `count` on they only fill up the schedule: their loss is nothing, and so is their gradient.
        """

        def wrapped(data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
            chunk = self.model.number_of(model)
            number, micro_batch = next(order[chunk])
            if self.randomness is not None:
                self.randomness.begin(iteration, micro_batch)
            output, loss_func = forward_step(data_iterator, model)
            self.forward_done(self._fetched[-1] if self._fetched else -1)
            if torch.is_tensor(output) and output.requires_grad:
                output.register_hook(lambda _: self._backward_begins(chunk, number, micro_batch))

            def recorded(*args: Any, **kwargs: Any) -> Any:
                result = loss_func(*args, **kwargs)
                if not isinstance(result, tuple) or len(result) != 3:
                    raise PerTokenLossRequired(
                        "loss_func must return (sum of losses, number of tokens, dict of metrics)"
                    )
                if number >= count:
                    return result[0] * 0, result[1] * 0, result[2]
                loss = result[0].detach().reshape(())
                self.scalars[1].add_(rounded_loss(loss) if self.layout.exact else loss)
                return result

            return output, recorded

        return wrapped

    def _backward_begins(self, chunk: int, number: int, micro_batch: int) -> None:
        self.backward_begins(chunk, micro_batch)
        if number == self._last_number:
            self.last_backward(chunk)

    def _sequence_length(self, dataset: Any) -> int:
        """Megatron's pipeline needs it to size receive buffers."""
        places = (
            (dataset, "seq_length"),
            (self.config, "seq_length"),
            (self.model.first.module, "max_sequence_length"),
        )
        for holder, name in places:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
        raise ValueError("dataset.seq_length is missing: the pipeline needs it to size its receive buffers")


def tie(model: Chunks, config: Any) -> None:
    """Gradient collectives inside the replica: sequence-parallel norms, tied word and position embeddings, and what is
    outside of experts over the lanes. (One sum over all lanes of all replicas would move less; but then the lanes of a
    replica held different sums, and a chunk that one of them has reduced would be that of no position alone.)

    In place: if one breaks, every member of the replica drops its sums and computes again.
    """
    from megatron.core import parallel_state

    # megatron.core.distributed has a function of this module's name: the module is found by its path only.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    embd = parallel_state.get_embedding_group(check_initialized=False)
    pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    module._allreduce_non_tensor_model_parallel_grads(model.chunks, config, tp_group)
    module._allreduce_word_embedding_grads(model.chunks, config, embd, pp_group)
    module._allreduce_position_embedding_grads(model.chunks, config, pos_embd, pp_group)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        lanes = parallel_state.get_expert_model_parallel_group()
        for buffer in model.buffers:
            torch.distributed.all_reduce(buffer.grad_data, group=lanes)


def share_tied_weight(model: Chunks) -> None:
    """Give the last stage's copy of a tied embedding the first stage's values, when a task starts.

    Megatron does it while the model is built, by a sum with zeros; then the groups are stand-ins and nothing is
    summed. A broadcast, so that doing it twice (a failure during the start) changes nothing.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import get_attr_wrapped_model

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    modules = [get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True) for chunk in model.chunks]
    module = next((m for m in modules if m.pre_process or m.post_process), None)
    if module is not None and getattr(module, "share_embeddings_and_output_weights", False):
        group = parallel_state.get_embedding_group()
        weight = module.shared_embedding_or_output_weight()
        torch.distributed.broadcast(weight.data, src=torch.distributed.get_global_rank(group, 0), group=group)
