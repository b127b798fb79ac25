"""Copies of the optimizer's shards in other nodes' memory: sent after every step, taken back when a node is lost.

Two slots in the arena, on the host: a copy that is on its way overwrites the older one, and its header is written when
it is whole, so that one whole copy is there at any moment. An heir whose predecessor's memory is gone takes the newest;
was the predecessor lost between the commit and the sending, the copy is one step behind, and whoever holds it still
has the reduced gradient of all, unscaled: the heir takes that, too, and does the step (healing/resolve.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from unicron import _core
from unicron.healing.buddies import Copy, holder_of, ward_of
from unicron.healing.resolve import Fetch
from unicron.training.groups import Groups
from unicron.training.memory import StateMemory
from unicron.training.step import EXTRA_BYTES_MAX
from unicron.training.undoable_step import ALIGN, aligned, nbytes_of, params_of, tensors_of
from unicron.types import EpochPlan, Layout, Rank

HEADER_BYTES = ALIGN  # rank + 1, iteration; rank + 1 is 0 while there is no whole copy
SLOTS = 2
MOMENTS = 2
BYTES_PER_ELEMENT = 4 + 4 * MOMENTS  # main parameter and Adam's moments, in fp32


class CopyDiffers(RuntimeError):
    """What arrived is not what was sent."""


def shard_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """What only this rank holds: its main parameters and their optimizer state, in an order of structure only."""
    return tensors_of(params_of(optimizer))


def buddy_bytes(model: Any, layout: Layout) -> int:
    """Size of the area: the same on every rank of a position, though Megatron cuts shards through parameters, so that
    no two ranks hold the same number of pieces.
    """
    elements = sum(buffer.grad_data.numel() for buffer in model.buffers) // layout.dp
    pieces = sum(1 for _ in model.parameters())
    content = BYTES_PER_ELEMENT * elements + (MOMENTS + 2) * ALIGN * pieces
    return SLOTS * aligned(HEADER_BYTES + EXTRA_BYTES_MAX + content)


class Buddies:
    def __init__(self, rank: Rank, memory: StateMemory, groups: Groups) -> None:
        self.rank, self._memory, self._groups = rank, memory, groups

    def copies(self) -> tuple[Copy, ...]:
        """The whole copies in this rank's arena, also of a predecessor's time."""
        return tuple(copy for copy in self._by_slot() if copy is not None)

    def forget(self) -> None:
        """State went back: what is kept belongs to iterations that will be done again."""
        for slot in self._slots():
            _header(slot).zero_()

    def exchange(self, plan: EpochPlan, iteration: int, extra: torch.Tensor) -> None:
        """Send own shard to the holder, take the ward's. May be done again. Raises what a broken group raises."""
        slot = self._slots()[iteration % SLOTS]
        _header(slot).zero_()
        group = self._groups.data_group()
        holder, ward = holder_of(plan, self.rank), ward_of(plan, self.rank)
        sending = dist.isend(self._packed(extra), group=group, group_dst=self._groups.data_index(holder))
        dist.recv(slot[HEADER_BYTES:], group=group, group_src=self._groups.data_index(ward))
        assert sending is not None
        sending.wait()
        _header(slot)[1] = iteration
        _header(slot)[0] = ward + 1

    def serve(self, fetch: Fetch, gradients: list[torch.Tensor]) -> None:
        """By the holder: the copy, and the sums of the newest gradient if the step is still to be done on it."""
        (target,) = fetch.targets
        number = self._by_slot().index(Copy(target, fetch.iteration))
        copy = self._slots()[number][HEADER_BYTES:]
        pieces = [copy, *(_bytes(g) for g in gradients)] if fetch.steps else [copy]
        for piece in pieces:
            self._send(torch.tensor([_digest(piece)], dtype=torch.int64), target)
            self._send(piece, target)

    def take(self, fetch: Fetch, gradients: list[torch.Tensor]) -> bytes:
        """By the heir: its shard, and the gradient's sums. Returns the python-side state. Raises CopyDiffers."""
        whole = torch.empty(self._slots()[0].numel() - HEADER_BYTES, dtype=torch.uint8)
        self._receive(whole, fetch.source)
        if fetch.steps:
            for gradient in gradients:
                self._receive(_bytes(gradient), fetch.source)
        offset = EXTRA_BYTES_MAX
        with torch.no_grad():
            for tensor in shard_tensors(self._memory.optimizer):
                nbytes = nbytes_of(tensor)
                tensor.copy_(whole[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape))
                offset += aligned(nbytes)
        return bytes(whole[:EXTRA_BYTES_MAX].numpy().tobytes())

    def _by_slot(self) -> list[Copy | None]:
        heads = [_header(slot).tolist() for slot in self._slots()]
        return [Copy(head[0] - 1, head[1]) if head[0] else None for head in heads]

    def _slots(self) -> tuple[torch.Tensor, ...]:
        return self._memory.buddy.chunk(SLOTS)

    def _packed(self, extra: torch.Tensor) -> torch.Tensor:
        message = torch.zeros(self._slots()[0].numel() - HEADER_BYTES, dtype=torch.uint8)
        message[: extra.numel()] = extra
        offset = EXTRA_BYTES_MAX
        # What is too large here is an optimizer with more state than Adam: copy_ says so, with both sizes.
        for tensor in shard_tensors(self._memory.optimizer):
            nbytes = nbytes_of(tensor)
            message[offset : offset + nbytes].view(tensor.dtype).copy_(tensor.reshape(-1))
            offset += aligned(nbytes)
        return message

    def _send(self, piece: torch.Tensor, target: Rank) -> None:
        dist.send(piece, group=self._groups.data_group(), group_dst=self._groups.data_index(target))

    def _receive(self, piece: torch.Tensor, source: Rank) -> None:
        digest = torch.zeros(1, dtype=torch.int64)
        place = self._groups.data_index(source)
        dist.recv(digest, group=self._groups.data_group(), group_src=place)
        dist.recv(piece, group=self._groups.data_group(), group_src=place)
        if _digest(piece) != int(digest.item()):
            raise CopyDiffers(f"the copy of rank {self.rank}'s shard did not arrive from rank {source} as it was sent")


def _header(slot: torch.Tensor) -> torch.Tensor:
    return slot[:HEADER_BYTES].view(torch.int64)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _digest(piece: torch.Tensor) -> int:
    """As a signed word: torch has no unsigned ones."""
    digest = _core.digest(piece.numpy(), 0)
    return digest - (1 << 64) if digest >= 1 << 63 else digest
