"""One participant's part in a move of roles: its groups beforehand, and the state from leaver to joiner at the switch.

Phase 1 runs beside training, in a thread of its own. The groups of the announced plan hold no leaver, so all of them
are connected by then, and what is left for the switch is to put them in the place of the old ones (groups.py); besides,
every leaver has a line to its joiner. Who is announced a newer epoch gives up what it prepared.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from unicron.healing.record import CommitResult
from unicron.messages import MoveReady, MoveRoles, cut
from unicron.runtime.store_client import StoreClient
from unicron.training.groups import Groups
from unicron.training.pair import GlooPair, NcclPair
from unicron.training.store import RendezvousStore
from unicron.training.watched_group import Helpers
from unicron.types import Rank

HEADER_BYTES = 512
CONNECT_S_MAX = 120.0


def is_left_out(part: str) -> bool:
    """Of groups, warm-up, for measurements (bench/bench_moves.py): done at the switch, or not at all, not beforehand.
    Asked when it matters, because a task's environment comes to a process that has imported this already."""
    return part in os.environ.get("UNICRON_MOVES_WITHOUT", "").split(",")


class MoveOver(RuntimeError):
    """A newer epoch was announced meanwhile."""


class StateSpoiled(RuntimeError):
    """What arrived is not what was sent."""


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """What a leaver says before its state."""

    iteration: int  # committed steps in the parameters
    digest: int  # of all that follows
    gathered: bool
    commit: CommitResult | None
    branch: int = 0  # a leaver of 0.1 does not say it


class Preparation:
    """rank: the role held (a leaver, a stayer) or to be taken; groups: of that role, open."""

    def __init__(self, link: Any, order: MoveRoles, rank: Rank, groups: Groups) -> None:
        self.order, self.rank, self.error = order, rank, ""
        self._link, self._groups = link, groups
        self._helpers = Helpers()
        self._pair: GlooPair | NcclPair | None = None
        self._client: StoreClient | None = None
        self._is_closed = False
        self.taken = (0, 0.0)  # (bytes, ms) of the state that a leaver sent
        self.is_leaver = link.member(order.plan) is None
        self.is_joiner = not self.is_leaver and link.member(order.former) is None

    def is_over(self) -> bool:
        return self._is_closed or bool(self._link.monitor.newest_epoch() > self.order.former.epoch)

    def start(self) -> None:
        threading.Thread(target=self.run, name="unicron-move", daemon=True).start()

    def run(self) -> None:
        """Connects everything and says so, or why not."""
        begun, num_connections = time.monotonic(), 0
        try:
            num_connections = self._connect()
        except Exception as error:
            self.error = cut(f"{type(error).__name__}: {error}")
        if not self._groups.is_on_gpu:
            self._close_client()  # torch's NCCL backend keeps the store for threads of its own
        if self._is_closed:  # meanwhile: whoever closed it could not drop what was not there yet
            self._groups.drop_prepared(self.order.plan)
            self.close()
        if not self.is_over():
            seconds = {"prepare": round(time.monotonic() - begun, 4)}
            self.say("prepared", error=self.error, num_connections=num_connections, seconds=seconds)

    def refuse(self, error: str) -> None:
        """It cannot take part, and says so in the place of what run() says."""
        self.error = cut(error)
        self.say("prepared", error=self.error)

    def say(self, phase: str, **known: Any) -> None:
        plan = self.order.plan
        joiners = tuple(m.worker for m in plan.members if m.rank in plan.heirs)
        self._link.send(MoveReady(self._link.worker, self.rank, plan.epoch, phase, joiners=joiners, **known))

    def _connect(self) -> int:
        plan, welcome = self.order.plan, self._link.welcome
        client = self._client = StoreClient(plan.store, plan.store_key, welcome.store_public, welcome.store_secret)
        joiners = "-".join(m.worker for m in plan.members if m.rank in plan.heirs)
        former = self.order.former.epoch  # as in reshard/change.py: a number may be announced again
        store = RendezvousStore(client, f"{plan.task}/{plan.epoch}/move/{former}/{joiners}/", self.is_over)
        store.check(["connected"])  # its own socket stands before those of groups are counted
        count = 0
        if self.is_leaver or self.is_joiner:
            self._pair = self._groups.connect_pair(store, int(self.is_joiner), self._how(), self.is_over)
            count += 1
        if not self.is_leaver and not is_left_out("groups"):
            count += self._groups.prepare(plan, store, self._how())
        return count

    def _how(self) -> tuple[Helpers, Callable[[float], None]]:
        def check(seconds: float) -> None:
            if seconds > CONNECT_S_MAX:  # a joiner may be gone and the move called off, without a newer epoch
                raise MoveOver(f"a group of a move was not connected in {CONNECT_S_MAX:.0f} s")
            if self.is_over():
                raise MoveOver("a newer epoch came while the groups of a move were made")

        return self._helpers, check

    # ------------------------------------------------------------ the switch

    def give_state(self, engine: Any) -> None:
        """A leaver's, at the boundary. What goes wrong the joiner says too, or the epoch that ends the wait."""
        assert self._pair is not None
        extra = engine.stepper.extra_tensor()
        record = engine.machine.record
        taken = Taken(record.iteration, engine.transfer.digest(extra), record.gathered, record.commit, record.branch)
        header = _padded(msgspec.msgpack.encode(taken))
        self._pair.give([header, *engine.memory.state_pieces(), extra])

    def take_state(self, engine: Any) -> Taken:
        """A joiner's: into its arena, which is torn until all is there and is what was sent."""
        assert self._pair is not None
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        self._pair.take([header])
        taken = _first(bytes(header.numpy().tobytes()))
        extra = engine.stepper.extra_tensor()
        pieces, arrives = (*engine.memory.state_pieces(), extra), time.monotonic()
        self._pair.take(pieces)
        nbytes = sum(piece.numel() * piece.element_size() for piece in pieces)
        self.taken = nbytes, (time.monotonic() - arrives) * 1000
        if engine.transfer.digest(extra) != taken.digest:
            raise StateSpoiled(f"the state of rank {self.rank} did not arrive as it was sent")
        self._pair.has_served()
        engine.stepper.load_extra(bytes(extra.numpy().tobytes()))
        engine.ledger.set_branch(taken.branch)
        engine.ledger.end_step(taken.iteration, engine.stepper.extra_state(), gathered=taken.gathered)
        return taken

    def close(self) -> None:
        """Nobody uses any more what is left of it; what is still on its way gives itself up."""
        self._is_closed = True
        if self._pair is not None:
            self._pair.close()
        self._close_client()

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()


def _padded(data: bytes) -> torch.Tensor:
    """Its length in two bytes, and itself."""
    whole = len(data).to_bytes(2, "little") + data
    return torch.frombuffer(bytearray(whole.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)


def _first(data: bytes) -> Taken:
    return msgspec.msgpack.decode(data[2 : 2 + int.from_bytes(data[:2], "little")], type=Taken)


def say_late(preparation: Preparation, iteration: int) -> None:
    """It holds and hears nothing: a coordinator that did not announce this must know that somebody waits."""
    print(f"unicron: rank {preparation.rank} holds at iteration {iteration} for a move", file=sys.stderr)
    preparation.say("held", iteration=iteration)
