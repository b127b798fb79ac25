"""torchrun on the demo's model: checkpoints as it trains, one rank killed, all restarted; time lost.

Run by bench_recovery.py and gpu/bench_torchrun.py. As a script it is the worker: `torchrun ... torchrun_restart.py
FOLDER ITERATIONS TP PP M B EVERY`. The kill is done by the worker to itself, at the beginning of an iteration, once (a
file says when it was done). One replica writes; all go on from the newest checkpoint that every rank can read.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from unicron.types import Layout

KILL_ITERATION = 8
ITERATIONS = 14
RUN_S_MAX = 120.0  # a peer that has not come back by then is written as such
KEPT = 2  # checkpoints of a position: while the newest is written, the other is whole


class DidNotComeBack(Exception):
    """torchrun did not finish the run after the kill; the text says how it ended."""


class Restart(NamedTuple):
    """One of them, in ms."""

    lost: float  # from the commit before the kill to that of the iteration it interrupted, less a usual iteration
    again: float  # from the kill to the first commit after it, of whatever iteration
    caught_up: float  # from the kill to the commit of the iteration that it interrupted
    usual: float  # an iteration


def measure(layout: Layout, runs: int) -> list[float]:
    """Milliseconds lost per run, with a checkpoint after every iteration. Raises DidNotComeBack."""
    return [one(layout).lost for _ in range(runs)]


def one(
    layout: Layout, every: int = 1, environment: Mapping[str, str] | None = None, limit_s: float = RUN_S_MAX
) -> Restart:
    """every: iterations from one checkpoint to the next; 0: none, so that all is done again. Raises DidNotComeBack."""
    with tempfile.TemporaryDirectory(prefix="unicron-torchrun-") as folder:
        try:
            _run(layout, Path(folder), every, environment or {}, limit_s)
        except subprocess.TimeoutExpired:
            raise DidNotComeBack(f"not back within {limit_s:.0f} s; {_end_of_log(Path(folder))}") from None
        except subprocess.CalledProcessError as error:
            raise DidNotComeBack(f"ended with exit code {error.returncode}; {_end_of_log(Path(folder))}") from None
        lines = [json.loads(line) for line in (Path(folder) / "commits").read_text().splitlines()]
        killed = int((Path(folder) / "killed").read_text())
    return restart_of([(line["iteration"], line["ns"]) for line in lines], killed)


def restart_of(commits: Sequence[tuple[int, int]], killed_ns: int) -> Restart:
    """commits: (iteration, ns) in the order in which rank 0 made them; it may commit the last one before the kill a
    little after it."""
    last = dict(commits)
    before: dict[int, int] = {}
    restarted: list[int] = []
    for iteration, ns in commits:
        if iteration in before or iteration >= KILL_ITERATION:
            restarted.append(ns)
        else:
            before[iteration] = ns
    gaps = [(before[i] - before[i - 1]) / 1e6 for i in range(2, KILL_ITERATION)]
    usual = float(sorted(gaps)[len(gaps) // 2])
    caught_up = (last[KILL_ITERATION] - killed_ns) / 1e6
    again = (min(restarted) - killed_ns) / 1e6
    return Restart((last[KILL_ITERATION] - before[KILL_ITERATION - 1]) / 1e6 - usual, again, caught_up, usual)


def _run(layout: Layout, folder: Path, every: int, environment: Mapping[str, str], limit_s: float) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout.world_size}",
        "--max-restarts=2", __file__, str(folder), str(ITERATIONS), str(layout.tp), str(layout.pp),
        str(layout.num_micro_batches), str(layout.micro_batch), str(every),
    ]  # fmt: skip
    # torchrun shares its rendezvous's store with all attempts (torch 2.13), and gloo then finds addresses of the
    # killed one; without sharing every attempt gets a store of its own.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    settings = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, env=settings, stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(limit_s)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # it ends its workers, whose sessions are their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _end_of_log(folder: Path) -> str:
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-25:])


def newest(folder: Path, position: int) -> int:
    """The iteration of the newest whole checkpoint; -1 without one."""
    return max((int(path.stem.split("-")[1]) for path in folder.glob(f"position{position}-*.pt")), default=-1)


def load(folder: Path, position: int, parts: Mapping[str, Any]) -> int:
    """The iteration after which all ranks go on; -1: there is nothing."""
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    agreed = torch.tensor([newest(folder, position)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    iteration = int(agreed.item())
    if iteration >= 0:
        state = torch.load(folder / f"position{position}-{iteration}.pt", weights_only=False, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    return iteration


def save(folder: Path, position: int, iteration: int, parts: Mapping[str, Any]) -> None:
    import torch

    path = folder / f"position{position}-{iteration}.pt"
    torch.save({name: part.state_dict() for name, part in parts.items()}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)
    older = sorted(folder.glob(f"position{position}-*.pt"), key=lambda other: int(other.stem.split("-")[1]))
    for other in older[:-KEPT]:
        other.unlink()


def train(
    folder: Path, iterations: int, tp: int, pp: int, num_micro_batches: int, micro_batch: int, every: int
) -> None:
    import unicron
    from unicron.demo import model as demo
    from unicron.training.data import ByteCorpus, ByteDataset

    with unicron.join(tp=tp, pp=pp, micro_batch=micro_batch, num_micro_batches=num_micro_batches) as session:
        rank, layout = session.rank, session.layout
        model, optimizer, scheduler = demo.build(layout)
        session.manage(model, optimizer, scheduler)
        corpus = ByteCorpus.from_stdlib(2_000_000)
        dataset = ByteDataset(corpus, demo.SEQ_LENGTH, micro_batch, num_micro_batches, 1234)
        replica = layout.replica_of(rank)
        position = layout.replica_ranks(replica).index(rank)
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        for iteration in range(load(folder, position, parts) + 1, iterations):
            victim = rank == layout.world_size - 1 and iteration == KILL_ITERATION
            if victim and not (folder / "killed").exists():
                (folder / "killed").write_text(str(time.monotonic_ns()))
                os.kill(os.getpid(), signal.SIGKILL)
            session.train_step(iteration, demo.forward_step, dataset)
            if rank == 0:
                with open(folder / "commits", "a") as commits:
                    commits.write(json.dumps({"iteration": iteration, "ns": time.monotonic_ns()}) + "\n")
            if every and replica == 0 and (iteration + 1) % every == 0:
                save(folder, position, iteration, parts)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
