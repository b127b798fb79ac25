"""Milliseconds until a lost node is told, of 8,192 agents that beat twice a second; what listening to them costs.

Real sockets, one an agent, in several client processes. `beats` is the coordinator's listener: datagrams, each with
its tag, decoded and aggregated by one native thread, of which the machine sees changes. Beside it heartbeat messages
over ZeroMQ, decoded in Python, with CURVE and without: `cores` is what the listening process used, `us each` that per
message. A row without losses (messages) has the CPU microseconds of a message as its value. Goals: half a core at
most, and a loss told within 1.5 s (p99).

    python bench/bench_liveness.py --agents 8192 --seconds 30 --json
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
from unicron.runtime import keys

HERE = Path(__file__).parent
LINE_S_MAX = 300.0
SETTLE_S = 3.0
CORES_MAX, TOLD_MS_MAX = 0.5, 1_500.0


class Part:
    """A process that is told and answers in lines."""

    def __init__(self, script: str, settings: dict[str, Any]) -> None:
        self._script = script
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.say(json.dumps(settings))

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], LINE_S_MAX)[0]:
            raise SystemExit(f"{self._script} says nothing for {LINE_S_MAX:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._script} ended early")
        return line.strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


def run(way: str, count: int, arguments: Any, directory: str) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """What the host says, and who was lost when."""
    host = Part("liveness_host.py", {"way": way, "count": count, "directory": directory})
    clients: list[Part] = []
    try:
        where = json.loads(host.hear())
        size = -(-count // arguments.clients)
        for first in range(0, count, size):
            mine = min(size, count - first)
            settings = {"way": way, "first": first, "count": mine, "port": where["port"], "directory": directory,
                        "seed": first, "losses": arguments.losses / arguments.clients}  # fmt: skip
            if way == "beats":
                settings["keys"] = where["keys"][first : first + mine]
            clients.append(Part("liveness_agents.py", settings))
        for client in clients:
            client.hear()
        time.sleep(SETTLE_S)
        host.say("begin")
        time.sleep(arguments.seconds)
        host.say("end")
        told = json.loads(host.hear())
        losses: list[tuple[int, int]] = []
        for client in clients:
            client.say("end")
            losses += json.loads(client.hear())["losses"]
        return told, losses
    finally:
        for part in (host, *clients):
            part.close()


def latencies(told: dict[str, Any], losses: list[tuple[int, int]]) -> tuple[list[float], int, int]:
    """(ms from each loss until it was told, losses never told, alarms without a loss)."""
    silent: dict[int, list[int]] = {}
    for node, hearing, at_ns in told["changes"]:
        if hearing == "silent":
            silent.setdefault(int(node[1:]), []).append(at_ns)
    took_ms, missed, last_ns = [], 0, max((at for _, _, at in told["changes"]), default=0)
    for node, lost_ns in losses:
        times = [at for at in silent.get(node, []) if lost_ns < at < lost_ns + 4_000_000_000]
        if times:
            took_ms.append((times[0] - lost_ns) / 1e6)
            silent[node].remove(times[0])
        elif lost_ns + 3_000_000_000 < last_ns:
            missed += 1
    return took_ms, missed, sum(map(len, silent.values()))


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=1)
    parser.add_argument("--agents", type=common.positive, default=8192)
    parser.add_argument("--clients", type=common.positive, default=4, help="processes the agents live in")
    parser.add_argument("--seconds", type=common.positive, default=30, help="measured, of each row")
    parser.add_argument("--losses", type=float, default=8.0, help="nodes a second that fall silent")
    parser.add_argument("--messages", type=int, default=1024, help="agents of the rows with messages; 0: none")
    arguments = parser.parse_args()
    configuration = {"agents": arguments.agents, "messages a second each": 2, "client processes": arguments.clients}
    bench = common.Bench("liveness: a lost node is told", "ms", configuration=configuration)
    told, losses = run("beats", arguments.agents, arguments, "")
    took_ms, missed, false = latencies(told, losses)
    cores = told["cpu_s"] / told["wall_s"]
    bench.add(
        "beats", took_ms, agents=arguments.agents, cores=round(cores, 3),
        per_s=round(told["messages"] / told["wall_s"]),
        us_each=round(told["cpu_s"] / max(told["messages"], 1) * 1e6, 2),
        never_told=missed, false_alarms=false,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="unicron-liveness-") as name:
        keys.make_directory(Path(name) / "keys")
        for way in ("plain", "curve") if arguments.messages else ():
            told, _ = run(way, arguments.messages, arguments, str(Path(name) / "keys") if way == "curve" else "")
            us = told["cpu_s"] / max(told["messages"], 1) * 1e6
            bench.add(
                f"messages, {way} (us each)", [us], agents=arguments.messages,
                cores=round(told["cpu_s"] / told["wall_s"], 3), per_s=round(told["messages"] / told["wall_s"]),
                us_each=round(us, 2),
            )  # fmt: skip
    bench.finish(arguments)
    p99 = common.percentile(took_ms, 99)
    if cores > CORES_MAX or p99 > TOLD_MS_MAX or missed:
        raise SystemExit(f"missed: {cores:.3f} cores (<= {CORES_MAX}), p99 {p99:.0f} ms (<= {TOLD_MS_MAX:.0f}), "
                         f"{missed} losses were never told")  # fmt: skip


if __name__ == "__main__":
    main()
