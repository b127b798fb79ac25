"""Slurm, seen from inside an allocation: the only place that reads SLURM_* and calls scontrol and srun.

`unicron run` in a batch script or under salloc finds its allocation here.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EXIT_REQUEUE = 75  # EX_TEMPFAIL: saved, and to be started again
SCONTROL_S_MAX = 30.0
STEP_S_MAX = 60  # until a step must have begun on a node
INTERACTIVE_STEP = "4294967290"  # where salloc starts a shell inside the allocation; any other step is one of many
REASON = "unicron: "  # of the nodes that we drain


class SlurmProblem(OSError):
    """Slurm did not do it; one line that says what."""


@dataclass(frozen=True)
class Allocation:
    job: str
    nodes: tuple[str, ...]
    restarts: int  # how often this job was requeued

    def agent_command(self, node: str, words: list[str]) -> list[str]:
        """One step on one node with all that the job has there; a node that fails ends this step and nothing else."""
        return [
            "srun", "--no-kill", "--kill-on-bad-exit=0", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--overlap",
            "--cpu-bind=none", "--mem=0", f"--immediate={STEP_S_MAX}", "--export=ALL", *words,
        ]  # fmt: skip


def allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The one around us; None outside of Slurm, and in a step (there the allocation is its batch script's)."""
    job, hostlist = environment.get("SLURM_JOB_ID", ""), environment.get("SLURM_JOB_NODELIST", "")
    if not job or not hostlist or environment.get("SLURM_STEP_ID", INTERACTIVE_STEP) != INTERACTIVE_STEP:
        return None
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return Allocation(job, expand(hostlist), int(restarts) if restarts.isdecimal() else 0)


def expand(hostlist: str) -> tuple[str, ...]:
    """'n[0-1],m7' -> ('n0', 'n1', 'm7'): by scontrol, whose language it is."""
    return tuple(_scontrol("show", "hostnames", hostlist).split())


def node_name(environment: Mapping[str, str]) -> str:
    """What Slurm calls this machine, else what it calls itself."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def own_address() -> str:
    """Under which the other nodes reach this one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise SlurmProblem(f"the name {socket.gethostname()} of this node has no address: {error.strerror}") from None


def drain_words(node: str, reason: str) -> list[str]:
    return ["update", f"nodename={node}", "state=drain", f"reason={REASON}{reason}"]


def drain(node: str, reason: str) -> None:
    """So that the job after us does not get it; needs an operator's rights. SlurmProblem when refused."""
    _scontrol(*drain_words(node, reason))


def requeue(job: str) -> None:
    """It begins anew with the same number, two minutes later at the earliest. Ends whatever runs in it."""
    _scontrol("requeue", job)


def show_job(job: str) -> str:
    return _scontrol("--oneliner", "show", "job", job)


def show_nodes(nodes: Sequence[str]) -> str:
    """A line a node."""
    return _scontrol("--oneliner", "show", "node", ",".join(nodes))


def _scontrol(*words: str) -> str:
    try:
        ended = subprocess.run(
            ["scontrol", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SCONTROL_S_MAX,
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        )  # fmt: skip
    except FileNotFoundError:
        raise SlurmProblem("inside a Slurm allocation, and there is no scontrol in PATH") from None
    except subprocess.TimeoutExpired:
        raise SlurmProblem(f"scontrol {words[0]} did not answer in {SCONTROL_S_MAX:g} s") from None
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise SlurmProblem(f"scontrol {words[0]}: {said[-1]}")
    return ended.stdout
