"""A local cluster with several coordinators on a real etcd, each with wires of its own that can be cut."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from etcd_members import EtcdMembers, Wire, free_ports
from unicron.runtime.client import CoordinatorClient, CoordinatorSilent
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.local_cluster import LocalCluster

LEASE_S = 2
TAKEN_OVER_S_MAX = 40.0
DAY_S = 86_400.0
BEGAN = re.compile(r"^(\d\d):(\d\d):(\d\d\.\d+) unicron\.coordinator INFO term (\d+) begins", re.MULTILINE)
JOINED = re.compile(r"^(\d\d):(\d\d):(\d\d\.\d+) unicron\.agent INFO coordinator connected", re.MULTILINE)


def seconds(found: re.Match[str]) -> float:
    """Of the day."""
    return 3600 * int(found[1]) + 60 * int(found[2]) + float(found[3])


def second_of_day() -> float:
    """As the daemons' logs write it."""
    now = time.localtime()
    return 3600 * now.tm_hour + 60 * now.tm_min + now.tm_sec + time.time() % 1


class SeveralCoordinators(LocalCluster):
    """A local cluster with two coordinators, each with wires of its own to etcd."""

    coordinators = ("c0", "c1")

    def __init__(self, etcd: EtcdMembers, folder: Path) -> None:
        super().__init__(2, 2, 2, imports="unicron._core", log_dir=folder / "daemons")
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

    def wait_for_nodes(self, timeout_s: float = TAKEN_OVER_S_MAX) -> None:
        """Also when the leader changes meanwhile, as it may on a busy machine."""
        deadline = time.monotonic() + timeout_s
        while sum(n["phase"] == "up" for n in self.patiently("nodes")) < len(self.nodes):
            assert time.monotonic() < deadline, "not every agent came up"
            time.sleep(0.05)

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
        paths = {name: self.log_dir / f"{name}.log" for name in self.coordinators}
        return {name: path.read_text() for name, path in paths.items() if path.exists()}

    def taken_over_s(self, term: int, fault_s: float) -> float | None:
        """From that second of the day until a later term began; None: none did."""
        found = [seconds(m) for log in self.logs().values() for m in BEGAN.finditer(log) if int(m[4]) > term]
        return min(((at - fault_s) % DAY_S for at in found), default=None)

    def joined_s(self, fault_s: float) -> float:
        """From that second of the day until the last agent had a line to whoever decides."""
        logs = [path.read_text() for path in self.log_dir.glob("n*.log")]
        last = [[(seconds(m) - fault_s) % DAY_S for m in JOINED.finditer(log)][-1] for log in logs]
        return max(last)
