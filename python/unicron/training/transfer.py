"""State from a replica that has it to those without: digests first, then one source after another until one is right.

Each target is served by a source on its own node where there is one, else by whoever serves fewest: sources work side
by side, and nothing crosses between nodes that need not.

Every holder of a state (a position's; a shard's, where the optimizer is distributed in several instances) has the same
bits, so holders say the digest of theirs before anything is sent. Who differs from most of them has a memory that
something wrote into: it is not a source, and it ends itself, so that its heir takes the state from another. What
arrives is digested again; a source whose transfer is wrong is followed by the next. A source that dies meanwhile breaks
the group, and the next meeting chooses again.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from unicron import _core
from unicron.healing.resolve import Fetch
from unicron.training.groups import Groups
from unicron.training.memory import StateMemory
from unicron.training.nccl_groups import exchange
from unicron.training.undoable_step import params_of, tensors_of
from unicron.types import Rank

DIGEST_MS_MAX = 60_000
PIECE_BYTES = 64 << 20  # of a shard's tensor, sent at once
WORD = 1 << 64
GPU_ALIGN = 16  # bytes; csrc/state/digest.cc reads words of that size


class StateDiffers(RuntimeError):
    """This process's state is not what the other replicas have."""


class NoGoodSource(RuntimeError):
    """Nobody's state arrived as it was sent."""


def chosen_sources(digests: Sequence[tuple[Rank, int]]) -> tuple[list[Rank], list[Rank]]:
    """(sources in order, holders whose state is not that of most). digests: of every holder, in order of rank.

    Where no more than half agree nobody can tell who is right: all are sources, the lowest rank first.
    """
    right, count = Counter(digest for _, digest in digests).most_common(1)[0]
    if 2 * count <= len(digests):
        return [rank for rank, _ in digests], []
    return [rank for rank, digest in digests if digest == right], [rank for rank, digest in digests if digest != right]


def source_lists(sources: Sequence[Rank], targets: Sequence[Rank], nodes: Mapping[Rank, str]) -> dict[Rank, list[Rank]]:
    """For each target all sources, in the order in which it asks them. The same in every process."""
    serves = Counter[Rank]()
    found: dict[Rank, list[Rank]] = {}
    for target in sorted(targets):
        found[target] = sorted(sources, key=lambda rank: (nodes[rank] != nodes[target], serves[rank], rank))
        serves[found[target][0]] += 1
    return found


class StateTransfer:
    def __init__(self, rank: Rank, memory: StateMemory, groups: Groups, *, of_shards: bool) -> None:
        """of_shards: what holders have in common is a shard of the optimizer's state. Their parameters may not be the
        same yet: some have gathered the newest, and all gather them after this."""
        self.rank, self._memory, self._groups, self._of_shards = rank, memory, groups, of_shards
        self.spoil_next = False  # a fault: what is sent next is not what the digest says
        self.sent: list[tuple[Rank, int, float]] = []  # by this rank in the last run: (target, bytes, ms)

    def run(
        self, fetch: Fetch, nodes: Mapping[Rank, str], extra: torch.Tensor, tear: Callable[[], None]
    ) -> bytes | None:
        """A target's python-side state, when its own is replaced; None for everybody else.

        nodes: of the members of this position. extra: the fixed-size python-side state, of a holder. tear: says in the
        arena that its content is not whole. Raises StateDiffers, NoGoodSource, and what a broken group raises.
        """
        holders = sorted(rank for rank in nodes if rank not in fetch.targets)
        is_target = self.rank in fetch.targets
        self.sent = []
        found = self._all_digests(0 if is_target else self._digest(self._pieces(), extra))
        digests = {rank: found[self._groups.holders_index(rank)] for rank in nodes}
        sources, differing = chosen_sources([(rank, digests[rank]) for rank in holders])
        if self.rank in differing:
            tear()
            raise StateDiffers(f"rank {self.rank}: the state is not that of ranks {sources}: it is not used any more")
        if is_target:
            tear()
        waiting = sorted(fetch.targets)
        lists = source_lists(sources, waiting, nodes) if fetch.side_by_side else dict.fromkeys(waiting, sources)
        for turn in range(len(sources)):
            pairs = {target: lists[target][turn] for target in waiting}
            self._serve(pairs, extra)
            right = self.rank not in pairs or self._digest(self._pieces(), extra) == digests[pairs[self.rank]]
            waiting = self._wrong(waiting, right, side_by_side=fetch.side_by_side)
            self.sent = [sent for sent in self.sent if sent[0] not in waiting]
            if not waiting:
                return bytes(extra.numpy().tobytes()) if is_target else None
            if not right:
                print(
                    f"unicron: rank {self.rank}: what rank {pairs[self.rank]} sent is not what it has", file=sys.stderr
                )
        if is_target:
            raise NoGoodSource(f"no transfer from ranks {sources} arrived as it was sent")
        return None

    def _serve(self, pairs: Mapping[Rank, Rank], extra: torch.Tensor) -> None:
        """pairs: target -> source."""
        group = self._groups.holders_group()
        pieces = [*self._pieces(), extra]
        if self.rank in pairs.values():
            # Measured here: who is not the first waits for the others' turns, too.
            for target in sorted(target for target, source in pairs.items() if source == self.rank):
                begun = time.monotonic()
                for piece in pieces:
                    self._send(self._spoiled(piece), self._groups.holders_index(target), group)
                self._memory.synchronize()
                nbytes = sum(piece.numel() * piece.element_size() for piece in pieces)
                self.sent.append((target, nbytes, (time.monotonic() - begun) * 1000))
        elif self.rank in pairs:
            for piece in pieces:
                self._receive(piece, self._groups.holders_index(pairs[self.rank]), group)

    def _pieces(self) -> list[torch.Tensor]:
        """Flat bytes of what holders have in common; of parameters only those that no step changes."""
        if not self._of_shards:
            return self._memory.state_pieces()
        frozen = [param.data for param in self._memory.model.parameters() if not param.requires_grad]
        tensors = [*tensors_of(params_of(self._memory.optimizer)), *frozen]
        shard = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
        return [part for piece in shard for part in piece.split(PIECE_BYTES)]

    def _spoiled(self, piece: torch.Tensor) -> torch.Tensor:
        if not self.spoil_next:
            return piece
        self.spoil_next = False
        other = piece.clone()
        other.view(torch.uint8)[0] ^= 1
        return other

    def _all_digests(self, own: int) -> list[int]:
        """Of whatever each says, by place in the group. As two words: torch has no unsigned sums."""
        group = self._groups.holders_group()
        mine = torch.tensor([own & 0xFFFFFFFF, own >> 32], dtype=torch.int64, device=self._memory.device)
        found = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, mine, group=group)
        return [int(low) | int(high) << 32 for low, high in (word.tolist() for word in found)]

    def _wrong(self, targets: list[Rank], right: bool, *, side_by_side: bool) -> list[Rank]:
        """Those to which what arrived was not what their source has. Of one source for all it is only known whether it
        was right everywhere."""
        if not side_by_side:
            return [] if self._all_say(right) else targets
        found = self._all_digests(int(right))
        return [target for target in targets if not found[self._groups.holders_index(target)]]

    def _all_say(self, ok: bool) -> bool:
        word = torch.tensor([int(ok)], dtype=torch.int64, device=self._memory.device)
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._groups.holders_group())
        return bool(word.item())

    def digest(self, extra: torch.Tensor) -> int:
        """Of all parameters and optimizer state, and of the python-side state."""
        return self._digest(self._memory.state_pieces(), extra)

    def _digest(self, pieces: Sequence[torch.Tensor], extra: torch.Tensor) -> int:
        self._memory.synchronize()
        total, offset, on_gpu = 0, 0, []
        for piece in [*pieces, extra]:
            if piece.is_cuda:
                on_gpu.append((piece, offset))
            else:
                total += digest_of(piece, offset)
            offset += (piece.numel() * piece.element_size() + 15) // 16 * 16
        return (total + _gpu_digest(on_gpu)) % WORD

    def _send(self, piece: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        if self._memory.pool is None:
            dist.send(piece, group_dst=peer, group=group)
        else:
            exchange(piece, peer, group, self._memory.device, receives=False)

    def _receive(self, piece: torch.Tensor, peer: int, group: dist.ProcessGroup | None) -> None:
        if self._memory.pool is None:
            dist.recv(piece, group_src=peer, group=group)
        else:
            exchange(piece, peer, group, self._memory.device, receives=True)


def digest_of(piece: torch.Tensor, offset: int = 0) -> int:
    """Of what lies there when it is called: on a GPU, what was begun before must have ended."""
    return _gpu_digest([(piece, offset)]) if piece.is_cuda else int(_core.digest(piece.numpy(), offset))


def _gpu_digest(pieces: Sequence[tuple[torch.Tensor, int]]) -> int:
    """Of all of them, at their offsets, with one wait."""
    if not pieces:
        return 0
    device = pieces[0][0].device
    # A small shard may lie anywhere in the parameters.
    copies = [piece.clone() if piece.data_ptr() % GPU_ALIGN else piece for piece, _ in pieces]
    if any(copy is not piece for copy, (piece, _) in zip(copies, pieces, strict=True)):
        torch.cuda.current_stream(device).synchronize()
    places = [
        (copy.data_ptr(), copy.numel() * copy.element_size(), offset)
        for copy, (_, offset) in zip(copies, pieces, strict=True)
    ]
    return int(_core.gpu_digest(device.index, places, DIGEST_MS_MAX))
