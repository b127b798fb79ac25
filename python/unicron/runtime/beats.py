"""Beats at both ends of the line: the native listener (csrc/monitor/heart) beside the machines.

The coordinator's end numbers the nodes, gives each a key over CURVE and arranges them in a ring: every node's beats go
to the coordinator and to the next two, its witnesses, whose own beats say that they hear it. So a way that is cut
between one node and the coordinator, or a coordinator that stood still, makes nobody silent. Who listens to whom is
carried, not decided: nothing of it is in the journal.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from unicron import _core
from unicron.agent.events import BeatsAnswered
from unicron.coordinator.events import NodeHeard, NodeSilent, NodeVouched
from unicron.messages import AgentHello, BeatOrder
from unicron.runtime.endpoints import numeric, parse_endpoint

# Of few nodes twice as often: who hears them hears no more beats than of many.
PERIOD_MS, FEW_PERIOD_MS = 500, 250
FEW_NODES = 4096
ANSWERED = 4  # every so many beats: heart.cc, kAnswerEvery
LOOK_MS = 50
AGENT_LOOK_MS = 250
LOOP_MS_MAX = 2_000  # an agent's turn takes milliseconds; its longest sleep is half a second
WITNESSES = 2

log = logging.getLogger("unicron.beats")


@dataclass(slots=True)
class _Node:
    name: str
    number: int
    incarnation: int
    key: bytes
    address: tuple[str, int]
    period_ms: int
    told: BeatOrder | None = None


class BeatDesk:
    """The coordinator's end. Poll ``fileno()``; ``changes()`` are events for its machine."""

    def __init__(self, host: str, port: int, send: Callable[[str, BeatOrder], None]) -> None:
        """host, port: the coordinator's own; where the port is taken (UDP), another is used and told."""
        address = numeric(host)
        try:
            self._heart = _core.Heart(address, port, LOOK_MS)
        except _core.UnicronError as problem:
            log.info("%s; listens for beats elsewhere", problem)
            self._heart = _core.Heart(address, 0, LOOK_MS)
        self._send = send
        self._nodes: dict[str, _Node] = {}
        self._ring: list[str] = []
        self._by_number: dict[int, str] = {}
        self._count = 0

    def fileno(self) -> int:
        return self._heart.fileno()

    def facts(self) -> dict[str, int]:
        return self._heart.facts()

    def hello(self, hello: AgentHello) -> None:
        """After the machine took it: the node beats from now on, under a new key."""
        if not hello.beat_port:
            self.forget(hello.node)
            return
        try:
            address = (numeric(parse_endpoint(hello.store)[0]), hello.beat_port)
        except OSError as problem:
            log.warning("%s cannot beat: %s", hello.node, problem)
            self.forget(hello.node)
            return
        known = self._nodes.get(hello.node)
        number = known.number if known is not None else self._count
        period_ms = FEW_PERIOD_MS if len(self._nodes) < FEW_NODES else PERIOD_MS
        node = _Node(hello.node, number, hello.incarnation, secrets.token_bytes(16), address, period_ms)
        self._nodes[hello.node] = node
        if known is None:
            self._count += 1
            self._ring.append(hello.node)
            self._by_number[number] = hello.node
        self._heart.watch(number, hello.incarnation, node.key, period_ms)
        self._tell_around(self._ring.index(hello.node) if known is not None else len(self._ring) - 1)

    def forget(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node is None:
            return
        self._heart.forget(node.number)
        del self._by_number[node.number]
        place = self._ring.index(name)
        del self._ring[place]
        self._tell_around(place)

    def _tell_around(self, place: int) -> None:
        """Whoever listens to this place, or is listened to from it."""
        count = len(self._ring)
        if count == 0:
            return
        for offset in range(-WITNESSES, min(WITNESSES, count - WITNESSES - 1) + 1):
            at = (place + offset) % count
            node = self._nodes[self._ring[at]]
            order = self._order(node, at)
            if order != node.told:
                node.told = order
                self._send(node.name, order)

    def _order(self, node: _Node, place: int) -> BeatOrder:
        after = [self._nodes[name] for name in self._around(place, 1)]
        before = [self._nodes[name] for name in self._around(place, -1)]
        heard = tuple((n.number, n.incarnation, n.key) for n in before)
        witnesses = tuple(n.address for n in after)
        return BeatOrder(node.number, node.key, self._heart.port, node.period_ms, witnesses, heard)

    def _around(self, place: int, direction: int) -> Iterator[str]:
        count = len(self._ring)
        for offset in range(1, min(WITNESSES, count - 1) + 1):
            yield self._ring[(place + direction * offset) % count]

    def changes(self) -> list[NodeHeard | NodeVouched | NodeSilent]:
        found: list[NodeHeard | NodeVouched | NodeSilent] = []
        for number, hearing, silent_ms in self._heart.take_changes():
            name = self._by_number.get(number)
            if name is None:
                continue
            if hearing == "heard":
                found.append(NodeHeard(name))
            elif hearing == "vouched":
                found.append(NodeVouched(name, silent_ms))
            else:
                found.append(NodeSilent(name, silent_ms))
        return found

    def close(self) -> None:
        self._heart.close()


class AgentBeats:
    """The agent's end. Poll ``fileno()``; call ``turned()`` at every turn of its loop."""

    def __init__(self, host: str, incarnation: int) -> None:
        self._heart = _core.Heart(numeric(host), 0, AGENT_LOOK_MS)
        self._incarnation = incarnation
        self._heard: dict[int, tuple[int, bytes]] = {}
        self.port = self._heart.port
        self.turned = self._heart.turned

    def fileno(self) -> int:
        return self._heart.fileno()

    def follow(self, order: BeatOrder, coordinator: str) -> None:
        """coordinator: the address that this agent's line goes to."""
        try:
            targets = [(numeric(parse_endpoint(coordinator)[0]), order.port), *order.witnesses]
            self._watch(order)
            self._heart.beat_as(order.node, self._incarnation, order.key, order.period_ms, LOOP_MS_MAX, targets)
        except (ValueError, OSError, _core.UnicronError) as problem:
            log.warning("cannot beat as told: %s", problem)

    def _watch(self, order: BeatOrder) -> None:
        wanted = {number: (incarnation, key) for number, incarnation, key in order.heard}
        wanted[_core.BEAT_COORDINATOR] = (self._incarnation, order.key)
        for number in self._heard.keys() - wanted.keys():
            self._heart.forget(number)
        for number, (incarnation, key) in wanted.items():
            if self._heard.get(number) != (incarnation, key):
                period_ms = order.period_ms * (ANSWERED if number == _core.BEAT_COORDINATOR else 1)
                self._heart.watch(number, incarnation, key, period_ms)
        self._heard = wanted

    def changes(self) -> list[BeatsAnswered]:
        """Those it is a witness of are told to the coordinator by the beats themselves."""
        return [
            BeatsAnswered(hearing == "heard")
            for number, hearing, _ in self._heart.take_changes()
            if number == _core.BEAT_COORDINATOR
        ]

    def close(self) -> None:
        self._heart.close()
