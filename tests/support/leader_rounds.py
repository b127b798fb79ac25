"""Rounds of faults against several coordinators: real coordinators, agents, workers and an etcd of three members.

    python -m leader_rounds --seed 7 --rounds 20      (tests/support in PYTHONPATH; `make leaders` does it)

In every round one thing, by the seed, happens to the coordinator that decides or to etcd: it is killed, frozen for
longer than its lease and resumed, cut off from etcd, or told to end; or a member of etcd is killed. Then another one
decides (or the same one still does), and what must hold is looked at: nobody decided after its successor had begun; no
order that was acknowledged is forgotten; the workers are the same processes, trained meanwhile, and no incident is
known.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from clusters import eventually, plain_job, running
from etcd_members import EtcdMembers, Wire, free_ports
from unicron.coordinator.journal import TermBegan, decode_entry
from unicron.runtime import processes
from unicron.runtime.client import CoordinatorClient, CoordinatorRefused, CoordinatorSilent
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.etcd import Etcd
from unicron.runtime.journal_etcd import unpack
from unicron.runtime.local_cluster import LocalCluster

FAULTS = ("kill", "freeze", "cut", "end", "member")
LEASE_S = 5
TAKEN_OVER_S_MAX = 40.0
SENT = re.compile(r"^(\d\d):(\d\d):(\d\d\.\d+) unicron\.coordinator INFO send ", re.MULTILINE)
BEGAN = re.compile(r"^(\d\d):(\d\d):(\d\d\.\d+) unicron\.coordinator INFO term (\d+) begins", re.MULTILINE)


class SeveralCoordinators(LocalCluster):
    """A local cluster with two coordinators, each with wires of its own to etcd."""

    coordinators = ("c0", "c1")

    def __init__(self, etcd: EtcdMembers, folder: Path) -> None:
        super().__init__(2, 1, 1, imports="unicron._core", log_dir=folder / "daemons")
        self.etcd = etcd
        self.wires = {name: [Wire(endpoint) for endpoint in etcd.endpoints] for name in self.coordinators}
        ports = free_ports(len(self.coordinators))
        self.addresses = {name: f"127.0.0.1:{port}" for name, port in zip(self.coordinators, ports, strict=True)}
        self._address = ",".join(self.addresses.values())

    def start_coordinator(self) -> None:
        for name in self.coordinators:
            self.start_one(name)
        if self._client is None:
            self._client = self._call(self._address)
        self._client.wait_until_up(30_000)

    def client_of(self, name: str) -> CoordinatorClient:
        """Of this one alone."""
        return self._call(self.addresses[name])

    def _call(self, address: str) -> CoordinatorClient:
        return CoordinatorClient(address, self._pairs["coordinator"].public, self._pairs["client"])

    def start_one(self, name: str) -> None:
        settings = CoordinatorSettings(
            listen=self.addresses[name],
            keys=str(self.directory / "keys"),
            journal=str(self.directory / "none.db"),
            etcd=self.etcd.settings(endpoints=tuple(wire.address for wire in self.wires[name]), lease_s=LEASE_S),
            metrics="",
        )
        config = self._write_config(name, settings)
        log = ["--log", str(self.log_dir / f"{name}.log")]
        self._start(name, "unicron.runtime.coordinator_daemon", [*config, *log])

    def pid(self, name: str) -> int:
        return self._daemons[name].pid

    def wait_ended(self, name: str) -> int:
        return self._daemons[name].wait(20)

    def stop(self) -> list[int]:
        self._terminate(self.nodes)
        self._terminate(self.coordinators)
        left = super().stop()
        for wires in self.wires.values():
            for wire in wires:
                wire.close()
        return left

    def patiently(self, verb: str, **arguments: Any) -> Any:
        """Asked until somebody answers."""
        deadline = time.monotonic() + TAKEN_OVER_S_MAX
        while True:
            with contextlib.suppress(CoordinatorSilent):
                return self.ask(verb, timeout_ms=1000, **arguments)
            assert time.monotonic() < deadline, f"nobody answers {verb}"

    def leader(self) -> tuple[str, int]:
        """(name, term) of the one that decides."""
        term = int(self.patiently("ping")["term"])
        found = [name for name, log in self.logs().items() if any(int(m[4]) == term for m in BEGAN.finditer(log))]
        return found[0], term

    def logs(self) -> dict[str, str]:
        return {name: (self.log_dir / f"{name}.log").read_text() for name in self.coordinators}


class Rounds:
    def __init__(
        self, seed: int, folder: Path, say: Callable[[str], None] = lambda _: None, freeze_s: float = 0.0
    ) -> None:
        """freeze_s: a frozen one stays so for this long at least, beside until its successor decides."""
        self._freeze_s = freeze_s
        self._random = random.Random(seed)
        self._say = say
        self._orders: list[str] = []
        self._etcd = EtcdMembers(folder)
        self.cluster = SeveralCoordinators(self._etcd, folder)
        self._folder = folder
        self._task = ""

    def run(self, faults: tuple[str, ...]) -> None:
        cluster = self.cluster
        cluster.start(30)
        self._task = cluster.submit(plain_job("t", self._folder, iterations=1_000_000))
        running(cluster, self._task)
        pids = {worker.pid for worker in cluster.workers(self._task)}
        for number, fault in enumerate(faults, 1):
            self._order(f"waits-{number}")
            name, term = cluster.leader()
            began_s, iteration = time.monotonic(), self._iteration()
            getattr(self, f"_{fault}")(name, term)
            self._look(pids, iteration)
            self._say(f"round {number}: {fault} of {name} in term {term}: {time.monotonic() - began_s:.1f} s")
        self._check_terms()

    def close(self) -> list[int]:
        try:
            return self.cluster.stop()
        finally:
            self._etcd.close()

    # ------------------------------------------------------------ faults

    def _kill(self, name: str, term: int) -> None:
        os.kill(self.cluster.pid(name), signal.SIGKILL)
        self.cluster.wait_ended(name)
        self._wait_for_successor(term)
        self.cluster.start_one(name)

    def _end(self, name: str, term: int) -> None:
        os.kill(self.cluster.pid(name), signal.SIGTERM)
        assert self.cluster.wait_ended(name) == 0
        self._wait_for_successor(term)
        self.cluster.start_one(name)

    def _freeze(self, name: str, term: int) -> None:
        """At any moment of its loop; resumed while its successor decides, and while somebody asks it something."""
        time.sleep(self._random.uniform(0.0, 0.5))
        os.kill(self.cluster.pid(name), signal.SIGSTOP)
        frozen_s = time.monotonic()
        try:
            self._wait_for_successor(term)
            time.sleep(self._random.uniform(0.0, 1.0) + max(0.0, frozen_s + self._freeze_s - time.monotonic()))
            asker = self.cluster.client_of(name)
        finally:
            os.kill(self.cluster.pid(name), signal.SIGCONT)
        with asker, contextlib.suppress(CoordinatorSilent):
            raise AssertionError(f"{name} still answers: {asker.ask('ping', timeout_ms=1000)}")
        self._wait_until_it_waits(name)

    def _cut(self, name: str, term: int) -> None:
        for wire in self.cluster.wires[name]:
            wire.cut()
        try:
            self._wait_for_successor(term)
        finally:
            for wire in self.cluster.wires[name]:
                wire.mend()
        self._wait_until_it_waits(name)

    def _member(self, name: str, term: int) -> None:
        """Whichever it is, etcd's own leader too: whether the coordinator keeps its lease is not said."""
        member = self._random.randrange(len(self._etcd.endpoints))
        self._etcd.kill(member)
        self._order(f"without-member-{member}-in-{term}")
        self._etcd.start(member)
        self._etcd.wait_until_up()

    # ------------------------------------------------------------ what must hold

    def _order(self, name: str) -> None:
        """One that is acknowledged, and must not be forgotten: a task that waits, because all slots are held."""
        job = plain_job(name, self._folder)
        with contextlib.suppress(CoordinatorRefused):  # known already: its answer was lost
            self.cluster.patiently("submit", job=msgspec.to_builtins(job))
        self._orders.append(name)

    def _wait_for_successor(self, term: int) -> None:
        eventually(lambda: int(self.cluster.patiently("ping")["term"]) > term, TAKEN_OVER_S_MAX)

    def _wait_until_it_waits(self, name: str) -> None:
        def waits() -> bool:
            log = self.cluster.logs()[name]
            return log.rfind("waits: ") > log.rfind("begins")

        eventually(waits, TAKEN_OVER_S_MAX)

    def _iteration(self) -> int:
        view = self.cluster.patiently("describe", task=self._task)
        return min(int(worker["iteration"]) for worker in view["workers"] if worker["is_member"])

    def _look(self, pids: set[int], iteration: int) -> None:
        cluster = self.cluster

        def all_known() -> bool:
            view = cluster.patiently("describe", task=self._task)
            ready = [w for w in view["workers"] if w["phase"] == "ready" and w["pid"]]
            return view["phase"] == "running" and {w["pid"] for w in ready} == pids

        eventually(all_known, TAKEN_OVER_S_MAX)
        eventually(lambda: self._iteration() > iteration)
        assert cluster.patiently("incidents") == []
        known = {task["task"] for task in cluster.patiently("ps")}
        assert known >= {self._task, *self._orders}, sorted({*self._orders} - known)

    def _check_terms(self) -> None:
        """In the journal terms grow by one; in the logs nobody sends after its successor has begun."""
        client = Etcd(self._etcd.settings())
        batches: dict[str, bytes] = {}
        for key, part in client.items("unicron/journal/", "unicron/journal/~"):
            folder = key.rpartition("/")[0]
            batches[folder] = batches.get(folder, b"") + part
        client.close()
        entries = [decode_entry(entry) for batch in batches.values() for entry in unpack(batch)]
        terms = [entry.term for entry in entries if isinstance(entry, TermBegan)]
        assert terms == [*range(1, len(terms) + 1)] and len(terms) >= 2, terms
        began: dict[int, float] = {}
        last_sent: dict[int, float] = {}
        for log in self.cluster.logs().values():
            own = [(int(m[4]), seconds(m)) for m in BEGAN.finditer(log)]
            began.update(own)
            for sent in map(seconds, SENT.finditer(log)):
                of = [term for term, at in own if at <= sent + 0.5]  # its first orders come with the term's beginning
                last_sent[of[-1]] = max(sent, last_sent.get(of[-1], 0.0))
        late = [(term, sent, began[term + 1]) for term, sent in last_sent.items() if sent > began.get(term + 1, 1e9)]
        assert not late, f"(term, sent, successor began): {late}"


def seconds(found: re.Match[str]) -> float:
    return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3])


def faults_of(seed: int, rounds: int) -> tuple[str, ...]:
    """Each kind before any comes again."""
    order = random.Random(seed)
    found: list[str] = []
    while len(found) < rounds:
        found += order.sample(FAULTS, len(FAULTS))
    return tuple(found[:rounds])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m leader_rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--freeze-s", type=float, default=30.0, help="a frozen one stays so at least this long")
    options = parser.parse_args()
    faults = faults_of(options.seed, options.rounds)
    with tempfile.TemporaryDirectory(prefix="unicron-leaders-") as folder:
        rounds = Rounds(options.seed, Path(folder), lambda text: print(text, flush=True), options.freeze_s)
        try:
            rounds.run(faults)
        finally:
            left = rounds.close()
    assert left == [] and processes.find(rounds.cluster.directory) == []
    print(f"seed {options.seed}: {len(faults)} rounds, nothing forgotten, never two that decide")
    return 0


if __name__ == "__main__":
    sys.exit(main())
