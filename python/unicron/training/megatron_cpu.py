"""What megatron-core needs to run on a machine without CUDA: nothing else does, nothing else is
here.

megatron-core names the CUDA device directly in a few places of its training path. ``install()``
answers these calls with their CPU counterpart, once per process and only where
``torch.cuda.is_available()`` is False; on a GPU machine it does nothing at all. Every patch says
which line asks for it (0.16.1; in brackets 0.19.2) and how it fails without. Rejected: a
TorchFunctionMode that rewrites devices; it costs on every operation, these cost only where a
patched name is called.

Not covered, because the code has no CPU counterpart: sequence_parallel with the local spec (torch's
LayerNorm refuses it), the distributed-optimizer's communication stream, CUDA graphs, fine-grained
offload."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FORWARD, BACKWARD = 1, 2  # tags of what passes between the stages of a pipeline

# What a TransformerConfig must say on a CPU: every value switches off something that exists as a
# CUDA kernel only. get_megatron_optimizer also wants use_gloo_process_groups=False where
# initialize_model_parallel was told create_gloo_process_groups=False (the groups are gloo already;
# it would look for a second set).
CONFIG: dict[str, Any] = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_dropout_fusion": False,
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "batch_p2p_sync": False,  # p2p_communication.py:398 [419]: synchronize after every exchange
}

# Said once a process, of CUDA kernels and graphs, which a CPU has not: they would bury the loss.
NEEDLESS_WARNINGS = ("Apex is not installed", "full scope is deprecated")

_installed: tuple[str, ...] = ()


def install() -> tuple[str, ...]:
    """Patch what a CPU run needs; the names of the patches in force, () where CUDA is available."""
    global _installed
    if _installed or torch.cuda.is_available():
        return _installed
    for patch in PATCHES:
        patch()
    for text in NEEDLESS_WARNINGS:
        warnings.filterwarnings("ignore", text)
    _installed = tuple(patch.__name__.lstrip("_") for patch in PATCHES)
    return _installed


def _current_device() -> None:
    """utils.py:631 [715] GlobalMemoryBuffer (by dot_product_attention.py:189),
    p2p_communication.py:313,321, param_and_grad_buffer.py:783-806, mappings.py:91-181: "Torch not
    compiled with CUDA enabled"."""
    torch.cuda.current_device = lambda: CPU


def _factory() -> None:
    """device="cuda" in schedules.py:596,983,2138 [749,1121,2292], clip_grads.py:115,174 [108,180],
    optimizer.py:473-485: "Torch not compiled with CUDA enabled"."""
    names = "zeros ones empty full tensor arange rand randn as_tensor"
    likes = "empty_like zeros_like ones_like full_like"
    for name in f"{names} {likes}".split():
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    made.__name__ = factory.__name__
    made.__doc__ = factory.__doc__
    return made


def _rng() -> None:
    """tensor_parallel/random.py:235,237,422 [303,305,490]: the tracker of model-parallel random
    states saves and restores the state of "the" CUDA generator. Here that is the CPU's one
    generator, so dropout inside a fork() stays as reproducible as on a GPU."""
    import megatron.core.tensor_parallel.random as random

    def get(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def put(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = get
    torch.cuda.set_rng_state = put
    torch.cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = get
    random._set_cuda_rng_state = put
    # fork() warns when the CPU's generator moved inside it (random.py:264 [332]); here it must.
    moved = "CPU RNG state changed"
    logger = logging.getLogger(random.__name__)
    logger.addFilter(lambda record: not record.getMessage().startswith(moved))


def _cuda_method() -> None:
    """language_module.py:244 [307] (tied embeddings under pp > 1) and optimizer.py:375,380 call
    .cuda()."""
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self


def _type_name() -> None:
    """clip_grads.py:167 [174], optimizer.py:671,690 [1009,1028], distrib_optimizer.py:361,420,582
    [401,466,758] compare Tensor.type() with "torch.cuda.FloatTensor": AssertionError, or "Wrapped
    parameters must be one of"."""
    original = torch.Tensor.type

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original(self, dtype, *args, **kwargs)
        name = original(self)
        return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_


def _synchronize() -> None:
    """p2p_communication.py:242 [263] (variable shapes), dist_checkpointing before it stages
    tensors."""
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
    torch.cuda.empty_cache = lambda: None


class _NoStream:
    """A stream of a machine that has none: everything on it is done already."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None: ...
    def wait_stream(self, *_args: Any) -> None: ...
    def wait_event(self, *_args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_args: Any) -> _NoStream:
        return self  # an event of it has happened already, too


_NO_STREAM = _NoStream()


def _stream() -> None:
    """[param_and_grad_buffer.py:632] asks for the current stream in every start_grad_sync, needed
    or not: "Found no NVIDIA driver". 0.16.1 asks only with several optimizer instances."""
    torch.cuda.current_stream = lambda *_args, **_kwargs: _NO_STREAM
    torch.cuda.default_stream = lambda *_args, **_kwargs: _NO_STREAM
    # [distributed_data_parallel.py:217]: one of its own for several optimizer instances
    torch.cuda.Stream = _NoStream


def _experts() -> None:
    """transformer/moe/token_dispatcher.py:445 makes a stream for copies to the host ("torch.cuda.Stream requires CUDA
    support"): there is one already, of which no other differs. moe_utils.py:1093 makes numbers only of what lies on a
    GPU (all_to_all_single: "incompatible function arguments"). moe_utils.py:1192 asks whether te_general_gemm is None,
    a name that is missing where Transformer Engine is (NameError in every router)."""
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NO_STREAM
    torch.cuda.stream = lambda *_args, **_kwargs: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    move = token_dispatcher.maybe_move_tensor_to_cpu

    def as_numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        is_here = as_numpy and torch.is_tensor(tensor) and not tensor.is_cuda
        return tensor.numpy() if is_here else move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = as_numbers


def _distributed_optimizer_load() -> None:
    """distrib_optimizer.py:940 [1225] copies every entry of torch AdamW's state, also the ones that
    are not in the checkpoint ("step", which comes with the parameter groups: KeyError), and outside
    no_grad ("a view of a leaf Variable"). With apex's or Transformer Engine's Adam neither
    happens."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    @torch.no_grad()
    def put(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        for name, value in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step" and isinstance(tensors.get(name), torch.Tensor):
                value.copy_(tensors[name])

    DistributedOptimizer._set_main_param_and_optimizer_states = put


def _pipeline_tags() -> None:
    """p2p_communication.py:16 [17] posts both directions at once. In an interleaved pipeline of two stages both
    neighbours are one rank, and gloo matches by sender and tag in order: an activation would be taken for a gradient
    of the same shape, silently. (Megatron's own arguments want more than two stages there.)"""
    import megatron.core.pipeline_parallel.p2p_communication as p2p

    def exchange(
        *, tensor_send_prev: Any, tensor_recv_prev: Any, tensor_send_next: Any, tensor_recv_next: Any, group: Any,
        prev_pipeline_rank: int, next_pipeline_rank: int,
    ) -> list[Any]:  # fmt: skip
        send, receive = torch.distributed.isend, torch.distributed.irecv
        wanted = (
            (send, tensor_send_prev, prev_pipeline_rank, BACKWARD),
            (receive, tensor_recv_prev, prev_pipeline_rank, FORWARD),
            (send, tensor_send_next, next_pipeline_rank, FORWARD),
            (receive, tensor_recv_next, next_pipeline_rank, BACKWARD),
        )
        ops = [
            torch.distributed.P2POp(what, tensor, rank, group, tag)
            for what, tensor, rank, tag in wanted
            if tensor is not None
        ]
        return torch.distributed.batch_isend_irecv(ops) if ops else []

    p2p._batched_p2p_ops = exchange


PATCHES: tuple[Callable[[], None], ...] = (
    _current_device,
    _factory,
    _rng,
    _cuda_method,
    _type_name,
    _synchronize,
    _stream,
    _experts,
    _distributed_optimizer_load,
    _pipeline_tags,
)
