"""A rank's part of the model: one DDP-wrapped chunk, or several where the pipeline is interleaved.

One face for what is done to all of them. Megatron's own functions get `chunks`, a list as they expect it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

NOT_WRAPPED = (
    "model must be wrapped in megatron.core.distributed.DistributedDataParallel: its flat gradient buffers are what "
    "unicron reduces"
)


class Chunks:
    def __init__(self, model: Any) -> None:
        """model: one chunk, or a list in the order of the virtual stages. ValueError when one is not wrapped."""
        self.chunks: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
        if not self.chunks or any(not hasattr(c, "buffers") or callable(c.buffers) for c in self.chunks):
            raise ValueError(NOT_WRAPPED)
        self.buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers]
        self.expert_parallel_buffers = [buffer for chunk in self.chunks for buffer in chunk.expert_parallel_buffers]
        self.config = self.chunks[0].config

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for number, chunk in enumerate(self.chunks):
            prefix = f"chunk{number}." if len(self.chunks) > 1 else ""
            for name, param in chunk.named_parameters():
                yield prefix + name, param

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        for _, param in self.named_parameters():
            yield param

    def zero_grad_buffer(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    @property
    def first(self) -> Any:
        return self.chunks[0]

    def number_of(self, chunk: Any) -> int:
        return next(number for number, ours in enumerate(self.chunks) if ours is chunk)


def padded(micro_batches: Sequence[int], group: int) -> int:
    """How many forwards an interleaved schedule makes for them: its groups of `group` are always whole.

    Megatron refuses some other counts, and a failure deals any count to a replica. The additional forwards repeat the
    last micro-batch and count for nothing.
    """
    return -(-len(micro_batches) // group) * group
