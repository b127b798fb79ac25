"""unicron run: one task on this machine, in the place of torchrun."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from unicron.cli.common import Instances, Interface, Json, Problem, StateInterface, buddies_of, with_instances
from unicron.types import Layout

AGENTS = "As if so many nodes; default 1. In a Slurm allocation: those that train, the rest stands by; default all."
UNDERSTUDIES = "Warm processes a node; default 1 if the script joins, else none."
MICRO_BATCHES = "Of one iteration, for the whole task; default 4 a replica."
STANDALONE = "torchrun's; accepted, and changes nothing: it is always so here."
LogDir = Annotated[
    str, typer.Option("--log-dir", "--log_dir", help="Folder of all logs, and afterwards of the journal.")
]
NprocPerNode = Annotated[str, typer.Option("--nproc-per-node", "--nproc_per_node", help="Workers a node, or auto.")]
Imports = Annotated[str, typer.Option("--import", help="Imported once, before workers are forked.")]
MaxRestarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", "--max_restarts", help="Of one role's workers; of the task, if the script does not join."
    ),
]
Understudies = Annotated[int, typer.Option(min=-1, help=UNDERSTUDIES, show_default=False)]
MicroBatches = Annotated[int, typer.Option(help=MICRO_BATCHES, show_default=False)]
CheckpointDir = Annotated[str, typer.Option(help="Folder that all nodes see; default: no checkpoints.")]
BuddyEvery = Annotated[int, typer.Option(help="The same every so many iterations, beside the training; 0: not.", min=0)]
ExpertParallel = Annotated[int, typer.Option("--ep", help="Data-parallel ranks that experts are spread over.")]
Standalone = Annotated[bool, typer.Option("--standalone", help=STANDALONE)]


def main(
    script: Annotated[list[str], typer.Argument(help="SCRIPT ARGS… or, with -m, MODULE ARGS…")],
    agents: Annotated[int, typer.Option("--agents", "--nnodes", min=0, help=AGENTS, show_default=False)] = 0,
    nproc_per_node: NprocPerNode = "1",
    understudies: Understudies = -1,
    log_dir: LogDir = "unicron-logs",
    tp: Annotated[int, typer.Option(help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline-parallel size.")] = 1,
    ep: ExpertParallel = 1,
    optimizer: Annotated[str, typer.Option(help="plain, or distributed: what the script builds.")] = "plain",
    exact: Annotated[bool, typer.Option("--exact", help="Sums in integers: one result whatever fails.")] = False,
    buddy: Annotated[bool, typer.Option("--buddy", help="Distributed: each shard is copied to another node.")] = False,
    buddy_every: BuddyEvery = 0,
    optimizer_instances: Instances = 1,
    micro_batches: MicroBatches = 0,
    micro_batch: Annotated[int, typer.Option(help="Samples in one.")] = 1,
    checkpoint_dir: CheckpointDir = "",
    checkpoint_every: Annotated[int, typer.Option(help="So many iterations; 0: never.")] = 0,
    stopped_grace: Annotated[float, typer.Option(help="Seconds a stopped worker is given before it is ended.")] = 5.0,
    observe_only: Annotated[bool, typer.Option("--observe-only", help="End nothing for standing still.")] = False,
    max_restarts: MaxRestarts = 10,
    name: Annotated[str, typer.Option(help="Of the task; default the script's.")] = "",
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module.")] = False,
    managed: Annotated[bool | None, typer.Option(help="Does the script call unicron.join()? Default: look.")] = None,
    imports: Imports = "torch,megatron.core,unicron.training",
    standalone: Standalone = False,
    drain_bad_nodes: Annotated[bool, typer.Option(help="In Slurm: drain nodes that failed.")] = False,
    save_before: Annotated[float, typer.Option(help="In Slurm: save and leave so many seconds before the end.")] = 60.0,
    requeue: Annotated[bool, typer.Option("--requeue", help="In Slurm: queue the job again then.")] = False,
    interface: Interface = "",
    state_interface: StateInterface = "",
    quiet: Annotated[bool, typer.Option(help="Do not show what the workers write.")] = False,
    json: Json = False,
) -> int:
    """One task on this machine, in the place of torchrun. Ends with the script's exit code; 137: killed or cancelled.

    In a Slurm allocation: on all its nodes; before its end, or on SIGUSR1, it saves and ends with 75 (deploy/slurm).

    Example: unicron run --agents 2 --nproc-per-node 2 train.py --lr 1e-3
    """
    from unicron.cli.run_cluster import InSlurm, Run
    from unicron.coordinator.job import Job
    from unicron.runtime import slurm
    from unicron.runtime.job_file import absolute, world_layout
    from unicron.runtime.runner import seems_managed

    del standalone
    command = _command(script, module=module)
    slots = _slots(nproc_per_node)
    allocation = slurm.allocation(os.environ)
    agents = _agents(agents, len(allocation.nodes) if allocation else 0)
    is_managed = seems_managed(command) if managed is None else managed
    layout = world_layout(agents * slots, tp, pp, micro_batch, micro_batches, ep=ep)
    layout = _layout(layout, optimizer, optimizer_instances, exact=exact, buddy=buddy, buddy_every=buddy_every)
    job = Job(
        name=name or _name(script[0]),
        command=command,
        layout=layout,
        cwd=os.getcwd(),
        log_dir=absolute(log_dir),
        managed=is_managed,
        understudies=(understudies if understudies >= 0 else 1) if is_managed else 0,
        stopped_grace_ms=round(stopped_grace * 1000),
        checkpoint_dir=_checkpoint_dir(checkpoint_dir, checkpoint_every),
        checkpoint_every=checkpoint_every,
        restart_max=max_restarts,
        observe_only=observe_only,
    )
    run = Run(job, agents, slots, imports if is_managed else "", quiet, json, (interface, state_interface))
    return run.in_allocation(allocation, InSlurm(drain_bad_nodes, save_before, requeue)) if allocation else run.here()


def _command(script: list[str], *, module: bool) -> tuple[str, ...]:
    if not module:
        _look_at(Path(script[0]))
    return (sys.executable, *(("-m",) if module else ()), *script)


def _look_at(path: Path) -> None:
    """What every worker would end of, again and again."""
    if not path.is_file():
        raise Problem(f"no script {path}", 2)
    if path.suffix in (".yaml", ".yml"):
        raise Problem(f"{path} is no script but a job file: unicron submit {path} gives it to a coordinator", 2)
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise Problem(f"{path}{line}: {type(error).__name__}: {getattr(error, 'msg', error)}", 2) from None


def _name(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "-", Path(script).stem).lstrip("_.-") or "script"


def _agents(agents: int, allocated: int) -> int:
    """allocated: nodes of the allocation around us, 0: none."""
    if allocated and agents > allocated:
        raise Problem(f"--agents {agents}, and the allocation has {allocated} nodes", 2)
    return agents or allocated or 1


def _layout(layout: Layout, optimizer: str, instances: int, *, exact: bool, buddy: bool, buddy_every: int) -> Layout:
    if optimizer not in ("plain", "distributed"):
        raise Problem(f"--optimizer {optimizer}: say plain or distributed", 2)
    buddy = buddies_of(buddy, buddy_every)
    if buddy and (optimizer != "distributed" or layout.num_replicas < 2):
        raise Problem(
            "--buddy copies shards of a distributed optimizer, and needs --optimizer distributed and several replicas",
            2,
        )
    sharded = optimizer == "distributed"
    found = msgspec.structs.replace(layout, sharded=sharded, exact=exact, buddy=buddy, buddy_every=buddy_every)
    return with_instances(found, instances)


def _checkpoint_dir(folder: str, every: int) -> str:
    from unicron.runtime.job_file import absolute

    if every and not folder:
        raise Problem(f"--checkpoint-every {every}, and no --checkpoint-dir to write to", 2)
    return absolute(folder)


def _slots(text: str) -> int:
    if text in ("auto", "cpu"):
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise Problem(f"--nproc-per-node {text!r}: give a number of at least 1, or auto", 2)
    return int(text)
