"""Some thousand agents of bench_liveness.py in one process: a real socket each, two messages a second each, spread.

As beats, every agent also says whom it hears: the two before it in its own process, by when they really beat last. With
`losses` a second, agents chosen at random fall silent for three seconds. Reads one JSON line (its settings), runs until
the line `end`, and writes who was lost when.
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from unicron import _core
from unicron.messages import AgentHeartbeat, WorkerStatus, encode
from unicron.runtime import keys
from unicron.runtime.zap import call_curve
from unicron.types import Stage

HZ = 2
LOST_S = 3.0
SETTLE_S = 3.0  # before the first loss
WORKERS = 8


class Beating:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.first = settings["first"]
        self.keys = [bytes.fromhex(key) for key in settings["keys"]]
        self.count = len(self.keys)
        self.sockets = []
        for _ in self.keys:
            each = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            each.setblocking(False)
            each.connect(("127.0.0.1", settings["port"]))
            self.sockets.append(each)
        self.sequences = [0] * self.count
        self.said_ns = [0] * self.count
        self.lost: dict[int, float] = {}  # agent -> until when
        self.losses: list[tuple[int, int]] = []  # (node, monotonic ns)
        self.rate, self.next_loss_s = settings["losses"], time.monotonic() + SETTLE_S
        self.random = random.Random(settings["seed"])

    def say(self, index: int) -> None:
        if index in self.lost:
            return
        now_ns = time.monotonic_ns()
        seen = [
            (self.first + other, (now_ns - self.said_ns[other]) // 1_000_000)
            for other in (index - 1, index - 2)
            if other >= 0 and self.said_ns[other]
        ]
        self.sequences[index] += 1
        self.said_ns[index] = now_ns
        data = _core.write_beat(self.first + index, 1, self.sequences[index], self.keys[index], seen)
        self.sockets[index].send(data)

    def turn(self) -> None:
        now_s = time.monotonic()
        for index in [i for i, until_s in self.lost.items() if now_s >= until_s]:
            del self.lost[index]
        while self.rate and now_s >= self.next_loss_s:
            self.next_loss_s += self.random.expovariate(self.rate)
            index = self.random.randrange(self.count)
            if index not in self.lost:
                self.lost[index] = now_s + LOST_S
                self.losses.append((self.first + index, time.monotonic_ns()))


class Messages:
    """Heartbeats as agents send them with news: the statuses of eight workers."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.count = settings["count"]
        self.losses: list[tuple[int, int]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, self.count + 64)
        directory = settings["directory"]
        self._sockets, self._beats = [], []
        for index in range(self.count):
            node = f"n{settings['first'] + index}"
            dealer = self._context.socket(zmq.DEALER)
            if directory:
                own = keys.load(Path(directory) / "agent.key")
                server = keys.load_public(str(Path(directory) / "coordinator.pub"))
                call_curve(dealer, server, own.public, own.secret, message_bytes_max=1 << 20)
            dealer.connect(f"tcp://127.0.0.1:{settings['port']}")
            statuses = tuple(
                WorkerStatus("t", f"{node}.w{slot}", slot, 1, slot, False, True, 1, Stage.COMPUTE, 1)
                for slot in range(WORKERS)
            )
            self._sockets.append(dealer)
            self._beats.append(encode(AgentHeartbeat(node, 1, 1, statuses)))

    def say(self, index: int) -> None:
        with contextlib.suppress(zmq.Again):
            self._sockets[index].send(self._beats[index], zmq.NOBLOCK)

    def turn(self) -> None:
        pass


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    agents = Beating(settings) if settings["way"] == "beats" else Messages(settings)
    print("ready", flush=True)
    began_s, said = time.monotonic(), 0
    while not select.select([sys.stdin], [], [], 0.004)[0]:
        due = int((time.monotonic() - began_s) * HZ * agents.count)
        for number in range(max(said, due - agents.count), due):
            agents.say(number % agents.count)
        said = due
        agents.turn()
    print(json.dumps({"losses": agents.losses}), flush=True)


if __name__ == "__main__":
    main()
