"""Copies of the optimizer's shards in other nodes' memory, taken back when a node is lost.

A shard travels as a *parcel*: python-side state, main parameters and moments, and a seal (its digest, whose it is, of
which iteration). Slots in the arena, on the host, keep two parcels of the ward: one that is on its way overwrites the
other, and a slot's header is written when its parcel is whole and its seal right, so that one whole copy is there at
any moment.

Made after every step, a copy is as old as the others' state. An heir whose predecessor's memory is gone takes the
newest; was the predecessor lost between the commit and the sending, the copy is one step behind, and whoever holds it
still has the reduced gradient of all, unscaled: the heir takes that, too, and does the step (healing/resolve.py).

Made beside the training (buddy_every), a parcel is packed after a step and travels while the next iteration is
computed; it is waited for after that one's step. Own parcels are kept, too, two of them, because everybody must be able
to go back to the iteration of which all have one. A parcel never overwrites what everybody could go back to.

Where the state is on a GPU a parcel is packed there, and a courier sees it through (courier.py); slots are on the host
all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from unicron.healing.buddies import Copy, holder_of, ward_of
from unicron.healing.resolve import Fetch
from unicron.training.courier import PIECE_BYTES, Carriage, Courier
from unicron.training.groups import Groups
from unicron.training.memory import StateMemory
from unicron.training.nccl_groups import exchange
from unicron.training.step import EXTRA_BYTES_MAX
from unicron.training.transfer import digest_of
from unicron.training.undoable_step import ALIGN, Pair, aligned, nbytes_of, params_of, places_of, tensors_of
from unicron.training.watched_group import LostOperation
from unicron.types import EpochPlan, Layout, Rank

HEADER_BYTES = ALIGN  # rank + 1, iteration; rank + 1 is 0 while there is no whole copy
SEAL_BYTES = ALIGN  # digest of what is before it, rank, iteration
SLOTS = 2  # of the ward, and as many of its own where these are kept
MOMENTS = 2
BYTES_PER_ELEMENT = 4 + 4 * MOMENTS  # main parameter and Adam's moments, in fp32
NOTHING = 0  # sent in the place of a parcel that is no good any more


class CopyDiffers(RuntimeError):
    """What arrived, or lies there, is not what was sent: it is not used any more."""


def shard_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """What only this rank holds: its main parameters and their optimizer state, in an order of structure only."""
    return tensors_of(params_of(optimizer))


def num_slots(layout: Layout) -> int:
    return 2 * SLOTS if layout.buddy_every else SLOTS


def buddy_bytes(model: Any, layout: Layout) -> int:
    """Size of the area: the same on every rank of a position, though Megatron cuts shards through parameters, so that
    no two ranks hold the same number of pieces.
    """
    elements = sum(buffer.grad_data.numel() for buffer in model.buffers) // layout.dp
    elements += sum(buffer.grad_data.numel() for buffer in model.expert_parallel_buffers) // layout.num_replicas
    pieces = sum(1 for _ in model.parameters())
    content = BYTES_PER_ELEMENT * elements + (MOMENTS + 2) * ALIGN * pieces
    slot = aligned(HEADER_BYTES + EXTRA_BYTES_MAX + content + SEAL_BYTES)
    return num_slots(layout) * slot


class _Parcel:
    """It ends with its seal."""

    def __init__(self, parcel: torch.Tensor) -> None:
        self.parcel = parcel
        self.body = self.parcel[:-SEAL_BYTES]
        self._seal = self.parcel[-SEAL_BYTES:].view(torch.int64)

    def seal(self, copy: Copy) -> None:
        self._seal[:3] = torch.tensor([_digest(self.body), copy.rank, copy.iteration], dtype=torch.int64)

    def is_sealed(self, copy: Copy) -> bool:
        """Whether the parcel is what was sealed as this."""
        return bool(self._seal[:3].tolist() == [_digest(self.body), copy.rank, copy.iteration])


class _Slot(_Parcel):
    """Header, parcel."""

    def __init__(self, place: torch.Tensor) -> None:
        super().__init__(place[HEADER_BYTES:])
        self._header = place[:HEADER_BYTES].view(torch.int64)

    def whole(self) -> Copy | None:
        rank_and_one, iteration = self._header[:2].tolist()
        return Copy(rank_and_one - 1, iteration) if rank_and_one else None

    def clear(self) -> None:
        self._header[0] = 0

    def mark_whole(self, copy: Copy) -> None:
        self._header[1] = copy.iteration
        self._header[0] = copy.rank + 1


class _Journey(msgspec.Struct):
    """A parcel each way, on its way."""

    works: list[Any]
    slot: Any  # where the ward's arrives
    copy: Copy  # what it must be
    carriage: Carriage | None = None  # on a GPU, where it is the only work
    own: Any = None  # where the own one is kept, on a GPU


class Buddies:
    def __init__(self, rank: Rank, layout: Layout, memory: StateMemory, groups: Groups) -> None:
        self.rank, self.every, self._memory, self._groups = rank, layout.buddy_every, memory, groups
        self._num_slots = num_slots(layout)
        self._journey: _Journey | None = None
        self._epoch = self._begun = -1  # of the newest journey: its plan, and the iteration of what travels
        self._common = -1  # the newest iteration that everybody can go back to
        self.spoil_next = False  # a fault: the next parcel is not what its seal says
        self._courier: Courier | None = None  # made with the first parcel: an understudy needs none
        self._stuck: Carriage | None = None  # the newest one: until it ends nothing it writes to is used
        self.moves: Callable[[], None] = lambda: None  # called while a copy that is waited for comes on
        self.taken = (0, 0.0)  # (bytes, ms) of what the holder sent last

    # ---------------------------------------------------------- what is there

    def copies(self) -> tuple[Copy, ...]:
        """The whole copies in this rank's arena, also of a predecessor's time."""
        return tuple(copy for slot in self._wards() if (copy := slot.whole()) is not None)

    def kept(self) -> tuple[int, ...]:
        """Iterations of which the own shard is there."""
        return tuple(copy.iteration for slot in self._own() if (copy := slot.whole()) is not None)

    def agreed(self, iteration: int) -> None:
        """By a meeting: what everybody could go back to (-1: nothing) stays until there is a newer one."""
        self._common = iteration

    def forget(self, after: int = -1) -> None:
        """State went back: what is kept of later iterations belongs to what will be done again."""
        for slot in self._slots():
            copy = slot.whole()
            if copy is not None and copy.iteration > after:
                slot.clear()

    # ---------------------------------------------------------- after each step

    def after_step(self, plan: EpochPlan, iteration: int, extra: torch.Tensor) -> None:
        """What is due now that everybody is at this iteration. May be done again. Raises CopyDiffers, and what a broken
        group raises."""
        if not self.every:
            self._begin(plan, iteration, extra)
            self._finish()
            return
        self._finish()
        if plan.epoch != self._epoch:  # who keeps whose may be another now, and a second failure may come soon
            self._begin(plan, iteration, extra)
            self._finish()
        elif iteration - self._begun >= self.every:
            self._common = self._begun  # whole everywhere: all have ended the iteration after it
            self._begin(plan, iteration, extra)

    def abandon(self) -> None:
        """Before the group is made anew: what was on its way ends here, whole or not."""
        journey, self._journey = self._journey, None
        if journey is None:
            return
        failed = False
        if journey.carriage is not None:
            journey.carriage.give_up()
        for work in journey.works:  # every one: what gloo lost is known by waiting only (watched_group.py)
            try:
                work.wait()
            except RuntimeError:
                failed = True
        self._keep(journey)
        if not failed:
            self._arrived(journey)

    def _begin(self, plan: EpochPlan, iteration: int, extra: torch.Tensor) -> None:
        holder, ward = holder_of(plan, self.rank), ward_of(plan, self.rank)
        slot = self._free(self._wards(), iteration)
        slot.clear()
        begin = self._begin_on_host if self._memory.pool is None else self._begin_on_gpu
        self._journey = begin(slot, holder, ward, iteration, extra)
        self._epoch, self._begun = plan.epoch, iteration

    def _begin_on_host(self, slot: _Slot, holder: Rank, ward: Rank, iteration: int, extra: torch.Tensor) -> _Journey:
        group, copy = self._groups.data_group(), Copy(self.rank, iteration)
        own = self._free(self._own(), iteration) if self.every else self._aside()
        own.clear()
        self._pack(own, copy, extra)
        own.mark_whole(copy)
        parcel = self._spoiled(own.parcel)
        sending = dist.isend(parcel, group=group, group_dst=self._groups.data_index(holder))
        receiving = dist.irecv(slot.parcel, group=group, group_src=self._groups.data_index(ward))
        return _Journey([receiving, sending], slot, Copy(ward, iteration))

    def _begin_on_gpu(self, slot: _Slot, holder: Rank, ward: Rank, iteration: int, extra: torch.Tensor) -> _Journey:
        if self._stuck is not None and self._stuck.is_stuck:
            raise LostOperation("the copy before does not end: the GPU, or the way to the host, hangs")
        courier = self._courier or Courier(self._memory.device, slot.parcel.numel())
        self._courier, copy = courier, Copy(self.rank, iteration)
        own = self._free(self._own(), iteration) if self.every else None
        if own is not None:
            own.clear()
        self._pack(_Parcel(courier.leaving), copy, extra)
        if self.spoil_next:
            courier.leaving.copy_(self._spoiled(courier.leaving))
        arriving, wanted = _Parcel(courier.arriving), Copy(ward, iteration)
        carriage = courier.begin(
            self._groups.data_group(), self._groups.data_index(holder), self._groups.data_index(ward),
            own.parcel if own is not None else None, slot.parcel, lambda: arriving.is_sealed(wanted),
        )  # fmt: skip
        self._stuck = carriage
        return _Journey([carriage], slot, wanted, carriage, (own, copy) if own is not None else None)

    def _finish(self) -> None:
        if self._journey is None:
            return
        for work in self._journey.works:
            if self._journey.carriage is not None:
                work.wait(self.moves)
                self._groups.require_whole(inside=False)  # an ended send returns like a good one
            else:
                work.wait()
        journey, self._journey = self._journey, None
        self._keep(journey)
        if not self._arrived(journey):
            raise CopyDiffers(f"the copy of rank {journey.copy.rank}'s shard did not reach rank {self.rank} as it was")

    def _keep(self, journey: _Journey) -> None:
        """The own parcel, when it came from the GPU meanwhile."""
        if journey.own is not None and journey.carriage is not None and journey.carriage.is_kept:
            slot, copy = journey.own
            slot.mark_whole(copy)

    def _arrived(self, journey: _Journey) -> bool:
        """Looked at where it is: on a GPU before it went to the host."""
        carriage = journey.carriage
        is_right = bool(journey.slot.is_sealed(journey.copy)) if carriage is None else carriage.is_right
        if is_right:
            journey.slot.mark_whole(journey.copy)
        return is_right

    def _free(self, slots: list[_Slot], iteration: int) -> _Slot:
        """The one that nobody needs: not what everybody could go back to, and else the older one."""

        def worth(slot: _Slot) -> tuple[bool, int]:
            copy = slot.whole()
            if copy is None:
                return False, -1
            return copy.iteration == self._common, copy.iteration if copy.iteration <= iteration else -1

        return min(slots, key=worth)

    def _pack(self, parcel: _Parcel, copy: Copy, extra: torch.Tensor) -> None:
        parcel.body[: extra.numel()].copy_(extra)
        # What is too large here is an optimizer with more state than Adam: copy_ says so, with both sizes.
        for tensor, place in self._places_in(parcel):
            place.copy_(tensor.reshape(-1))
        parcel.seal(copy)

    def _spoiled(self, parcel: torch.Tensor) -> torch.Tensor:
        if not self.spoil_next:
            return parcel
        self.spoil_next = False
        other = parcel.clone()
        other[EXTRA_BYTES_MAX] ^= 1
        return other

    # ---------------------------------------------------------- when a node was lost

    def serve(self, fetch: Fetch, gradients: list[torch.Tensor]) -> None:
        """By the holder: the copy, and the sums of the newest gradient if the step is still to be done on it. Raises
        CopyDiffers, here and at the target, when something wrote into it: the next meeting does without."""
        copy = Copy(fetch.targets[0], fetch.iteration)
        slot = next(slot for slot in self._wards() if slot.whole() == copy)
        is_good = slot.is_sealed(copy)
        self._send(torch.tensor([int(is_good)], dtype=torch.int64), copy.rank)
        if not is_good:
            slot.clear()
            raise CopyDiffers(f"something wrote into rank {self.rank}'s copy of rank {copy.rank}'s shard")
        self._send(self._spoiled(slot.parcel), copy.rank)
        for piece in map(_bytes, gradients) if fetch.steps else ():
            self._send(torch.tensor([_digest(piece)], dtype=torch.int64), copy.rank)
            self._send(piece, copy.rank)

    def take(self, fetch: Fetch, gradients: list[torch.Tensor]) -> bytes:
        """By the heir: its shard, and the gradient's sums. Returns the python-side state. Raises CopyDiffers."""
        copy = Copy(self.rank, fetch.iteration)
        word = torch.zeros(1, dtype=torch.int64)
        self._receive(word, fetch.source)
        if int(word.item()) == NOTHING:
            raise CopyDiffers(f"rank {fetch.source}'s copy of rank {self.rank}'s shard is no good any more")
        begun = time.monotonic()
        slot = self._free(self._own(), fetch.iteration) if self.every else self._aside()
        slot.clear()
        self._receive(slot.parcel, fetch.source)
        self.taken = nbytes_of(slot.parcel), (time.monotonic() - begun) * 1000
        self._require(slot.is_sealed(copy), fetch.source)
        for piece in map(_bytes, gradients) if fetch.steps else ():
            self._receive(word, fetch.source)
            self._receive(piece, fetch.source)
            self._require(_digest(piece) == int(word.item()), fetch.source)
        slot.mark_whole(copy)
        return self._unpacked(slot)

    def go_back(self, iteration: int) -> bytes:
        """To what is kept. Returns the python-side state. Raises CopyDiffers."""
        copy = Copy(self.rank, iteration)
        slot = next(slot for slot in self._own() if slot.whole() == copy)
        if not slot.is_sealed(copy):
            slot.clear()
            raise CopyDiffers(f"something wrote into what rank {self.rank} kept of iteration {iteration}")
        return self._unpacked(slot)

    @torch.no_grad()
    def _unpacked(self, slot: _Slot) -> bytes:
        for tensor, place in self._places_in(slot):
            tensor.copy_(place.view(tensor.shape))
        return bytes(slot.body[:EXTRA_BYTES_MAX].numpy().tobytes())

    # ---------------------------------------------------------- memory and messages

    def _places_in(self, parcel: _Parcel) -> list[Pair]:
        """(tensor of the shard, its place), behind the python-side state."""
        return places_of(list(shard_tensors(self._memory.optimizer)), parcel.body[EXTRA_BYTES_MAX:])

    def _places(self) -> tuple[torch.Tensor, ...]:
        return self._memory.buddy.chunk(self._num_slots)

    def _slots(self) -> list[_Slot]:
        return [_Slot(place) for place in self._places()]

    def _wards(self) -> list[_Slot]:
        return self._slots()[:SLOTS]

    def _own(self) -> list[_Slot]:
        return self._slots()[SLOTS:]

    def _aside(self) -> _Slot:
        """For a parcel that is not kept."""
        return _Slot(torch.zeros_like(self._places()[0]))

    def _require(self, is_right: bool, source: Rank) -> None:
        if not is_right:
            raise CopyDiffers(f"the copy of rank {self.rank}'s shard did not arrive from rank {source} as it was sent")

    def _send(self, piece: torch.Tensor, target: Rank) -> None:
        if self._memory.pool is not None:
            group, index = self._groups.data_group(), self._groups.data_index(target)
            for part in piece.split(PIECE_BYTES):  # what is on the host goes through the GPU, and it has little room
                exchange(part, index, group, self._memory.device, receives=False)
            return
        dist.send(piece, group=self._groups.data_group(), group_dst=self._groups.data_index(target))

    def _receive(self, piece: torch.Tensor, source: Rank) -> None:
        if self._memory.pool is not None:
            group, index = self._groups.data_group(), self._groups.data_index(source)
            for part in piece.split(PIECE_BYTES):
                exchange(part, index, group, self._memory.device, receives=True)
            return
        dist.recv(piece, group=self._groups.data_group(), group_src=self._groups.data_index(source))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _digest(piece: torch.Tensor) -> int:
    """As a signed word: torch has no unsigned ones."""
    if piece.is_cuda:
        torch.cuda.current_stream(piece.device).synchronize()  # what was written there, by this thread
    digest = digest_of(piece)
    return digest - (1 << 64) if digest >= 1 << 63 else digest
