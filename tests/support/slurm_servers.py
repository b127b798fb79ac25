"""A real Slurm on this machine: munged, slurmctld, and a slurmd a node, all under one folder and as this user."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import pytest

from etcd_members import free_ports
from servers import UNPACKED, Server, libraries, program

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "salloc", "srun", "scontrol", "scancel", "squeue")
UP_S_MAX = 30.0
CONFIG = """
ClusterName=unicron
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={port}
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
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE GraceTime=100 State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=off State=UP
{more}
"""


def unpacked() -> tuple[dict[str, str], str, list[str]]:
    """What programs that are not installed need: environment, lines of slurm.conf, words of slurmd."""
    if not Path(program("slurmctld")).is_relative_to(UNPACKED):
        return {}, "", []
    plugins = [folder / "slurm-wlm" for folder in libraries()]
    path = [str(folder) for folder in (*libraries(), *plugins)] + [os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {"LD_LIBRARY_PATH": ":".join(path), "PATH": f"{UNPACKED / 'bin'}:{os.environ['PATH']}"}
    return environment, f"PluginDir={plugins[0]}", ["-d", program("slurmstepd")]


def _stat(pid: int) -> list[str]:
    """State, parent ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Slurm:
    """``with Slurm(folder, 2) as slurm``: nodes n0 and n1, both idle."""

    def __init__(self, folder: Path, nodes: int) -> None:
        found = {name: program(name) for name in PROGRAMS}
        environment, plugins, self._stepd = unpacked()
        self.folder = folder
        self.nodes = [f"n{index}" for index in range(nodes)]
        (folder / "state").mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        port, *ports = free_ports(nodes + 1)
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={at} CPUs=1 RealMemory=100"
            for node, at in zip(self.nodes, ports, strict=True)
        ]
        self._config = folder / "slurm.conf"
        self._config.write_text(
            CONFIG.format(
                host=host, port=port, user=getpass.getuser(), folder=folder, more="\n".join([plugins, *lines])
            )
        )
        self.environment = {**os.environ, **environment, "SLURM_CONF": str(self._config)}
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(256))
        munge = [found["munged"], "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.sock"]
        munge += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
        self._servers: dict[str, Server] = {}
        try:
            self._start("munged", munge)
            self._start("slurmctld", [found["slurmctld"], "-D", "-c", "-f", str(self._config)])
            for node in self.nodes:
                (folder / f"spool.{node}").mkdir()
                self.start(node)
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise

    def start(self, node: str) -> None:
        self._start(node, [program("slurmd"), "-D", "-N", node, "-f", str(self._config), *self._stepd])

    def _start(self, name: str, command: list[str]) -> None:
        self._servers[name] = Server(command, self.folder / f"{name}.out", self.environment)

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + UP_S_MAX
        while self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%t", check=False).split() != ["idle"] * len(
            self.nodes
        ):
            if time.monotonic() > deadline or any(s.process.poll() is not None for s in self._servers.values()):
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

    def drained(self, node: str) -> str:
        """Its reason; empty: it is not."""
        said = self.call("scontrol", "--oneliner", "show", "node", node)
        return said.partition("Reason=")[2].partition(" [")[0] if "DRAIN" in said else ""

    def workers(self) -> dict[str, int]:
        """node -> process of a worker there."""
        return {node: pid for pid, node, name in self.in_steps() if name.startswith("unicron worker")}

    def lose(self, node: str) -> None:
        """As if its power were cut: first who could tell (slurmd, the steps' daemons, agents), then the rest."""
        here = [(pid, name) for pid, where, name in self.in_steps() if where == node]
        agents = [pid for pid, name in here if " agent " in name]
        parents = {int(_stat(pid)[1]) for pid in agents}
        self._servers.pop(node).close()
        for pid in [*parents, *agents, *(pid for pid, _ in here if pid not in agents)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def ends_in(self, job: str, seconds: float) -> None:
        ends = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))
        self.call("scontrol", "update", f"job={job}", f"endtime={ends}")

    def down(self, node: str) -> None:
        """What slurmctld makes of a lost node in SlurmdTimeout, at once. Until then no job on it ends."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=no power")

    def in_steps(self) -> list[tuple[int, str, str]]:
        """(process, node, command line) of all that runs in this Slurm's steps."""
        found = []
        for pid, words in self._with_our_configuration():
            if "SLURM_STEP_ID" in words:
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((pid, words["SLURMD_NODENAME"], name))
        return found

    def _with_our_configuration(self) -> list[tuple[int, dict[str, str]]]:
        """(process, its environment) of whatever lives and belongs to this Slurm, itself included."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                text = (path / "environ").read_bytes().decode(errors="replace")
                words = dict(word.partition("=")[::2] for word in text.split("\0"))
                if words.get("SLURM_CONF") == str(self._config) and _stat(int(path.name))[0] != "Z":
                    found.append((int(path.name), words))
        return found

    def end_jobs(self) -> None:
        """All of them, to their last step: what is left of one would look for its slurmctld for ever."""
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        for node in self.nodes:
            if node not in self._servers:
                self.down(node)
        deadline = time.monotonic() + UP_S_MAX
        while self.call("squeue", "--noheader") or self.in_steps():
            assert time.monotonic() < deadline, self.call("squeue")
            time.sleep(0.1)

    def close(self) -> None:
        for server in reversed(self._servers.values()):
            server.process.terminate()
        for server in reversed(self._servers.values()):
            server.close()
        for pid, _ in self._with_our_configuration():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
