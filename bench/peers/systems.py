"""How each system is started, with which knobs, and what of it dies in a fault. Data and small functions; no clock.

Rank faults run on one "node" of all ranks under the launchers; agent, node and coordinator faults on two nodes of half
of them (two launchers on this machine). unicron always runs as two nodes. What was killed from outside (an agent, a
node, a coordinator) is started again after job.REVIVE_S, as an operator or a scheduler would.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from peers.job import ON_GPUS, VICTIM, WORLD_SIZE

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
ENVIRONMENTS = ROOT / "build" / ("peers-gpu" if ON_GPUS else "peers")

RANK_FAULTS = {
    "kill": f"SIGKILL to rank {VICTIM}",
    "stop": f"SIGSTOP to rank {VICTIM}",
    "deadlock": f"rank {VICTIM}'s main thread waits for ever, another thread lives",
    "exception": f"rank {VICTIM} raises",
    "gil": f"native code holds rank {VICTIM}'s GIL for ever",
    "two": "SIGKILL to ranks 1 and 2 in the same iteration",
    "source": f"SIGKILL to rank {VICTIM}, then to the rank that hands its state to the replacement, while it does",
}
OUTER_FAULTS = {
    "agent": "SIGKILL to the launcher or agent of the second node, its ranks live",
    "node": "SIGKILL to everything on the second node",
    "coordinator": "SIGKILL to the coordinator: rendezvous host, lighthouse, master",
}
FAULTS = {"none": "undisturbed", **RANK_FAULTS, **OUTER_FAULTS}
STRUCK = {"two": "1,2"}  # ranks that a fault strikes; else rank VICTIM
NEEDS_THREE = ("two", "source")  # ranks, so that one is left
SECOND_HALF = tuple(f"rank{rank}" for rank in range(VICTIM, WORLD_SIZE))  # of ranks without a launcher
PER_ATTEMPT_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Run(Protocol):
    """What a system needs of the driver to start."""

    nodes: int
    port: int
    folder: Path

    def spawn(self, name: str, command: list[str], **environment: str) -> None: ...


@dataclass(frozen=True)
class Setting:
    """One way to run a system: the words on its command line, its environment, and what a reader must know."""

    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    master: tuple[str, ...] = ()  # arguments of its coordinator
    says: str = ""


@dataclass(frozen=True)
class System:
    name: str
    says: str
    environment: str  # folder of its interpreter; "": the project's own
    settings: dict[str, Setting]
    start: Callable[[Run, Setting], None]
    agent: str = ""  # name of the process that the fault `agent` kills; "": there is none
    coordinator: str = ""
    node: tuple[str, ...] = ()  # processes of the second node; with what they started, they die in the fault `node`
    respawns: bool = False  # a rank that ended in failure is started again by the driver (no launcher of its own)
    two_nodes_always: bool = False
    serves_state: bool = False  # a replacement gets its state from a living rank

    def has(self, fault: str) -> bool:
        """Is there what this fault strikes?"""
        if ON_GPUS and (self.name == "dlrover-run" or fault in NEEDS_THREE):
            return False
        needed = {"agent": self.agent, "coordinator": self.coordinator, "node": self.node, "source": self.serves_state}
        return bool(needed.get(fault, True))


def python(environment: str) -> str:
    return str(ENVIRONMENTS / environment / "bin" / "python") if environment else sys.executable


# ---------------------------------------------------------------- launchers that restart from a checkpoint


def nodes_of(run: Run, dashes: str = "-") -> list[str]:
    per_node = f"--nproc{dashes}per{dashes}node={WORLD_SIZE // run.nodes}"
    if run.nodes == 1:
        return ["--nnodes=1", per_node]
    return [f"--nnodes=1:{run.nodes}", per_node]


def rendezvous(run: Run, node: int, setting: Setting) -> list[str]:
    conf = ",".join([f"is_host={int(node == 0)}", *setting.master])
    endpoint = f"--rdzv-endpoint=127.0.0.1:{run.port}"
    return ["--rdzv-backend=c10d", endpoint, "--rdzv-id=peers", f"--rdzv-conf={conf}"]


@functools.cache
def torchrun_knows(option: str) -> bool:
    """torch 2.11's does not have them all; a word that it does not know ends it at once."""
    words = [python("torchrun"), "-m", "torch.distributed.run", "--help"]
    return option in subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def start_torchrun(run: Run, setting: Setting) -> None:
    arguments = [word for word in setting.arguments if torchrun_knows(word.partition("=")[0])]
    for node in range(run.nodes):
        words = [python("torchrun"), "-m", "torch.distributed.run", *nodes_of(run), *rendezvous(run, node, setting)]
        words += ["--max-restarts=10", *arguments, str(HERE / "train_elastic.py")]
        run.spawn(f"agent{node}", words, **setting.environment)


def start_megatron(run: Run, setting: Setting) -> None:
    """unicron's script, and the project's own interpreter: outside of a cluster it is plain Megatron."""
    words = [python(""), "-m", "torch.distributed.run", *nodes_of(run), *rendezvous(run, 0, setting)]
    run.spawn("agent0", [*words, *setting.arguments, str(HERE / "train_unicron.py")], **setting.environment)


def start_in_job(run: Run, setting: Setting) -> None:
    """With a least number of nodes its rendezvous is over when so many are there, and the others are spare."""
    for node in range(run.nodes):
        words = [python("nvrx"), "-m", "nvidia_resiliency_ext.fault_tolerance.launcher"]
        words += [f"--nnodes={run.nodes}", nodes_of(run)[-1]]
        words += [*rendezvous(run, node, setting), "--max-restarts=10", *setting.arguments]
        more = {"NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE": "1"} if run.nodes > 1 else {}
        run.spawn(f"agent{node}", [*words, str(HERE / "train_elastic.py")], **setting.environment, **more)


def start_dlrover(run: Run, setting: Setting) -> None:
    """Its --standalone fails with torch 2.13 (SubprocessHandler: numa_options), so the master is started apart."""
    words = ["-m", "dlrover.python.master.main", "--platform", "local", "--port", str(run.port)]
    words += ["--node_num", str(run.nodes), "--job_name", "peers", *setting.master]
    run.spawn("coordinator", [python("dlrover"), *words])
    for node in range(run.nodes):
        of_node = {"DLROVER_MASTER_ADDR": f"127.0.0.1:{run.port}", "NODE_RANK": str(node), "NODE_ID": str(node)}
        words = [str(ENVIRONMENTS / "dlrover" / "bin" / "dlrover-run"), *nodes_of(run, "_"), "--max_restarts=10"]
        words += [*setting.arguments, str(HERE / "train_elastic.py")]
        run.spawn(f"agent{node}", words, **of_node, NODE_NUM=str(run.nodes), **setting.environment)


# ---------------------------------------------------------------- without a launcher


def start_in_process(run: Run, setting: Setting) -> None:
    world = WORLD_SIZE + int(setting.environment["PEERS_SETTING"] == "spare")
    for rank in range(world):
        command = [python("nvrx"), str(HERE / "train_inprocess.py")]
        run.spawn(f"rank{rank}", command, RANK=str(rank), WORLD_SIZE=str(world), **setting.environment)


def start_torchft(run: Run, setting: Setting) -> None:
    lighthouse = str(ENVIRONMENTS / "torchft" / "bin" / "torchft_lighthouse")
    bind = ["--min_replicas", "1", "--bind", f"127.0.0.1:{run.port}"]
    run.spawn("coordinator", [lighthouse, *bind, *setting.master])
    address = {"PEERS_LIGHTHOUSE": f"http://127.0.0.1:{run.port}"}
    for rank in range(WORLD_SIZE):
        command = [python("torchft"), str(HERE / "train_torchft.py")]
        run.spawn(f"rank{rank}", command, RANK=str(rank), WORLD_SIZE="1", **address, **setting.environment)


def start_unicron(run: Run, setting: Setting) -> None:
    raise NotImplementedError("unicron's cluster is started by peers.ours")  # it is no command, but a library's object


# ---------------------------------------------------------------- the table

_SHORT = {"PEERS_TIMEOUT": "2"}  # seconds, of the gradients' collectives
if ON_GPUS:
    _SHORT |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}  # else the process waits for its own dump before it ends
# NVRx ends NCCL's groups itself, and asks that the watchdog be slower than its own timeouts; gloo it cannot end.
_IN_PROCESS = {"PEERS_TIMEOUT": "600", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"} if ON_GPUS else _SHORT

TORCHRUN = System(
    "torchrun", "torch 2.13, all ranks restarted from a checkpoint", "torchrun",
    {
        "defaults": Setting(says="gloo waits 30 min; attempts share the agent's store"),
        "tuned": Setting(
            ("--monitor-interval=0.05", "--shutdown-timeout=1"), {**_SHORT, **PER_ATTEMPT_STORE},
            ("last_call_timeout=3", "keep_alive_interval=1", "keep_alive_max_attempt=3"),
        ),
        "plain": Setting(
            ("--monitor-interval=0.05",), {**PER_ATTEMPT_STORE, "PEERS_CHECKPOINT": "0"},
            says="no checkpoint: what the work costs alone",
        ),
    },
    start_torchrun, agent="agent1", coordinator="agent0", node=("agent1",),
)  # fmt: skip

IN_JOB = System(
    "nvrx-injob", "NVRx 0.6.0, in-job restart: its launcher, a monitor a rank, same checkpoint", "nvrx",
    {
        "defaults": Setting(environment=PER_ATTEMPT_STORE, says="heartbeat timeouts are off by default"),
        "tuned": Setting(
            (
                "--monitor-interval=0.05", "--workers-stop-timeout=1", "--ft-workload-check-interval=0.2",
                "--ft-initial-rank-heartbeat-timeout=40", "--ft-rank-heartbeat-timeout=2",
                "--ft-gpu-memory-reclaim-timeout=0", "--ft-max-no-progress-cycles=0",
            ),
            {**_SHORT, **PER_ATTEMPT_STORE, "PEERS_HEARTBEAT": "1"},
            ("last_call_timeout=3", "keep_alive_interval=1", "keep_alive_max_attempt=3"),
        ),
    },
    start_in_job, agent="agent1", coordinator="agent0", node=("agent1",),
)  # fmt: skip

IN_PROCESS = System(
    "nvrx-inprocess", "NVRx 0.6.0, in-process restart: the training function begins anew, same checkpoint", "nvrx",
    {
        "defaults": Setting(
            environment={**_IN_PROCESS, "PEERS_SETTING": "defaults"},
            says="soft 60 s, hard 90 s; its abort does nothing on gloo, so gloo's timeout is short here as well",
        ),
        "tuned": Setting(
            environment={**_IN_PROCESS, "PEERS_SETTING": "tuned"},
            says="monitors 0.1 s; soft 2, hard 3, heartbeat 4 s; last call 0.1, grace 0.5 s",
        ),
        "spare": Setting(
            environment={**_IN_PROCESS, "PEERS_SETTING": "spare"}, says="as tuned, a fifth rank in reserve"
        ),
    },
    start_in_process, coordinator="rank0", node=SECOND_HALF,
)  # fmt: skip

TORCHFT = System(
    "torchft", "torchft 0.2.0, one replica group a rank, ended ones started again by the driver", "torchft",
    {
        "defaults": Setting(environment={"PEERS_TIMEOUT": "60"}, says="join 60 s, heartbeat 5 s; timeouts 60 s"),
        "tuned": Setting(
            environment={**_SHORT, "PEERS_DEAL": "1"},
            master=("--quorum_tick_ms", "100", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "500"),
            says="all micro-batches are dealt over those who take part",
        ),
    },
    start_torchft, coordinator="coordinator", node=SECOND_HALF, respawns=True, serves_state=True,
)  # fmt: skip

DLROVER = System(
    "dlrover-run", "dlrover 0.6.1 with a local master, all ranks restarted from the same checkpoint", "dlrover",
    {
        "defaults": Setting(environment=PER_ATTEMPT_STORE, says="gloo waits 30 min"),
        "tuned": Setting(
            ("--monitor_interval=0.05", "--rdzv_conf=join_timeout=60,lastcall_timeout=1,pend_timeout=60"),
            {**_SHORT, **PER_ATTEMPT_STORE}, ("--hang_detection", "2", "--hang_downtime", "1"),
        ),
    },
    start_dlrover, agent="agent1", coordinator="coordinator", node=("agent1",),
)  # fmt: skip

UNICRON = System(
    "unicron", "two nodes of two slots and one understudy; no checkpoint", "",
    {
        "defaults": Setting(says="a stopped worker is given 5 s to continue"),
        "tuned": Setting(says="stopped_grace_ms=0"),
    },
    start_unicron, agent="n1", coordinator="coordinator", node=("n1",), two_nodes_always=True,
)  # fmt: skip

MEGATRON = System(
    "megatron", "the script that unicron runs, under torchrun without unicron", "",
    {"plain": Setting(environment=PER_ATTEMPT_STORE, says="no checkpoint: what megatron-core costs alone")},
    start_megatron,
)  # fmt: skip

SYSTEMS = {system.name: system for system in (UNICRON, MEGATRON, TORCHRUN, TORCHFT, IN_PROCESS, IN_JOB, DLROVER)}
