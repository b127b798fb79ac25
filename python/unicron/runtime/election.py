"""Which of several coordinators decides: who holds the leader key, under a lease of etcd.

    waiting --the key is absent, and ours is put there--> leading --its lease ran out, or is given back--> waiting

A leader knows by its own clock until when nobody else can have followed: from before the last refresh that was
answered, the lease's length less a margin (``margin_s``). Past that moment it does not act, whatever made it late:
frozen, cut off, asleep. So when a successor begins, the leader before it has stopped. What it writes is fenced apart:
each transaction on the journal requires that the leader key is still the very one (create revision) that it put there.

What it had sent before it froze may still arrive, where an agent has not dropped its line yet. Those are decisions of
the journal, which the successor has read, and an agent takes them before it says hello to the successor or not at all,
because with that hello the former line is closed. A long lease has a margin in which every silent line is dropped first
(``SILENCE_S``); a short one gives a successor sooner.

The lease is refreshed by a thread with a client of its own: neither a long step nor a slow write may lose it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import msgspec

from unicron.coordinator.lease import Lease
from unicron.runtime.coordinator_link import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
from unicron.runtime.coordinator_settings import EtcdSettings
from unicron.runtime.etcd import Etcd, EtcdProblem, is_absent, put, read, value_of
from unicron.runtime.journal_problem import LeadershipLost

SILENCE_S = (HEARTBEAT_MS + HEARTBEAT_TIMEOUT_MS) / 1000
LEASE_S_MIN = 2  # etcd with its usual election timeout grants no shorter one
RETRY_S = 0.1


def margin_s(lease_s: float) -> float:
    """So long before its lease can run out a leader stops."""
    return min(SILENCE_S, lease_s / 4)


class Leadership:
    """The key that we hold. ``close`` gives it back at once."""

    def __init__(self, settings: EtcdSettings, lease: int, revision: int, granted_s: float) -> None:
        self.offset_ms = 0.0  # of the cluster's clock against our monotonic one
        self.key = leader_key(settings)
        self.revision = revision  # fences what we write
        self._term = Lease(settings.lease_s * 1000, margin_s(settings.lease_s) * 1000, granted_s * 1000)
        self._lease = lease
        # a member that says nothing must not cost the whole span
        self._etcd = Etcd(msgspec.structs.replace(settings, request_s=min(settings.request_s, settings.lease_s / 4)))
        self._turn = threading.Event()  # of the thread: ask now, or end
        self._is_closed = False
        self._asked = threading.Condition()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """LeadershipLost when somebody else may lead by now. Who was only late (a busy machine) waits a moment for etcd
        to say that the lease never ran out: then nobody can have followed."""
        left_s = self.left_s
        if left_s <= 0 and not self._term.is_lost:
            self._turn.set()
            with self._asked:
                self._asked.wait_for(lambda: self.left_s > 0 or self._term.is_lost, self.hold_s)
            left_s = self.left_s
        if self._term.is_lost:
            raise LeadershipLost("its lease ran out: another coordinator may decide")
        if left_s <= 0:
            raise LeadershipLost(f"its lease was not refreshed in time: {-left_s:.1f} s too late to decide")

    @property
    def hold_s(self) -> float:
        """A leader whose span is over waits so long for etcd's word: for one refresh that fails, and another."""
        return 2 * self._etcd.settings.request_s + RETRY_S

    @property
    def left_s(self) -> float:
        return self._term.left_ms(clock_s() * 1000) / 1000

    def lose(self) -> None:
        """It is known that the key is not ours any more."""
        self._term.lose()

    def _keep(self) -> None:
        wait_s = 0.0
        while True:
            self._turn.wait(wait_s)
            self._turn.clear()
            if self._is_closed:
                return
            began_s = clock_s()
            try:
                is_there = self._etcd.refresh(self._lease)
            except EtcdProblem:
                wait_s = RETRY_S
                continue
            with self._asked:
                if is_there:
                    self._term.refreshed(began_s * 1000)
                else:
                    self.lose()
                self._asked.notify_all()
            if not is_there:
                return
            wait_s = self._term.refresh_ms / 1000

    def close(self) -> None:
        self._is_closed = True
        self._turn.set()
        self._thread.join(2 * self._etcd.settings.request_s)
        if not self._thread.is_alive():
            self.lose()
            with contextlib.suppress(EtcdProblem):  # then it ends by itself
                self._etcd.revoke(self._lease)
            self._etcd.close()


def leader_key(settings: EtcdSettings) -> str:
    return f"{settings.prefix}/leader"


def try_to_lead(etcd: Etcd, name: str) -> Leadership | str:
    """The leadership, or who has it. EtcdProblem when etcd does not say."""
    settings = etcd.settings
    key = leader_key(settings)
    found = etcd.get(key)
    if found is not None:
        return found[0].decode(errors="replace")
    granted_s = clock_s()
    lease = etcd.grant()
    won, answers = etcd.transaction([is_absent(key)], [put(key, name.encode(), lease), read(key)], [read(key)])
    kvs = answers[-1].get("response_range", {}).get("kvs", ()) if answers else ()
    if not won or not kvs:
        with contextlib.suppress(EtcdProblem):
            etcd.revoke(lease)
        return value_of(kvs[0])[0].decode(errors="replace") if kvs else "another coordinator"
    return Leadership(settings, lease, value_of(kvs[0])[1], granted_s)


def own_name(address: str) -> str:
    """For people: who leads."""
    return f"{socket.gethostname()} pid {os.getpid()} at {address}"


def clock_s() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
