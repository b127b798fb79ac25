"""Segments of the gradient are reduced while the last backward still runs, where the script asked for that.

A segment that is final is copied to its place in the staging area, and its all-reduce begins there and is not waited
for. The local sums stay as they are until the reduction, which takes the results that are complete, in order, as it
takes its own (gradients.py). Whatever breaks, or ends the epoch, before that costs the results only: they are dropped,
and the reduction is today's. So nothing that heals knows of this, and a replica whose peer died goes on computing.

Which segments, in which order: eager_plan.py. In which iterations: healing/machine.py, all of a position or nobody.

A thread of autograd's calls the hooks on a GPU. There a segment is copied on the stream of its backward, the collective
waits for that stream, and the reduction's stream waits for the collective: torch's own order of streams.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from unicron.training.chunks import Chunks
from unicron.training.eager_plan import EagerPlan, Readiness, plan_eager
from unicron.training.gradients import CHUNK_BYTES, Gradients
from unicron.training.groups import wait_out
from unicron.types import Layout

MIB_SETTING = "UNICRON_EAGER_MIB"
MIB_DEFAULT = 512  # of results that lie in the staging area: eight segments of a large model
ELEMENT_BYTES = 4  # Megatron's bucket_size counts parameters
#: Calls what begins a segment's all-reduce and gives what that gave: the place for faults around it.
Passage = Callable[[Callable[[], Any]], Any]
#: Settings under which a gradient is not whole when its hook is called, or no hook is.
NOT_BY_HOOKS = (
    "delay_wgrad_compute", "defer_embedding_wgrad_compute", "enable_cuda_graph", "external_cuda_graph",
)  # fmt: skip


def segment_bytes(model: Chunks) -> int:
    """Of a model whose script asked for overlap: Megatron's bucket where that is smaller, so that what is final early
    can begin early."""
    sizes = [chunk.ddp_config.bucket_size for chunk in model.chunks if chunk.ddp_config.bucket_size]
    return min([CHUNK_BYTES, *(size * ELEMENT_BYTES for size in sizes)])


def why_never(model: Chunks, layout: Layout) -> str:
    """Why nothing of this model is reduced under the backward; nothing if it may be."""
    if layout.exact:
        return "exact sums are whole only when the last backward has ended"
    if layout.ep > 1:
        return "gradients outside of experts are first added up over the ranks that experts are spread over"
    if next(iter(model.parameters())).is_cuda:
        if layout.pp > 1 and getattr(model.config, "batch_p2p_sync", True):
            return "the pipeline waits for the whole GPU after every exchange (batch_p2p_sync), also for other replicas"
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            return "with CUDA_DEVICE_MAX_CONNECTIONS=1 the backward may have to wait for other replicas"
    for settings in (model.config, model.first.ddp_config):
        for name in NOT_BY_HOOKS:
            if getattr(settings, name, False):
                return f"with {name} gradients are not whole when their hooks are called"
        if getattr(settings, "cuda_graph_impl", "none") not in ("none", None):
            return "in a CUDA graph hooks are not called"
    return ""


def tied_names(model: Chunks, layout: Layout) -> set[str]:
    """Parameters whose gradients are added up inside the replica, before any collective between replicas
    (compute.tie); and those of experts, of which nobody knows which micro-batches they get tokens of."""
    found: set[str] = set()
    if layout.pp > 1:
        weights = {id(weight) for chunk in model.chunks for weight in _shared_weights(chunk, model.config)}
        found |= {n for n, p in model.named_parameters() if id(p) in weights or getattr(p, "shared_embedding", False)}
    if layout.tp > 1:
        found |= {n for n, p in model.named_parameters() if _is_summed_over_tp(n, p, model.config)}
    if getattr(model.config, "num_moe_experts", None):
        found |= {name for name, _ in model.named_parameters() if ".experts." in name}
    return found


def _shared_weights(chunk: Any, config: Any) -> Iterator[Any]:
    """Of a chunk's embedding and output layer, where they are one parameter; and position embeddings, which Megatron
    adds up where stages have copies of them."""
    from megatron.core.utils import get_attr_wrapped_model

    module = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    is_shared = getattr(module, "share_embeddings_and_output_weights", False) or getattr(config, "mtp_num_layers", None)
    if is_shared and (module.pre_process or module.post_process):
        yield module.shared_embedding_or_output_weight()
    weight = getattr(getattr(module, "position_embeddings", None), "weight", None)
    if weight is not None:
        yield weight


def _is_summed_over_tp(name: str, param: Any, config: Any) -> bool:
    is_norm = getattr(config, "qk_layernorm", False) and ("q_layernorm" in name or "k_layernorm" in name)
    is_sequence = getattr(config, "sequence_parallel", False) and getattr(param, "sequence_parallel", False)
    return bool(is_norm or is_sequence or getattr(param, "average_gradients_across_tp_domain", False))


def plan_of(model: Chunks, layout: Layout) -> EagerPlan | None:
    """Of a script that asked for it; None where nothing of this model can be eager. With a setting of 0 MiB nothing is,
    and the segments are the same. ValueError when UNICRON_EAGER_MIB is no number."""
    text = os.environ.get(MIB_SETTING, str(MIB_DEFAULT))
    try:
        bytes_max = int(float(text) * (1 << 20))
    except (ValueError, OverflowError):
        raise ValueError(f"{MIB_SETTING} is {text!r}: say a number of MiB, 0 for none") from None
    if layout.dp == 1 or why_never(model, layout):
        return None
    return plan_eager(model, segment_bytes(model), bytes_max, tied_names(model, layout))


class EagerReduction:
    """Of one rank, for the life of its engine."""

    def __init__(
        self, plan: EagerPlan, gradients: Gradients, is_broken: Callable[[BaseException], bool],
        passage: Passage = lambda begin: begin(),
    ) -> None:  # fmt: skip
        """is_broken: of an error: that of an operation with others; passage: calls begin(), for faults around it."""
        self.plan, self._gradients = plan, gradients
        self._is_broken, self._passage = is_broken, passage
        self._readiness = Readiness(plan)
        self._group: dist.ProcessGroup | None = None
        self._works: dict[int, Any] = {}
        self._failure: BaseException | None = None
        self._accumulators: list[Any] = []  # of autograd: it holds them only as long as a graph does
        self._hooks: list[Any] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._works)

    def is_in(self, group: dist.ProcessGroup | None) -> bool:
        """Whatever is under way is so in this group, which is that of the present epoch."""
        return self._group is None or self._group is group

    def watch(self, model: Chunks) -> None:
        """A hook for each parameter, called behind DDP's own, which adds the gradient to the sum. Once."""
        wanted = {name for params in self.plan.params.values() for name in params}
        chunk_of = {id(p): number for number, chunk in enumerate(model.chunks) for p in chunk.parameters()}
        with torch.enable_grad():
            for name, param in model.named_parameters():
                if name in wanted:
                    accumulator = param.expand_as(param).grad_fn.next_functions[0][0]
                    self._hooks.append(accumulator.register_hook(self._hook(name, chunk_of[id(param)])))
                    self._accumulators.append(accumulator)

    def leave(self) -> None:
        """The model goes, and nothing here is to hold it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._accumulators.clear()

    def _hook(self, name: str, chunk: int) -> Callable[..., None]:
        def came(*_: Any) -> None:
            if self._group is not None:
                self._begin(self._readiness.came(name, chunk))

        return came

    # ---------------------------------------------------------- an iteration

    def arm(self, group: dist.ProcessGroup | None) -> None:
        """All of this group's members reduce eagerly in the iteration that they compute now."""
        assert not self._works, "results of before are still here"
        self._group = group if self.plan.order else None
        self._readiness.arm()

    def last_backward(self, chunk: int) -> None:
        """The last one of a chunk of the model, in this iteration, begins."""
        if self._group is not None:
            self._begin(self._readiness.last_backward(chunk))

    def computed(self) -> None:
        """All backwards have ended: what has not begun begins."""
        if self._group is not None:
            self._begin(self._readiness.rest())

    def _begin(self, numbers: list[int]) -> None:
        """What breaks is told by the reduction: nobody stops computing for it."""
        for number in numbers:
            if self._failure is not None:
                return
            try:
                self._works[number] = self._passage(functools.partial(self._all_reduce, number))
            except Exception as error:
                if not self._is_broken(error):
                    raise
                self._failure = error

    @torch.no_grad()
    def _all_reduce(self, number: int) -> Any:
        staged = self._gradients.staged(number)
        staged.copy_(self._gradients.segments[number])
        return dist.all_reduce(staged, group=self._group, async_op=True)

    # ---------------------------------------------------------- in the reduction

    def take(self, number: int) -> Any:
        """The operation whose result is the segment's, to be waited for; None where the segment is not eager now.
        Raises what broke when it should have begun."""
        if self._group is None or number not in self.plan.places:
            return None
        if number not in self._works and self._failure is not None:
            raise self._failure
        return self._works[number]

    def over(self) -> None:
        """All results were taken."""
        self._group, self._failure = None, None
        self._works.clear()

    def drop(self) -> None:
        """Results are of no use any more: the group was ended. Nothing writes to their places afterwards."""
        works = list(self._works.values())
        self.over()
        if not works:
            return
        self._gradients.memory.synchronize()
        wait_out(works, self._is_broken)
