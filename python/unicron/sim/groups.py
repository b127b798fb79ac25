"""Blocking collectives as gloo has them: who waits in which group, and who can free whom.

A collective completes when all its participants have entered, and not at the same moment for everybody, so some may
have its result when the group breaks for the others. A member's death closes its sockets: only its *neighbours* get
an error; everybody else goes on waiting until unicron shuts the sockets of its own end of the group (which also
frees the neighbours). Nothing else unblocks a waiting rank: no time-out here, because none would be short enough to
help.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from unicron.sim.scheduler import Scheduler
from unicron.types import Rank


class Waiter(Protocol):
    """A rank's thread inside a collective."""

    rank: Rank
    alive: bool

    def completed(self, token: object, results: dict[Rank, Any]) -> None: ...
    def broke(self, token: object, text: str) -> None: ...


class Mismatch(AssertionError):
    """Members of one group are in different collectives at the same time: wrong sums, or a hang."""


class Group:
    def __init__(self, scheduler: Scheduler, rng: random.Random, name: str, members: dict[Rank, Waiter]) -> None:
        self.name = name
        self.members = members
        self.is_stale = False  # planted: a kept group is entered again under a newer epoch
        self._order = sorted(members)
        self._scheduler, self._rng = scheduler, rng
        self._broken: set[Rank] = set()
        self._entered: dict[Any, dict[Rank, Any]] = {}
        self._tokens: dict[Rank, tuple[Any, object]] = {}
        for rank, member in members.items():
            if not member.alive:
                self._break_neighbours(rank)

    def enter(
        self,
        rank: Rank,
        tag: Any,
        payload: Any,
        token: object,
        participants: tuple[Rank, ...] | None = None,
    ) -> None:
        """Block this rank in the collective `tag`; the end is reported to the waiter with `token`."""
        waiter = self.members[rank]
        if rank in self._broken:
            self._scheduler.after(0.05, lambda: waiter.broke(token, f"{self.name}: Connection closed"))
            return
        wanted = participants or tuple(self._order)
        self._tokens[rank] = (tag, token)
        entered = self._entered.setdefault(tag, {})
        entered[rank] = payload
        if len(entered) == len(wanted):
            del self._entered[tag]
            for other in wanted:
                delay_ms = self._rng.uniform(0.1, 2.0)
                self._scheduler.after(delay_ms, self._finisher(other, tag, entered))
        elif participants is None:
            self._check_others(tag)

    def _check_others(self, tag: Any) -> None:
        busy = [t for t, e in self._entered.items() if e and t[0] not in ("fetch", "copy")]
        live = [t for t in busy if any(r not in self._broken for r in self._entered[t])]
        if len(live) > 1:
            raise Mismatch(f"{self.name}: members wait in {live}")

    def _finisher(self, rank: Rank, tag: Any, results: dict[Rank, Any]) -> Callable[[], None]:
        def finish() -> None:
            held = self._tokens.get(rank)
            if held is not None and held[0] == tag and rank not in self._broken:
                del self._tokens[rank]
                self.members[rank].completed(held[1], results)

        return finish

    def shut(self, rank: Rank) -> None:
        """unicron shuts this rank's sockets of the group: it is freed, and so are its neighbours."""
        self._break(rank)
        self._break_neighbours(rank)

    def died(self, rank: Rank) -> None:
        self._broken.add(rank)
        self._tokens.pop(rank, None)
        self._break_neighbours(rank)

    def _break_neighbours(self, rank: Rank) -> None:
        place, count = self._order.index(rank), len(self._order)
        for other in sorted({self._order[place - 1], self._order[(place + 1) % count]} - {rank}):
            delay_ms = self._rng.uniform(0.1, 3.0)
            self._scheduler.after(delay_ms, partial(self._break, other))

    def _break(self, rank: Rank) -> None:
        if rank in self._broken:
            return
        self._broken.add(rank)
        for entered in self._entered.values():
            entered.pop(rank, None)
        held = self._tokens.pop(rank, None)
        if held is not None:
            self.members[rank].broke(held[1], f"{self.name}: Connection closed by peer")

    def waiting(self) -> dict[Any, list[Rank]]:
        return {tag: sorted(entered) for tag, entered in self._entered.items() if entered}


class Store:
    """An epoch's key-value store, hosted by one agent; it ends with its agent."""

    def __init__(self, scheduler: Scheduler, rng: random.Random) -> None:
        self._scheduler, self._rng = scheduler, rng
        self.is_alive = True
        self._frozen: list[Callable[[], None]] | None = None
        self._values: dict[Any, dict[Rank, Any]] = {}
        self._waiting: dict[Any, dict[Rank, tuple[Waiter, object, tuple[Rank, ...]]]] = {}

    def gather(self, key: Any, waiter: Waiter, value: Any, ranks: tuple[Rank, ...], token: object) -> None:
        """Publish my value; block until those of all `ranks` are there."""
        if not self.is_alive:
            self._scheduler.after(20.0, lambda: waiter.broke(token, "the store does not answer"))
            return
        if self._frozen is not None:  # its machine stands still: the request lies in its socket
            self._frozen.append(partial(self.gather, key, waiter, value, ranks, token))
            return
        values = self._values.setdefault(key, {})
        values[waiter.rank] = value
        waiting = self._waiting.setdefault(key, {})
        waiting[waiter.rank] = (waiter, token, ranks)
        for rank, (other, other_token, wanted) in list(waiting.items()):
            if all(r in values for r in wanted):
                del waiting[rank]
                results = {r: values[r] for r in wanted}
                delay_ms = self._rng.uniform(0.2, 2.0)
                self._scheduler.after(delay_ms, partial(other.completed, other_token, results))

    def freeze(self) -> None:
        self._frozen = []

    def thaw(self) -> None:
        calls, self._frozen = self._frozen or [], None
        for call in calls:
            call()

    def end(self) -> None:
        self.is_alive = False
        self.thaw()
        for waiting in self._waiting.values():
            for waiter, token, _ in waiting.values():
                lost = partial(waiter.broke, token, "the store does not answer")
                self._scheduler.after(20.0, lost)
        self._waiting.clear()
