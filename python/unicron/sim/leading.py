"""One of several coordinators: it waits for the leader key, decides as long as its lease lasts, and waits again.

As runtime/election.py, coordinator_daemon.py and journal_etcd.py do it, with the same `coordinator.lease`: whatever
makes it late (frozen, cut off, asleep), it looks at its own clock before it sends or journals anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from unicron.coordinator.journal import decode_entry
from unicron.coordinator.lease import Lease, refused_append
from unicron.sim.etcd import Append, Etcd, Line

if TYPE_CHECKING:
    from unicron.sim.coordinator_host import CoordinatorHost

LEASE_MS = 2_000.0  # the shortest that election.py admits
MARGIN_MS = 500.0  # election.margin_s of it
LOOK_MS = 100.0  # between two looks whether the key is free
RETRY_MS = 100.0  # of a write
REFRESH_RETRY_MS = 100.0
TURN_MS = 500.0  # its loop turns at least so often


class Leading:
    def __init__(self, host: CoordinatorHost, etcd: Etcd, line: Line) -> None:
        self.host, self.etcd, self.line = host, etcd, line
        self.world = host.world
        self.rng = host.world.streams(f"leading/{host.name}")
        self.clock = host.world.new_clock(f"{host.name}/boot")  # goes on while the machine sleeps
        self.is_up = False  # its process is there
        self._process = 0
        self._reset()

    def _reset(self) -> None:
        self.lease: Lease | None = None
        self._lease_id = 0
        self._revision = 0
        self._head = 0

    # ------------------------------------------------------------ process

    def begin(self) -> None:
        self._process += 1
        self.is_up = True
        self._reset()
        self._later(self.rng.uniform(0.0, LOOK_MS), self._look)

    def die(self) -> None:
        """Without a word to etcd: its lease runs out."""
        self.is_up = False
        self._process += 1
        self._reset()

    def _later(self, delay_ms: float, call: Callable[[], None]) -> None:
        self.world.scheduler.after(delay_ms, self._gated(call))

    def _gated(self, call: Callable[..., None]) -> Callable[..., None]:
        """In this very process, and when it does not stand still."""
        process = self._process

        def arrive(*arguments: Any) -> None:
            if process != self._process:
                return
            if self.host.frozen:
                self.host.stalled.append(partial(arrive, *arguments))
            else:
                call(*arguments)

        return arrive

    def _ask(self, ask: Callable[[], Any], answered: Callable[[Any], None], failed: Callable[[], None]) -> None:
        self.line.call(ask, self._gated(answered), self._gated(failed))

    # ------------------------------------------------------------ waiting

    def _look(self) -> None:
        self._ask(lambda: self.etcd.leader, self._looked, self._wait)

    def _wait(self) -> None:
        self._later(LOOK_MS, self._look)

    def _looked(self, leader: int | None) -> None:
        if leader is not None:
            self._wait()
            return
        asked_ms = self.clock.now_ms
        self._ask(self.etcd.grant, lambda lease: self._granted(lease, asked_ms), self._wait)

    def _granted(self, lease: int, asked_ms: float) -> None:
        self._ask(
            lambda: self.etcd.put_leader(lease),
            lambda revision: self._answered(lease, asked_ms, revision),
            self._wait,  # it may have become ours: then nobody leads until the lease runs out
        )

    def _answered(self, lease: int, asked_ms: float, revision: int | None) -> None:
        if revision is None:
            self._revoke(lease)
            self._wait()
            return
        self.world.count("led")
        self.lease = Lease(LEASE_MS, MARGIN_MS, asked_ms)
        self._lease_id, self._revision = lease, revision
        self._keep()
        self._turn()
        self._ask(lambda: self.etcd.head, self._begin_term, lambda: self.follow("cannot read the journal"))

    def _begin_term(self, head: int) -> None:
        if self.require():
            self._head = head
            self.host.start()

    # ------------------------------------------------------------ leading

    def require(self) -> bool:
        """False, and it decides no more, when somebody else may lead by now."""
        if self.lease is None:
            return False
        if self.lease.left_ms(self.clock.now_ms) > 0 or self.world.options.plant == "no-lease":
            return True
        self.follow("its lease was not refreshed in time")
        return False

    def _turn(self) -> None:
        """Its loop turns, and notices."""
        if self.lease is not None and self.require():
            self._later(self.rng.uniform(0.5, 1.0) * TURN_MS, self._turn)

    def _keep(self) -> None:
        """The thread that refreshes the lease: neither a long step nor a slow write holds it up."""
        lease, lease_id, asked_ms = self.lease, self._lease_id, self.clock.now_ms
        if lease is None:
            return

        def refreshed(is_there: bool) -> None:
            if lease is not self.lease:
                return
            if is_there:
                lease.refreshed(asked_ms)
                self._later(lease.refresh_ms, self._keep)
            else:
                lease.lose()

        self._ask(lambda: self.etcd.refresh(lease_id), refreshed, lambda: self._later(REFRESH_RETRY_MS, self._keep))

    def follow(self, why: str, down_ms: float | None = None) -> None:
        """The key is given back; it waits to lead again, or its process ends for a while."""
        self.world.log(self.host.name, f"does not decide any more: {why}")
        self.world.count("followed")
        lease = self._lease_id
        self._reset()
        self.host.end_life()
        self._revoke(lease)
        if down_ms is None:
            self._wait()
        else:
            self.die()
            self.world.scheduler.after(down_ms, self.host.begin)

    def _revoke(self, lease: int) -> None:
        self.line.call(lambda: self.etcd.revoke(lease), lambda _: None, lambda: None)

    # ------------------------------------------------------------ the journal

    def append(self, entries: list[bytes], then: Callable[[], None]) -> None:
        """then: when they are durable. Repeated until it is known what became of them, or we may not lead any more."""
        host = self.host
        host.is_busy = True
        own, before, life = self._revision, self._head, host.life
        machine = host.machine

        def write() -> None:
            self.etcd.entries += entries
            for data in entries:
                self.world.checkers.journaled_by(decode_entry(data), life, machine)

        def attempt() -> None:
            if host.life != life or not self.require():
                return
            is_fenced = self.world.options.plant != "no-fence"
            self._ask(lambda: self.etcd.append(own, before, write, is_fenced=is_fenced), answered, failed)

        def failed() -> None:
            self.world.count("append:repeated")
            self._later(RETRY_MS, attempt)

        def answered(answer: Append) -> None:
            if host.life != life or self.lease is None:
                return
            if answer.is_full:
                host.crash(self.rng.uniform(500.0, 2_000.0), "no space in etcd for the journal (exit code 74)")
            elif answer.is_done or self._is_written(answer, own, before):
                self._head = before + 1
                host.is_busy = False
                then()
                host.drain()

        attempt()

    def _is_written(self, answer: Append, own: int, before: int) -> bool:
        outcome = refused_append(answer.leader, own, answer.head, before)
        if outcome == "written":
            self.world.count("append:was written")
            return True
        if outcome == "broken":
            self.world.violate(f"the journal's head is {answer.head}, should be {before + 1} at most")
        self.follow("another coordinator leads: what was decided last was not written")
        return False
