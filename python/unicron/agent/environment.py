"""The environment of a worker: torchrun's contract, so that a script needs no change, and unicron's own names.

RANK is the role's rank and GROUP_RANK the node; ranks on a node need not be contiguous (MECHANICS 1.25). An
understudy gets the rank it guesses: what it holds in the end comes with its first plan.
"""

from __future__ import annotations

from unicron.messages import Fork, StartWorkers, TaskSpec
from unicron.types import Rank


def fork_of(order: StartWorkers, worker: str, incarnation: int, rank: Rank, node: str, socket: str) -> Fork:
    spec = order.spec
    local = [r for _, _, r, waiting in order.workers if not waiting]
    local_rank = local.index(rank) if rank in local else 0
    env = {
        **spec.env,
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.layout.world_size),
        "LOCAL_WORLD_SIZE": str(max(len(local), 1)),
        "GROUP_RANK": str(order.node_rank),
        "GROUP_WORLD_SIZE": str(order.nnodes),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": str(spec.layout.world_size),
        "MASTER_ADDR": order.master_address or "127.0.0.1",
        "MASTER_PORT": str(order.master_port),
        "TORCHELASTIC_RUN_ID": spec.task,
        "TORCHELASTIC_RESTART_COUNT": str(spec.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(spec.restart_count),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "UNICRON_TASK": spec.task,
        "UNICRON_NODE": node,
        "UNICRON_WORKER": worker,
        "UNICRON_EPOCH": str(order.epoch),
        "UNICRON_INCARNATION": str(incarnation),
    }
    if spec.managed:
        env["UNICRON_AGENT"] = socket
    logs = log_folder(spec, incarnation, rank)
    if logs:
        env["TORCHELASTIC_ERROR_FILE"] = f"{logs}/error.json"
    return Fork(
        worker=worker,
        argv=spec.command,
        env=env,
        cwd=spec.cwd,
        stdout=f"{logs}/stdout.log" if logs else "",
        stderr=f"{logs}/stderr.log" if logs else "",
    )


def log_folder(spec: TaskSpec, incarnation: int, rank: Rank) -> str:
    return f"{spec.log_dir}/{spec.task}/{incarnation}/{rank}" if spec.log_dir else ""
