"""torchrun on the demo's model: a checkpoint after every iteration, one rank killed, all restarted; time lost.

Run by bench_recovery.py. As a script it is the worker: `torchrun ... torchrun_restart.py FOLDER ITERATIONS TP PP M B`.
The kill is done by the worker to itself, in the middle of an iteration, once (a file says that it was done).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from unicron.types import Layout

KILL_ITERATION = 8
ITERATIONS = 14
RUN_S_MAX = 120.0  # a peer that has not come back by then is written as such


class DidNotComeBack(Exception):
    """torchrun did not finish the run after the kill; the text says how it ended."""


def measure(layout: Layout, runs: int) -> list[float]:
    """Milliseconds lost per run: the gap between the commits around the kill, less the median iteration.

    Raises DidNotComeBack.
    """
    try:
        return [_one(layout) for _ in range(runs)]
    except subprocess.TimeoutExpired:
        raise DidNotComeBack(f"not back within {RUN_S_MAX:.0f} s") from None
    except subprocess.CalledProcessError as error:
        raise DidNotComeBack(f"ended with exit code {error.returncode}") from None


def _one(layout: Layout) -> float:
    with tempfile.TemporaryDirectory(prefix="unicron-torchrun-") as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout.world_size}",
            "--max-restarts=2", __file__, folder, str(ITERATIONS), str(layout.tp), str(layout.pp),
            str(layout.num_micro_batches), str(layout.micro_batch),
        ]  # fmt: skip
        # torchrun shares its rendezvous's store with all attempts (torch 2.13), and gloo then finds addresses of the
        # killed one; without sharing every attempt gets a store of its own.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        environment = {**os.environ, **own_store, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with open(Path(folder) / "log", "wb") as log:
            subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=RUN_S_MAX, check=True)
        lines = [json.loads(line) for line in (Path(folder) / "commits").read_text().splitlines()]
    times: dict[int, int] = {line["iteration"]: line["ns"] for line in lines}
    gaps = [(times[i] - times[i - 1]) / 1e6 for i in range(2, ITERATIONS) if i != KILL_ITERATION]
    usual = float(sorted(gaps)[len(gaps) // 2])
    return float(times[KILL_ITERATION] - times[KILL_ITERATION - 1]) / 1e6 - usual


def train(folder: Path, iterations: int, tp: int, pp: int, num_micro_batches: int, micro_batch: int) -> None:
    import torch

    import unicron
    from unicron.demo import model as demo
    from unicron.training.data import ByteCorpus, ByteDataset

    with unicron.join(tp=tp, pp=pp, micro_batch=micro_batch, num_micro_batches=num_micro_batches) as session:
        rank, layout = session.rank, session.layout
        model, optimizer, scheduler = demo.build(layout)
        session.manage(model, optimizer, scheduler)
        corpus = ByteCorpus.from_stdlib(2_000_000)
        dataset = ByteDataset(corpus, demo.SEQ_LENGTH, micro_batch, num_micro_batches, 1234)
        checkpoint, start = folder / f"rank{rank}.pt", 0
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=False)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            scheduler.load_state_dict(state["scheduler"])
            start = state["iteration"] + 1
        for iteration in range(start, iterations):
            victim = rank == layout.world_size - 1 and iteration == KILL_ITERATION
            if victim and not (folder / "killed").exists():
                (folder / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            session.train_step(iteration, demo.forward_step, dataset)
            if rank == 0:
                with open(folder / "commits", "a") as commits:
                    commits.write(json.dumps({"iteration": iteration, "ns": time.monotonic_ns()}) + "\n")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                     "scheduler": scheduler.state_dict(), "iteration": iteration}  # fmt: skip
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
