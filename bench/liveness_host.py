"""What bench_liveness.py measures: one process that listens to N agents, in one of three ways.

    beats    the coordinator's own listener (runtime/beats.py) and machine: datagrams, decoded natively
    curve    heartbeat messages over ZeroMQ with CURVE, decoded and stepped in Python, as agents say their news
    plain    the same without CURVE

Reads one JSON line (its settings), writes one (where it listens, and the keys of the beats), measures from the line
`begin` to the line `end`, and writes one more: its CPU seconds, and every change with its time.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from unicron import _core
from unicron.coordinator.events import AgentMessage, Started
from unicron.coordinator.machine import CoordinatorMachine
from unicron.messages import AgentHello, BeatOrder, decode
from unicron.runtime import keys
from unicron.runtime.beats import BeatDesk
from unicron.runtime.clock import now_ms
from unicron.runtime.zap import Gatekeeper, serve_curve

SLOTS = 8


def say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


class Host:
    def __init__(self, count: int) -> None:
        self.machine = CoordinatorMachine()
        self.machine.step(Started(), now_ms())
        self.hellos = [AgentHello(f"n{i}", 1, SLOTS, 0, f"tcp://127.0.0.1:{9 + i % 2}", "k", beat_port=9)
                       for i in range(count)]  # fmt: skip
        for hello in self.hellos:
            self.machine.step(AgentMessage(hello.node, hello), now_ms())
        self.num_messages = 0
        self.changes: list[tuple[str, str, int]] = []  # (node, hearing, monotonic ns)
        self.cpu_s = 0.0
        self.began_s = 0.0

    def serve(self, command: str) -> bool:
        """False: it is over."""
        if command == "begin":
            self.cpu_s, self.began_s, self.num_messages = time.process_time(), time.monotonic(), 0
            return True
        wall_s = time.monotonic() - self.began_s
        answer = {"cpu_s": time.process_time() - self.cpu_s, "wall_s": wall_s, "messages": self.num_messages}
        say({**answer, "changes": self.changes})
        return False


def listen_to_beats(count: int) -> None:
    host = Host(count)
    orders: dict[str, BeatOrder] = {}
    desk = BeatDesk("127.0.0.1", 0, orders.__setitem__)
    for hello in host.hellos:
        desk.hello(hello)
    say({"port": next(iter(orders.values())).port, "keys": [orders[h.node].key.hex() for h in host.hellos]})
    before = desk.facts()["taken"]
    while True:
        ready, _, _ = select.select([desk.fileno(), sys.stdin], [], [], 0.5)
        if desk.fileno() in ready:
            for change in desk.changes():
                host.machine.step(change, now_ms())
                name = type(change).__name__.removeprefix("Node").lower()
                host.changes.append((change.node, name, time.monotonic_ns()))
        if sys.stdin in ready:
            command = sys.stdin.readline().strip()
            host.num_messages = desk.facts()["taken"] - before
            if not host.serve(command):
                break
            before = desk.facts()["taken"]
    desk.close()


def listen_to_messages(count: int, directory: str) -> None:
    host = Host(count)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 64)
    gate = Gatekeeper(context)
    router = context.socket(zmq.ROUTER)
    if directory:
        pair = keys.load(Path(directory) / "coordinator.key")
        gate.replace("bench", {keys.load(Path(directory) / "agent.key").public: "agent"})
        serve_curve(router, pair.secret, "bench", message_bytes_max=1 << 20)
    router.rcvhwm = 100_000
    port = router.bind_to_random_port("tcp://127.0.0.1")
    say({"port": port})
    poller = zmq.Poller()
    for each in (router, gate.socket, sys.stdin):
        poller.register(each, zmq.POLLIN)
    while True:
        ready = dict(poller.poll(500))
        if gate.socket in ready:
            gate.serve()
        for _ in range(256):
            try:
                frames = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            message = decode(frames[1])
            host.machine.step(AgentMessage(message.node, message), now_ms())
            host.num_messages += 1
        if sys.stdin.fileno() in ready and not host.serve(sys.stdin.readline().strip()):
            break
    context.destroy(linger=0)


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    assert _core.__version__
    if settings["way"] == "beats":
        listen_to_beats(settings["count"])
    else:
        listen_to_messages(settings["count"], settings["directory"])


if __name__ == "__main__":
    main()
