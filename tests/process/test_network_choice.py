"""A cluster on an interface that was named: agents, their stores, their line and their workers' sockets are there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from clusters import PLAIN, closed_incident, end, plain_job, running
from unicron.runtime import networks
from unicron.runtime.agent_process import AgentSettings
from unicron.runtime.local_cluster import LocalCluster

TOLD = ("GLOO_SOCKET_IFNAME", "UNICRON_STATE_ADDRESS", "NCCL_SOCKET_IFNAME")
RUN = f"runpy.run_path({str(PLAIN)!r}, run_name='__main__')\n"

pytestmark = pytest.mark.timeout(60)


def test_a_cluster_on_a_named_interface(tmp_path: Path) -> None:
    outside = [each for each in networks.interfaces() if each.is_up and not each.is_loopback and each.usable]
    if not outside or ":" in outside[0].usable[0]:
        pytest.skip("no interface but loopback is up here")
    name, address = outside[0].name, outside[0].usable[0]
    cluster = LocalCluster(
        2, 1, 1, imports="unicron._core", log_dir=tmp_path / "daemons", address=address, networks=(name, "lo"),
        environment={"NCCL_SOCKET_IFNAME": "told"},
    )  # fmt: skip
    try:
        cluster.start(30)
        for node in cluster.ask("nodes"):
            assert node["store"].startswith(f"tcp://{address}:")
            assert node["control_network"]["interface"] == name and node["control_network"]["why"] == "--interface"
            assert node["state_network"]["address"] == "127.0.0.1"
        script = tmp_path / "told.py"
        script.write_text(f"import os, runpy\nprint('told', *map(os.environ.get, {TOLD}), flush=True)\n" + RUN)
        job = plain_job("t", tmp_path)
        task = cluster.submit(msgspec.structs.replace(job, command=(job.command[0], str(script), *job.command[2:])))
        running(cluster, task)
        assert "told lo 127.0.0.1 told\n" in (tmp_path / "t" / "0" / "1" / "stdout.log").read_text()
        os.kill(cluster.member(task, 1).pid, signal.SIGKILL)
        assert closed_incident(cluster, task)["outcome"] == "healed"
        said = (cluster.log_dir / "n0.1.log").read_text()
        assert f"control over {name} {address}" in said and "state over lo 127.0.0.1" in said
        absent = agent_on(cluster, "no-such-0", tmp_path)
        assert absent.returncode == 1 and "There are: lo 127.0.0.1/8" in absent.stderr and name in absent.stderr
    finally:
        end(cluster)


def agent_on(cluster: LocalCluster, interface: str, folder: Path) -> subprocess.CompletedProcess[str]:
    settings = AgentSettings(
        node="n9", coordinator=cluster.address, keys=str(cluster.state / "keys"), slots=1, understudies=0,
        run_dir=str(folder / "n9"), interface=interface,
    )  # fmt: skip
    config = folder / "n9.json"
    config.write_bytes(msgspec.json.encode(settings))
    command = [sys.executable, "-m", "unicron.runtime.agent_process", "--config", str(config)]
    return subprocess.run(command, capture_output=True, text=True, timeout=20)
