"""Daemons and what can be wrong around them: ports, sockets, disks, and messages that are none."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import zmq

from clusters import eventually, happened, plain_job, running
from unicron.messages import (
    MESSAGE_BYTES_MAX,
    AgentHeartbeat,
    AgentHello,
    EndWorker,
    Reply,
    Request,
    WorkerHello,
    WorkerStatus,
    decode,
    encode,
)
from unicron.runtime import framing, keys
from unicron.runtime.agent_process import AgentSettings
from unicron.runtime.client import CoordinatorClient, CoordinatorSilent
from unicron.runtime.coordinator_settings import CoordinatorSettings
from unicron.runtime.local_cluster import LocalCluster
from unicron.runtime.store_client import process_context
from unicron.runtime.zap import call_curve
from unicron.types import Stage

pytestmark = pytest.mark.timeout(60)


def daemon(module: str, settings: msgspec.Struct, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run one that is expected to end by itself."""
    config = directory / f"{module}.json"
    config.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", f"unicron.runtime.{module}", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20)


def raw_socket(cluster: LocalCluster, role: str) -> zmq.Socket[bytes]:
    """A connection to the coordinator with a real key, to say what no client would."""
    pair = keys.load(cluster.directory / "keys" / f"{role}.key")
    server = keys.load_public(str(cluster.directory / "keys" / "coordinator.pub"))
    dealer = process_context().socket(zmq.DEALER)
    call_curve(dealer, server, pair.public, pair.secret, message_bytes_max=MESSAGE_BYTES_MAX * 2)
    dealer.connect(f"tcp://{cluster._address}")
    return dealer


def test_messages_that_are_none_do_not_hurt_the_coordinator(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=2000))
    running(cluster, task)
    good = encode(Request("ps"))
    refused = {
        "truncated": good[:-2],
        "another version": b"\x07" + good[1:],
        "empty": b"",
        "unknown type": b"\x01" + msgspec.msgpack.encode({"message": "Nonsense"}),
        "wrong field": b"\x01" + msgspec.msgpack.encode({"message": "Request", "verb": 3}),
        "not for clients": encode(AgentHeartbeat("n0", 1, 1)),
    }
    client = raw_socket(cluster, "client")
    for name, data in refused.items():
        client.send(data)
        assert client.poll(5000), name
        reply = decode(client.recv())
        assert isinstance(reply, Reply) and not reply.ok, name
    client.send_multipart([b"several", b"frames"])
    client.close(0)

    agent = raw_socket(cluster, "agent")
    agent.send(encode(Request("shutdown")))  # an agent's key gives no right to that
    agent.send(encode(AgentHeartbeat("n1", 99, 1)))  # no hello on this connection
    agent.send(b"\x01garbage")
    agent.close(0)

    large = raw_socket(cluster, "client")
    large.send(b"\x01" + b"x" * (MESSAGE_BYTES_MAX + 100))  # ZeroMQ itself ends this connection
    assert not large.poll(300)
    large.close(0)

    assert cluster.task(task)["phase"] == "running"
    assert happened(cluster, task) == []


def test_a_key_that_is_not_admitted_is_not_heard(cluster: LocalCluster) -> None:
    server = keys.load_public(str(cluster.directory / "keys" / "coordinator.pub"))
    for pair in (keys.generate(), keys.load(cluster.directory / "keys" / "worker.key")):
        stranger = CoordinatorClient(f"tcp://{cluster._address}", server, pair)
        with pytest.raises(CoordinatorSilent, match="admits"):
            stranger.ask("ps", timeout_ms=300)
        stranger.close()


def test_an_agent_cannot_speak_for_another_node(cluster: LocalCluster) -> None:
    agent = raw_socket(cluster, "agent")
    agent.send(encode(AgentHello("n9", 1, 1, 0, "tcp://127.0.0.1:1", "k")))
    agent.send(encode(AgentHeartbeat("n0", 99, 1)))
    eventually(lambda: any(n["node"] == "n9" for n in cluster.ask("nodes")))
    assert {n["phase"] for n in cluster.ask("nodes") if n["node"] == "n0"} == {"up"}
    agent.close(0)
    # Its connection ended and nobody listens at its store: gone, not merely silent.
    eventually(lambda: any(n["phase"] == "lost" for n in cluster.ask("nodes") if n["node"] == "n9"))


def test_an_older_life_of_a_node_does_not_get_its_line(cluster: LocalCluster, tmp_path: Path) -> None:
    """The simulator's plant `old-line`: a machine that stood still while its node began anew says hello again, and what
    was meant for the newer life went to it, for ever."""
    ghost = raw_socket(cluster, "agent")
    ghost.send(encode(AgentHello("n0", 0, 1, 0, "tcp://127.0.0.1:1", "k")))
    assert not ghost.poll(300), "an older life got an answer"
    task = cluster.submit(plain_job("t", tmp_path, iterations=50))  # its orders reach the node's own agent
    eventually(lambda: cluster.task(task)["phase"] == "done")
    assert not ghost.poll(0)
    # Workers of it hold no role any more, and one that needs no peer would train on alone.
    status = WorkerStatus("t", "n0.w0", 0, 1, 0, False, True, 1, Stage.COMPUTE, 5)
    ghost.send(encode(AgentHeartbeat("n0", 0, 1, (status,))))
    assert ghost.poll(5000)
    order = decode(ghost.recv())
    assert isinstance(order, EndWorker) and (order.task, order.worker) == ("t", "n0.w0")
    assert "began anew" in order.reason
    ghost.close(0)


def test_messages_that_are_none_do_not_hurt_an_agent(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=2000))
    running(cluster, task)
    worker = cluster.member(task, 0)
    path = cluster.directory / "n0" / "agent.sock"
    for data in (
        b"\xff\xff\xff\xff",
        framing.pack(b""),
        framing.pack(b"\x07version"),
        framing.pack(encode(Request("ps"))),
        struct.pack("<I", 100) + b"truncated",
    ):
        with framing.connect(path, 1000) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(5)
            assert connection.recv(1) == b""
    with framing.connect(path, 1000) as connection:  # somebody pretends to be a worker
        framing.send_blocking(connection, encode(WorkerHello(task, worker.worker, 0, os.getpid())))
        connection.settimeout(5)
        assert connection.recv(1) == b""
    assert cluster.member(task, 0) == worker
    assert happened(cluster, task) == []


def test_a_port_in_use_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    settings = CoordinatorSettings(
        listen=cluster._address, keys=str(cluster.directory / "keys"), journal=str(tmp_path / "j")
    )
    ended = daemon("coordinator_daemon", settings, tmp_path)
    port = cluster._address.rpartition(":")[2]
    assert ended.returncode == 1 and f"port {port}" in ended.stderr and "in use" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_journal_in_use_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    journal = str(cluster.directory / "journal.db")
    keys_directory = str(cluster.directory / "keys")
    settings = CoordinatorSettings(listen="127.0.0.1:0", keys=keys_directory, journal=journal)
    ended = daemon("coordinator_daemon", settings, tmp_path)
    assert ended.returncode == 74 and "another coordinator" in ended.stderr


def test_a_socket_in_use_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    settings = AgentSettings(
        node="n0",
        coordinator=cluster._address,
        keys=str(cluster.directory / "keys"),
        slots=1,
        understudies=0,
        run_dir=str(cluster.directory / "n0"),
        template=str(cluster.directory / "template.sock"),
    )
    ended = daemon("agent_process", settings, tmp_path)
    assert ended.returncode == 1 and "in use by a living process" in ended.stderr


def test_missing_or_open_keys_are_named(tmp_path: Path) -> None:
    settings = CoordinatorSettings(keys=str(tmp_path / "keys"), journal=str(tmp_path / "j"))
    ended = daemon("coordinator_daemon", settings, tmp_path)
    assert ended.returncode == 1 and "unicron keys" in ended.stderr
    keys.make_directory(tmp_path / "keys")
    (tmp_path / "keys" / "coordinator.key").chmod(0o644)
    ended = daemon("coordinator_daemon", settings, tmp_path)
    assert ended.returncode == 1 and "chmod 600" in ended.stderr


def test_a_full_disk_stops_the_deciding_and_nothing_else(cluster: LocalCluster, tmp_path: Path) -> None:
    task = cluster.submit(plain_job("t", tmp_path, iterations=4000))
    running(cluster, task)
    pids = {w.pid for w in cluster.workers(task)}
    cluster.kill_coordinator()
    cluster.journal_pages_max = 8
    cluster.start_coordinator()
    running(cluster, task)
    for number in range(20):  # nodes that join are decisions on the disk
        agent = raw_socket(cluster, "agent")
        agent.send(encode(AgentHello(f"x{number}", 1, 1, 0, "tcp://127.0.0.1:1", "k" * 3000)))
        agent.poll(200)
        agent.close(0)
    assert cluster.wait_for_coordinator(10) == 74
    said = (cluster.log_dir / "coordinator.err").read_text()
    assert "no space for the journal" in said and "training goes on" in said
    cluster.journal_pages_max = 0  # space again
    cluster.start_coordinator()
    running(cluster, task, 50)
    assert {w.pid for w in cluster.workers(task)} == pids
    assert happened(cluster, task) == []
