"""The same script without unicron around it: plain torchrun or python, Megatron's own reduction and step.

What the script says is the same; nothing is supervised, and a failure ends the run as it always did.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from unicron.training import compute
from unicron.training import data as data_module
from unicron.training.chunks import Chunks
from unicron.training.expected import Expected
from unicron.training.scheduler import advance_scheduler
from unicron.types import Layout, refusal_of_instances


class UnmanagedSession:
    """Session's interface over torchrun's environment. layout comes from join()'s arguments."""

    managed = False
    rehearses = False

    def __init__(
        self, tp: int, pp: int, micro_batch: int, num_micro_batches: int, *, ep: int = 1, sharded: bool = False,
        instances: int = 1,
    ) -> None:  # fmt: skip
        self.rank = int(os.environ.get("RANK", "0"))
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size % (tp * pp):
            raise ValueError(f"{world_size} processes cannot be spread over tp {tp} x pp {pp}: they do not divide")
        dp = world_size // (tp * pp)
        num_micro_batches = num_micro_batches or dp
        if num_micro_batches % dp:
            raise ValueError(f"{num_micro_batches} micro-batches do not divide over {dp} replicas")
        if dp % ep:
            raise ValueError(f"dp {dp} does not divide by ep {ep}: experts are spread over so many of its indices")
        self.layout = Layout(
            tp=tp, pp=pp, dp=dp, ep=ep, micro_batch=micro_batch, num_micro_batches=num_micro_batches, sharded=sharded,
            instances=instances,
        )  # fmt: skip
        if why := refusal_of_instances(self.layout):
            raise ValueError(why)
        self._callbacks: list[Callable[..., None]] = []

    @property
    def speaks(self) -> bool:
        return self.rank == 0

    def __enter__(self) -> UnmanagedSession:
        from megatron.core import parallel_state

        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if "MASTER_ADDR" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.layout.tp,
            pipeline_model_parallel_size=self.layout.pp,
            expert_model_parallel_size=self.layout.ep,
            num_distributed_optimizer_instances=self.layout.instances,
            create_gloo_process_groups=False,
        )
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def manage(self, model: Any, optimizer: Any, scheduler: Any = None) -> None:
        self._model, self._optimizer, self._scheduler = Chunks(model), optimizer, scheduler
        device = next(self._model.parameters()).device
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._computation = compute.Computation(self._model, self.layout, self._sums)
        self._computation.config.finalize_model_grads_func = self._finalize

    def _finalize(self, model: list[Any], num_tokens: Any = None, **kwargs: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        if num_tokens is not None:
            self._sums[0].add_(torch.as_tensor(num_tokens).to(self._sums.device).reshape(()))
        finalize_model_grads(model, num_tokens, **kwargs)

    def iterations(self, count: int) -> Iterator[int]:
        return iter(range(count))

    def train_step(self, iteration: int, forward_step: Any, dataset: Any) -> Any:
        from unicron.training.session import Metrics

        layout = self.layout
        batches = data_module.addressed(dataset, layout.micro_batch, layout.num_micro_batches)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._sums.zero_()
        share = layout.num_micro_batches // layout.dp
        first = layout.coords(self.rank)[1] * share  # lanes, too, take runs: nobody heals what they share
        self._computation.run(iteration, range(first, first + share), forward_step, batches, lambda micro_batch: None)
        stepped, grad_norm, _ = self._optimizer.step()
        if stepped:  # else the loss scale was too large, and the next iteration has a smaller one
            advance_scheduler(self._scheduler, layout)
        total = self._sums.clone()
        dist.all_reduce(total)
        # Every tp rank of a last stage counts the same tokens and loss.
        tokens = max(float(total[0]), 1.0)
        return Metrics(iteration, float(total[1]) / tokens, float(grad_norm or 0.0), int(tokens) // layout.tp, False)

    def on_reduced(self, callback: Callable[..., None]) -> None:
        """Not called: Megatron scales inside its own reduction."""
        self._callbacks.append(callback)

    def wait_for_parameters(self) -> bool:
        """See Session. Nothing heals: what breaks there is raised."""
        for chunk in self._model.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return True

    @contextlib.contextmanager
    def expect(self, what: str, seconds: float) -> Iterator[Expected]:
        """Nobody judges, and nothing heals: what breaks there is raised."""
        expected = Expected(what)
        yield expected
        expected.finished = True

    def save_if_due(self, iteration: int) -> bool:
        """Nothing is due: without unicron the script saves as it used to."""
        return False
