"""etcd as coordinators see it: a leader key under a lease, a journal that only the key's holder extends, and lines to
it that lose requests and answers. Its three members are one here: what they agree on never forgets and has one order.

A request that its sender gave up may still be carried out, late; an answer may never come. Leases run out by etcd's own
clock, up to half a second late, as etcd looks at them only so often.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unicron.sim.network import Link

if TYPE_CHECKING:
    from unicron.sim.cluster import Cluster

REQUEST_MS = 1_000.0  # one call
LEASE_LATE_MS = 500.0


@dataclass(frozen=True)
class Append:
    """What a transaction on the journal answered."""

    is_done: bool
    leader: int | None  # revision of the leader key
    head: int
    is_full: bool = False


class Etcd:
    def __init__(self, world: Cluster, lease_ms: float) -> None:
        self._rng = world.streams("etcd")
        self._scheduler = world.scheduler
        self._clock = world.new_clock("etcd")
        self._lease_ms = lease_ms
        self._leases: dict[int, float] = {}  # id -> until, by our clock
        self._leader: tuple[int, int] | None = None  # (revision, lease)
        self._revision = 0
        self.head = 0  # number of the last batch
        self.entries: list[bytes] = []
        self.full_until_ms = -1.0

    @property
    def leader(self) -> int | None:
        """Revision of the leader key."""
        if self._leader is not None and self._clock.now_ms >= self._leases.get(self._leader[1], -1.0):
            self._leases.pop(self._leader[1], None)
            self._leader = None
        return self._leader[0] if self._leader else None

    def grant(self) -> int:
        lease = len(self._leases) + self._revision + self._rng.randrange(1 << 30)
        self._leases[lease] = -1.0
        self.refresh(lease)
        return lease

    def refresh(self, lease: int) -> bool:
        """False when it is over."""
        if lease not in self._leases or 0 <= self._leases[lease] <= self._clock.now_ms:
            return False
        self._leases[lease] = self._clock.now_ms + self._lease_ms + self._rng.uniform(0.0, LEASE_LATE_MS)
        return True

    def revoke(self, lease: int) -> None:
        self._leases.pop(lease, None)
        if self._leader is not None and self._leader[1] == lease:
            self._leader = None

    def put_leader(self, lease: int) -> int | None:
        """The key's revision, when it was absent and is now the asker's."""
        if self.leader is not None or lease not in self._leases:
            return None
        self._revision += 1
        self._leader = (self._revision, lease)
        return self._revision

    def append(self, own: int, before: int, write: Callable[[], None], *, is_fenced: bool = True) -> Append:
        """write: carried out with the transaction, when the key is the very one and the head the batch before."""
        if self._scheduler.now_ms < self.full_until_ms:
            return Append(False, self.leader, self.head, is_full=True)
        if is_fenced and (self.leader != own or self.head != before):
            return Append(False, self.leader, self.head)
        self.head += 1
        write()
        return Append(True, self.leader, self.head)


class Line:
    """One coordinator's way to etcd."""

    def __init__(self, world: Cluster, name: str, delay_ms: tuple[float, float]) -> None:
        self._scheduler = world.scheduler
        self._rng: random.Random = world.streams(f"etcd/{name}")
        self._delay_ms = delay_ms
        self.link = Link()

    def call(self, ask: Callable[[], Any], answered: Callable[[Any], None], failed: Callable[[], None]) -> None:
        """One of the two is called, within REQUEST_MS; ask may be carried out, even later, although it failed."""
        is_over = False

        def end(call: Callable[[], None]) -> None:
            nonlocal is_over
            if not is_over:
                is_over = True
                timeout.cancel()
                call()

        def arrive() -> None:
            answer = ask()
            self._scheduler.at(self._arrival_ms("down"), lambda: end(lambda: answered(answer)))

        timeout = self._scheduler.at_unless(self._scheduler.now_ms + REQUEST_MS, lambda: end(failed))
        self._scheduler.at(self._arrival_ms("up"), arrive)

    def _arrival_ms(self, way: str) -> float:
        return self.link.arrival_ms(way, self._scheduler.now_ms, self._rng.uniform(*self._delay_ms))
