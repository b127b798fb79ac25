"""A real Slurm on this machine: munged, slurmctld, and a slurmd a node, all under one folder and as this user."""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

from etcd_members import free_ports
from servers import Server, program

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
UP_S_MAX = 30.0
CONFIG = """
ClusterName=unicron
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/slurmd.%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """``with Slurm(folder, 2) as slurm``: nodes n0 and n1, both idle."""

    def __init__(self, folder: Path, nodes: int) -> None:
        found = {name: program(name) for name in PROGRAMS}
        self.folder = folder
        self.nodes = [f"n{index}" for index in range(nodes)]
        (folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(nodes + 1)
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={at} CPUs=1 RealMemory=100"
            for node, at in zip(self.nodes, ports, strict=True)
        ]
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(host=host, port=port, user=getpass.getuser(), folder=folder, nodes="\n".join(lines))
        )
        self.environment = {**os.environ, "SLURM_CONF": str(config)}
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(256))
        munge = [found["munged"], "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"]
        munge += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self._servers: list[Server] = []
        try:
            self._start("munged", munge)
            self._start("slurmctld", [found["slurmctld"], "-D", "-c", "-f", str(config)])
            for node in self.nodes:
                (folder / f"spool.{node}").mkdir()
                self._start(node, [found["slurmd"], "-D", "-N", node, "-f", str(config)])
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, command: list[str]) -> None:
        self._servers.append(Server(command, self.folder / f"{name}.out"))

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + UP_S_MAX
        while self.call("sinfo", "-h", "-N", "-o", "%t", check=False).split() != ["idle"] * len(self.nodes):
            if time.monotonic() > deadline or any(s.process.poll() is not None for s in self._servers):
                texts = [path.read_text(errors="replace")[-400:] for path in sorted(self.folder.glob("*.out"))]
                pytest.skip(f"Slurm does not come up on this machine: {' | '.join(texts)}")
            time.sleep(0.1)

    def call(self, *words: str, check: bool = True) -> str:
        ended = subprocess.run(
            [program(words[0]), *words[1:]], env=self.environment, capture_output=True, text=True, timeout=30
        )
        assert not check or ended.returncode == 0, ended.stderr
        return ended.stdout

    def job(self, number: str) -> dict[str, str]:
        """JobState, Restarts, ExitCode ..."""
        return dict(word.split("=", 1) for word in self.call("scontrol", "show", "job", number).split() if "=" in word)

    def close(self) -> None:
        for server in reversed(self._servers):
            server.process.terminate()
        for server in reversed(self._servers):
            server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
