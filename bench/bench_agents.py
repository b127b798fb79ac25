"""Milliseconds until a coordinator answers a command while N agents beat, from ten nodes to a thousand.

The coordinator is a real process with its journal and CURVE; the agents are connections of this process that say hello
and beat as agents do (twice a second, the statuses of eight workers each), without workers. `up s` is from the first
connection until all nodes are up (each is an entry of the journal, and waits for the disk), `cores` what the
coordinator used while they beat.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

import common
from unicron.messages import MESSAGE_BYTES_MAX, AgentHeartbeat, AgentHello, WorkerStatus, encode
from unicron.runtime import keys
from unicron.runtime.client import CoordinatorClient, CoordinatorSilent
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.zap import call_curve
from unicron.types import Stage

START_S_MAX = 60.0
UP_S_MAX = 60.0
WORKERS = 8


@contextmanager
def coordinator(folder: Path) -> Iterator[tuple[int, str]]:
    """(pid, endpoint)."""
    settings = CoordinatorSettings(
        listen="127.0.0.1:0", keys=str(folder / "keys"), journal=str(folder / "journal.db"), metrics=""
    )
    config, ready = folder / "c.json", folder / "ready"
    config.write_bytes(msgspec.json.encode(settings))
    words = ["--config", str(config), "--ready", str(ready), "--log", str(folder / "log")]
    process = subprocess.Popen([sys.executable, "-m", "unicron.runtime.coordinator_daemon", *words])
    try:
        deadline = time.monotonic() + START_S_MAX
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the coordinator does not begin")
            time.sleep(0.02)
        yield process.pid, ready.read_text()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Agents:
    def __init__(self, count: int, endpoint: str, pairs: dict[str, keys.KeyPair]) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, count + 64)
        self._store = socket.socket()  # where every agent's store would be: a probe finds it alive
        self._store.bind(("127.0.0.1", 0))
        self._store.listen(4096)
        store = f"tcp://127.0.0.1:{self._store.getsockname()[1]}"
        own = pairs["agent"]
        self._sockets = []
        self._beats = []
        for index in range(count):
            dealer = self._context.socket(zmq.DEALER)
            call_curve(
                dealer, pairs["coordinator"].public, own.public, own.secret, message_bytes_max=MESSAGE_BYTES_MAX + 1
            )
            dealer.connect(endpoint)
            node = f"n{index}"
            dealer.send(encode(AgentHello(node, 1, WORKERS, 0, store, own.public)))
            statuses = tuple(
                WorkerStatus("t", f"{node}.w{slot}", slot, 1, slot, False, True, 1, Stage.COMPUTE, 1)
                for slot in range(WORKERS)
            )
            self._sockets.append(dealer)
            self._beats.append(encode(AgentHeartbeat(node, 1, 1, statuses)))
        self._next = 0
        self._began_s = time.monotonic()

    def beat_until(self, until_s: float) -> None:
        """Evenly spread, twice a second each."""
        count = len(self._sockets)
        while (now_s := time.monotonic()) < until_s:
            due = int((now_s - self._began_s) * 2 * count)
            for index in range(self._next, min(due, self._next + count)):
                self._sockets[index % count].send(self._beats[index % count], zmq.NOBLOCK)
            self._next = max(self._next, due)
            time.sleep(0.002)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._store.close()


def num_up(client: CoordinatorClient) -> int:
    """Asked briefly: the agents must beat on."""
    try:
        return sum(node["phase"] == "up" for node in client.ask("nodes", timeout_ms=500))
    except CoordinatorSilent:
        return 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def one(count: int, runs: int) -> tuple[list[float], dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="unicron-agents-") as name:
        folder = Path(name)
        pairs = keys.make_directory(folder / "keys")
        with coordinator(folder) as (pid, endpoint):
            began_s = time.monotonic()
            agents = Agents(count, endpoint, pairs)
            with CoordinatorClient(endpoint, pairs["coordinator"].public, pairs["client"]) as client:
                while num_up(client) < count:
                    if time.monotonic() - began_s > UP_S_MAX:
                        raise SystemExit(f"not all of {count} nodes are up after {UP_S_MAX:g} s")
                    agents.beat_until(time.monotonic() + 0.2)
                up_s = time.monotonic() - began_s
                samples, used_s, measured_s = [], cpu_s(pid), time.monotonic()
                for _ in range(runs):
                    agents.beat_until(time.monotonic() + 0.25)
                    asked_s = time.monotonic()
                    client.ask("ping")
                    samples.append((time.monotonic() - asked_s) * 1000)
                cores = (cpu_s(pid) - used_s) / (time.monotonic() - measured_s)
            agents.close()
    return samples, {"up s": round(up_s, 2), "cores": round(cores, 3)}


def main() -> None:
    parser = common.parser("Milliseconds until a coordinator answers while N agents beat.", runs=40)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    arguments = parser.parse_args()
    configuration = {"heartbeats": "2 a second and node", "workers in each": WORKERS, "tasks": 0}
    bench = common.Bench("a command's answer", "ms", configuration=configuration)
    for count in arguments.nodes:
        samples, facts = one(count, arguments.runs)
        bench.add(f"{count} nodes", samples, **facts)
    bench.finish(arguments)


if __name__ == "__main__":
    main()
