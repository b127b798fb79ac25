"""Keys that change under a running cluster: nothing stops, and who was revoked is out."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from clusters import closed_incident, eventually, plain_job, running
from unicron.cli import main
from unicron.demo.watch import failures
from unicron.messages import MESSAGE_BYTES_MAX, AgentHello, decode, encode
from unicron.runtime import keys
from unicron.runtime.client import CoordinatorSilent, from_environment
from unicron.runtime.key_rotation import publics
from unicron.runtime.local_cluster import LocalCluster
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import call_curve

pytestmark = pytest.mark.timeout(90)


@contextmanager
def calling(address: str, server: str, pair: keys.KeyPair) -> Iterator[zmq.Socket[bytes]]:
    dealer = process_context().socket(zmq.DEALER)
    call_curve(dealer, server, pair.public, pair.secret, message_bytes_max=MESSAGE_BYTES_MAX)
    dealer.immediate = True
    dealer.connect(address)
    try:
        yield dealer
    finally:
        dealer.close(0)


def is_admitted(address: str, server: str, pair: keys.KeyPair, wait_ms: int = 3000) -> bool:
    with calling(address, server, pair) as dealer:
        return bool(dealer.poll(wait_ms, zmq.POLLOUT))


def test_keys_are_rotated_under_a_running_task(cluster: LocalCluster, tmp_path: Path) -> None:
    directory = cluster.directory / "keys"
    old = keys.load_directory(directory)
    task = cluster.submit(plain_job("t", tmp_path, iterations=100_000))
    running(cluster, task)
    pids = {worker.pid for worker in cluster.workers(task)}
    store = next(n for n in cluster.ask("nodes") if n["node"] == "n0")["store"]
    log = cluster.log_dir / "coordinator.log"

    def nodes_up() -> bool:
        with from_environment(cluster._address, str(directory)) as line, suppress(CoordinatorSilent):
            return [node["phase"] for node in line.ask("nodes", timeout_ms=2000)] == ["up", "up"]
        return False  # it listens anew just now

    assert main(["keys", "rotate", str(directory)]) == 0
    eventually(lambda: "the keys changed" in log.read_text())
    new_worker = keys.load(directory / "worker.next.key")
    eventually(lambda: is_admitted(store, old["agent"].public, new_worker))
    assert main(["keys", "rotate", str(directory), "--use"]) == 0
    eventually(lambda: "listens anew" in log.read_text())
    eventually(nodes_up, 30)
    new = keys.load_directory(directory)
    assert {new[role].public for role in keys.ROLES}.isdisjoint(old[role].public for role in keys.ROLES)
    # not finished yet
    eventually(lambda: is_admitted(f"tcp://{cluster._address}", new["coordinator"].public, old["client"]))
    eventually(lambda: is_admitted(store, old["agent"].public, old["worker"]))
    assert main(["keys", "rotate", str(directory), "--finish"]) == 0
    eventually(lambda: not is_admitted(f"tcp://{cluster._address}", new["coordinator"].public, old["client"], 300))
    eventually(lambda: not is_admitted(store, old["agent"].public, old["worker"], 300))

    with from_environment(cluster._address, str(directory)) as line:
        eventually(nodes_up, 30)
        view = line.ask("describe", task=task)
        assert view["phase"] == "running" and {w["pid"] for w in view["workers"]} == pids
        assert failures(line.ask("incidents")) == []
        os.kill(next(w["pid"] for w in view["workers"] if w["is_member"]), signal.SIGKILL)
        cluster._client, former = line, cluster._client  # the cluster's own line has the former keys
        try:
            assert closed_incident(cluster, task)["outcome"] == "healed"
        finally:
            cluster._client = former


def test_a_revoked_node_is_cut_off_and_refused(cluster: LocalCluster, capsys: pytest.CaptureFixture[str]) -> None:
    directory = cluster.directory / "keys"
    address, server = f"tcp://{cluster._address}", publics(directory, "coordinator")[0]
    log = cluster.log_dir / "coordinator.log"
    assert main(["keys", "node", "n9", str(directory)]) == 0
    pair = keys.load(directory / "nodes" / "n9.key")
    eventually(lambda: is_admitted(address, server, pair, 300))
    with calling(address, server, pair) as dealer:
        dealer.send(encode(AgentHello("n0", 99, 1, 0, "tcp://127.0.0.1:1", "k")))  # its key is good for n9 alone
        dealer.send(encode(AgentHello("n9", 1, 1, 0, "tcp://127.0.0.1:1", "k")))
        assert dealer.poll(5000) and type(decode(dealer.recv())).__name__ == "AgentWelcome"
        assert "hello of n0 with the key of n9" in log.read_text()
        assert {n["node"]: n["phase"] for n in cluster.ask("nodes")}["n0"] == "up"
        assert main(["keys", "revoke", "n9", str(directory)]) == 0
        eventually(lambda: "connection of n9 ended" in log.read_text())
        eventually(lambda: f"key {pair.public[:8]}... from 127.0.0.1 is not admitted" in log.read_text())
    for _ in range(3):
        assert not is_admitted(address, server, pair, 300)
    assert log.read_text().count(f"key {pair.public[:8]}... from 127.0.0.1") == 1  # said once
    assert {n["node"]: n["phase"] for n in cluster.ask("nodes")}["n0"] == "up"
    capsys.readouterr()
    assert main(["keys", "revoke", "n9x", str(directory)]) == 1
    assert "no key of its own" in capsys.readouterr().err
    assert main(["keys", "revoke"]) == 2 and main(["keys", "rotate", str(directory), "--use", "--finish"]) == 2


def test_a_client_that_was_refused_hears_nothing(cluster: LocalCluster) -> None:
    """Also on a connection that it had before."""
    directory = cluster.directory / "keys"
    with from_environment(cluster._address, str(directory)) as line:
        assert line.ask("ping")["term"] == 1
        former = keys.load(directory / "client.key")
        keys.save(keys.generate(), directory / "client.key", replace=True)
        eventually(lambda: not is_admitted(f"tcp://{cluster._address}", line._server_keys[0], former, 300))
        with pytest.raises(CoordinatorSilent):
            line.ask("ping", timeout_ms=700)
