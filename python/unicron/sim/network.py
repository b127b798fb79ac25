"""Connections between an agent and the coordinator: ordered and reliable while they last, as ZeroMQ's are.

What is on its way when a connection ends is lost, though what a coordinator that died had sent may still arrive; a
message may arrive twice (a resend after a reconnect looks like that); both ends learn of the end later and not at the
same time. A link may be unusable for a while (partition: a new connection does not come about), carry nothing one way
(what is sent waits: TCP sends it again and again), or be slow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unicron.sim.scheduler import Scheduler

if TYPE_CHECKING:
    from unicron.sim.agent_host import AgentHost
    from unicron.sim.coordinator_host import CoordinatorHost


class Link:
    """The wire between one node and one coordinator (or a coordinator and etcd): it outlives connections."""

    def __init__(self) -> None:
        self.blocked_until_ms = {"up": -1.0, "down": -1.0}
        self.slow_until_ms = -1.0
        self.slow_ms = 0.0  # added to every message meanwhile

    def arrival_ms(self, way: str, now_ms: float, delay_ms: float) -> float:
        if now_ms < self.slow_until_ms:
            delay_ms += self.slow_ms
        return max(now_ms, self.blocked_until_ms[way]) + delay_ms

    def is_blocked(self, now_ms: float) -> bool:
        """Both ways are needed for an answer."""
        return now_ms < max(self.blocked_until_ms.values())


class Connection:
    """One life of a connection between a node and one coordinator, two directions, each in order."""

    def __init__(
        self, scheduler: Scheduler, rng: random.Random, link: Link, delay_ms: tuple[float, float], twice: float,
        agent: AgentHost, peer: CoordinatorHost,
    ) -> None:  # fmt: skip
        self._scheduler, self._rng, self.link = scheduler, rng, link
        self._delay_ms = delay_ms
        self._twice = twice
        self._last_ms = {"up": 0.0, "down": 0.0}
        self._is_open = {"up": True, "down": True}
        self.agent, self.peer = agent, peer

    @property
    def is_open(self) -> bool:
        """To what the coordinator says."""
        return self._is_open["down"]

    def send(self, way: str, deliver: Callable[[Any], None], message: Any) -> None:
        copies = 2 if way == "up" and self._rng.random() < self._twice else 1
        for _ in range(copies):
            at_ms = self.link.arrival_ms(way, self._scheduler.now_ms, self._rng.uniform(*self._delay_ms))
            at_ms = self._last_ms[way] = max(at_ms, self._last_ms[way])
            self._scheduler.at(at_ms, lambda: self._arrive(way, deliver, message))

    def _arrive(self, way: str, deliver: Callable[[Any], None], message: Any) -> None:
        if self._is_open[way]:
            deliver(message)

    def end(self) -> None:
        self._is_open = {"up": False, "down": False}

    def end_at_peer(self) -> None:
        """The coordinator's end is gone: nobody hears what is said; what it had sent may still arrive."""
        self._is_open = {"up": False, "down": self._rng.random() < 0.5}
