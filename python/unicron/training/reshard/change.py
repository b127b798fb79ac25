"""A worker's way into another layout: describe, meet, fetch, compare, report, and wait for the decision.

Everybody who takes part runs this at the same time: members of the present layout (who have left their old model, and
serve its arena), those of them that hold a role in the new one (who have built it, and fetch), and joiners. Whatever
goes wrong here is reported and called off by the coordinator: the old arenas are whole, and everybody goes back.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from unicron.faults.kinds import FaultKind, FaultPoint
from unicron.faults.perform import perform
from unicron.messages import ChangeLayout, LayoutReady, cut
from unicron.runtime.store_client import StoreClient
from unicron.training.ledger import Ledger
from unicron.training.reshard.boxes import Ints, Piece
from unicron.training.reshard.copies import ByCopy, copy_digests, differing, first_only
from unicron.training.reshard.digest import digest_of_all
from unicron.training.reshard.former import Former
from unicron.training.reshard.line import CalledOff, Line
from unicron.training.reshard.move import Memories, Mover, box_digests, differing_copies, own_digests, total
from unicron.training.reshard.plan import Place, common_shapes, plan_moves, state_bytes
from unicron.training.store import RendezvousStore
from unicron.types import EpochPlan, Rank, Stage

MEET_MS_MAX = 300_000  # the slowest participant builds its model meanwhile
DECIDE_MS_MAX = 600_000  # above the coordinator's own bound for a change
POLL_MS = 1_000


class LayoutsDiffer(RuntimeError):
    """What arrived is not what was there."""


class NoDecision(RuntimeError):
    """Neither the new layout nor a return to the old one came."""


class _Said(msgspec.Struct, frozen=True, array_like=True):
    """One participant's account of itself."""

    place: Place
    iteration: int  # -1: it holds nothing
    extra: bytes
    error: str


class _Digests(msgspec.Struct, frozen=True, array_like=True):
    before: dict[str, int]
    after: dict[str, int]
    held: list[int]  # of each piece that it holds, and
    wanted: list[int]  # of each that it shall hold: copies must be equal


class NewHome(NamedTuple):
    """Where this participant's part of the new layout goes. memory: training.memory.StateMemory, in its first arena."""

    rank: Rank
    memory: Any
    describe: Callable[[], tuple[Piece, ...]]


class Change:
    """One participant. former: what it holds, None of a joiner; home: None of one that leaves."""

    def __init__(self, link: Any, order: ChangeLayout, former: Former | None, home: NewHome | None) -> None:
        self._link, self.order, self._former, self._home = link, order, former, home
        workers = [m.worker for m in order.former.members]
        self._workers = workers + [m.worker for m in order.plan.members if m.worker not in workers]
        self._own = self._workers.index(link.worker)
        self._seconds: dict[str, float] = {}
        self._client: StoreClient | None = None
        self._spoils = False  # a fault: what is sent next is not what its digest says

    def carry_out(self) -> EpochPlan:
        """Fetch, report and wait. Returns the plan that decided: order.plan, or one that calls it off."""
        try:
            report = self._take_over()
        except Exception as error:
            if not self._is_over():
                traceback.print_exc()
            report = self._report(-1, error=cut(f"{type(error).__name__}: {error}"))
        finally:
            if self._client is not None:
                self._client.close()
        if not self._is_over():
            self._link.send(report)
        return self._decision()

    def _decision(self) -> EpochPlan:
        deadline = time.monotonic() + DECIDE_MS_MAX / 1000
        while self._link.plan is None or self._link.plan.epoch <= self.order.former.epoch:
            self._pulse()
            self._link.receive(POLL_MS)
            if time.monotonic() > deadline:
                raise NoDecision(f"no epoch after {self.order.former.epoch} within {DECIDE_MS_MAX} ms")
        plan: EpochPlan = self._link.plan
        return plan

    # ------------------------------------------------------------ the way

    def _take_over(self) -> LayoutReady:
        former, home = self._former, self._home
        wanted = None if home is None else self._open_arena(home)
        everybody = self._part("meet", self._meet)
        places = [said.place for said in everybody]
        iterations = {said.iteration for said in everybody if said.iteration >= 0}
        if len(iterations) != 1:
            raise LayoutsDiffer(f"members at iterations {sorted(iterations)}")
        shapes = common_shapes(places)
        held = None if former is None else former.bytes_view
        places = first_only(places, self._part("copies", lambda: self._differing_copies(places, shapes, held)))
        moves = plan_moves(places)
        self._maybe_fault(0)
        before = self._part("digest", lambda: own_digests(self._own, [p.held for p in places], shapes, held))
        self._part("move", lambda: self._move(Memories(held, wanted), moves, len(places)))

        def compare() -> dict[str, int]:
            after = own_digests(self._own, [p.wanted for p in places], shapes, wanted)
            own = places[self._own]
            copies = box_digests(own.held, shapes, held), box_digests(own.wanted, shapes, wanted)
            return self._compare(places, _Digests(before, after, *copies))

        digests = self._part("compare", compare)
        self._maybe_fault(1)
        iteration = iterations.pop()
        if home is not None:
            extra = next(said.extra for said in everybody if said.iteration >= 0)
            Ledger(home.memory.fd).end_step(iteration, extra)
        return self._report(
            iteration, digest=digest_of_all(digests), num_tensors=len(digests), state_bytes=state_bytes(places),
            bytes_own=moves.bytes_own, bytes_node=moves.bytes_node, bytes_cross=moves.bytes_cross,
        )  # fmt: skip

    def _report(self, iteration: int, **known: Any) -> LayoutReady:
        rank = -1 if self._home is None else self._home.rank
        seconds = {name: round(value, 4) for name, value in self._seconds.items()}
        return LayoutReady(self._link.worker, rank, self.order.plan.epoch, iteration, seconds=seconds, **known)

    def _part(self, name: str, what: Callable[[], Any]) -> Any:
        if self._is_over():
            raise CalledOff("a newer epoch came")
        self._pulse()
        start = time.monotonic()
        try:
            return what()
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def _pulse(self) -> None:
        iteration = 0 if self._former is None else self._former.iteration
        self._link.pulse.advance(int(Stage.SAVE), iteration, -1)

    def _maybe_fault(self, when: int) -> None:
        iteration = 0 if self._former is None else self._former.iteration
        kind = self._link.pulse.take_fault(int(FaultPoint.LAYOUT), iteration, when)
        if kind == FaultKind.CORRUPT:
            self._spoils = True
        elif kind:
            perform(kind, f"change of layout after iteration {iteration - 1}")

    def _is_over(self) -> bool:
        return bool(self._link.monitor.newest_epoch() > self.order.former.epoch)

    # ------------------------------------------------------------ its parts

    def _open_arena(self, home: NewHome) -> np.ndarray:
        """Fresh, kept by the agent beside the present ones; torn until all slices are in it."""
        memory = home.memory
        epoch = self.order.plan.epoch
        fd, grant, _ = self._link.request_arena(
            home.rank, memory.content_bytes, memory.digest, adopt=False, epoch=epoch
        )
        if fd < 0:
            raise RuntimeError(f"the agent gave no arena: {grant.refused}")
        Ledger.of_new_arena(fd, memory.digest, memory.content_bytes)
        memory.adopt(fd)
        view: np.ndarray = memory.bytes_view()
        return view

    def _meet(self) -> list[_Said]:
        former, home = self._former, self._home
        place = Place(
            self._link.welcome.node, () if former is None else former.pieces, () if home is None else home.describe()
        )
        said = _Said(place, -1, b"", "") if former is None else _Said(
            place, former.iteration, former.extra, former.error
        )  # fmt: skip
        everybody = [msgspec.msgpack.decode(data, type=_Said) for data in self._share("place", said)]
        wrong = next((s.error for s in everybody if s.error), "")
        if wrong:
            raise LayoutsDiffer(wrong)
        return everybody

    def _share(self, what: str, own: Any) -> list[bytes]:
        """Everybody's, in the order of the participants."""
        client, prefix = self._store(), self._prefix(what)
        client.set(f"{prefix}{self._own}", msgspec.msgpack.encode(own))
        keys = [f"{prefix}{number}" for number in range(len(self._workers))]
        return client.multi_get(keys, MEET_MS_MAX, cancelled=self._is_over)

    def _store(self) -> StoreClient:
        if self._client is None:
            plan, welcome = self.order.plan, self._link.welcome
            self._client = StoreClient(plan.store, plan.store_key, welcome.store_public, welcome.store_secret)
        return self._client

    def _prefix(self, what: str) -> str:
        """A coordinator that comes back may announce under the same number again, from another epoch: what was said in
        the store for the first time is not for the second."""
        order = self.order
        return f"{order.plan.task}/{order.plan.epoch}/layout/{order.former.epoch}/{what}/"

    def _move(self, memories: Memories, moves: Any, num_places: int) -> None:
        if num_places == 1:
            Mover(self._own, memories, _Nobody()).run(moves, 1)
            return
        store = RendezvousStore(self._store(), self._prefix("gloo"), self._is_over)
        line = Line(self._own, num_places, store, self._link.monitor, self._link.pulse, self._is_over)
        try:
            mover = Mover(self._own, memories, line)
            mover.spoil_next = self._spoils
            mover.run(moves, num_places)
        finally:
            line.close()

    def _differing_copies(self, places: list[Place], shapes: dict[str, Ints], held: Any) -> set[str]:
        own = copy_digests(self._own, [place.held for place in places], shapes, held)
        return differing([msgspec.msgpack.decode(data, type=ByCopy) for data in self._share("copies", own)])

    def _compare(self, places: list[Place], own: _Digests) -> dict[str, int]:
        """Of every global tensor, when they are what they were. Raises LayoutsDiffer."""
        everybody = [msgspec.msgpack.decode(data, type=_Digests) for data in self._share("digests", own)]
        before, after = (total([getattr(one, side) for one in everybody]) for side in ("before", "after"))
        wrong = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if wrong:
            raise LayoutsDiffer(f"{len(wrong)} tensors are not what they were, among them {wrong[0]}")
        for side in ("held", "wanted"):
            copies = differing_copies([getattr(p, side) for p in places], [getattr(one, side) for one in everybody])
            if copies:
                raise LayoutsDiffer(f"copies ({side}) of {len(copies)} tensors differ, among them {copies[0]}")
        return after


class _Nobody:
    """The line of a participant that is alone."""

    def send(self, data: Any, target: int) -> Any:
        raise AssertionError(f"nobody to send to: {target}")

    def receive(self, data: Any, source: int) -> Any:
        raise AssertionError(f"nobody to receive from: {source}")
