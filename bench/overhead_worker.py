"""The demo's training loop in blocks: it waits at a gate, trains as many iterations as the gate says, and says so.

Run by bench_overhead.py, managed (under an agent) and unmanaged (plain processes), with the same code. The gate is a
file whose content is the number of iterations allowed so far; each rank writes its progress (the next iteration, its
pid, wall ms an iteration of the last block, from its first commit to its last) to a file of its own. Both are looked at
between blocks only, so they cost the measured iterations nothing.

At the end the gate says STOP, and a managed rank writes what unicron's own work in an iteration costs, part by part.

    overhead_worker.py GATE PROGRESS_FOLDER TP PP NUM_MICRO_BATCHES MICRO_BATCH SHARDED OVERLAP
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import unicron
from unicron.demo.variant import Variant
from unicron.training.data import ByteCorpus, ByteDataset
from unicron.types import Stage

LOOK_S = 0.02
ITERATIONS = 1_000_000
STOP = ITERATIONS  # at the gate: no more blocks
REPEATS = 200


def allowed(gate: Path) -> int:
    try:
        return int(gate.read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


def ms_each(commits: list[float]) -> float:
    return 1e3 * (commits[-1] - commits[0]) / max(1, len(commits) - 1)


def cpu_ms_each(work: Callable[[], object]) -> float:
    """CPU milliseconds of this process (gloo's threads with it) per call."""
    work()
    before = time.process_time()
    for _ in range(REPEATS):
        work()
    return 1e3 * (time.process_time() - before) / REPEATS


def measure_parts(session: Any, progress: Path) -> None:
    """CPU milliseconds an iteration of this rank; every rank does the same at the same time, for the collectives."""
    parts = managed_parts(session) if session.managed else unmanaged_parts()
    progress.with_suffix(".parts.new").write_text(json.dumps(parts))
    progress.with_suffix(".parts.new").rename(progress.with_suffix(".parts"))


def unmanaged_parts() -> dict[str, float]:
    """What the commit does in one all-reduce: Megatron's of the tokens, and the script's own of the reported losses."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    tokens, sums = torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.float64)
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def replaced() -> None:
        dist.all_reduce(tokens, group=data)
        dist.all_reduce(sums)

    return {"replaced by commit": cpu_ms_each(replaced)}


def managed_parts(session: Any) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    engine = session._engine
    gradients, groups, pulse = engine.gradients, engine.groups, session._link.pulse
    vector = torch.zeros(6, dtype=torch.float64)

    def staging() -> None:
        for number, segment in enumerate(gradients.segments):
            staged = gradients.staged(number)
            staged.copy_(segment)
            segment.copy_(staged)

    others = 4  # tie, commit, step, idle
    own = session.layout.num_micro_batches // session.layout.dp
    advances = own + len(gradients.segments) + others
    return {
        "staging": cpu_ms_each(staging),
        "commit": cpu_ms_each(lambda: dist.all_reduce(vector, group=groups.world)),
        "pulse": advances * cpu_ms_each(lambda: pulse.advance(int(Stage.IDLE), 0, -1)),
        "random numbers": own * cpu_ms_each(lambda: engine.computation.randomness.begin(0, 0)),
        "ledger": 8 * cpu_ms_each(lambda: engine.ledger.write(engine.machine.record)),
    }


def main() -> None:
    gate, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tp, pp, num_micro_batches, micro_batch, sharded, overlap = map(int, sys.argv[3:9])
    with unicron.join(
        tp=tp, pp=pp, micro_batch=micro_batch, num_micro_batches=num_micro_batches, sharded=bool(sharded)
    ) as session:
        from unicron.demo import model as demo

        layout = session.layout
        model, optimizer, scheduler = demo.build(layout, Variant(overlap=bool(overlap)))
        session.manage(model, optimizer, scheduler)
        corpus = ByteCorpus.from_stdlib(2_000_000)
        dataset = ByteDataset(corpus, demo.SEQ_LENGTH, layout.micro_batch, layout.num_micro_batches, 1234)
        progress = folder / f"{session.rank}"
        limit, commits = 0, [0.0]
        for iteration in session.iterations(ITERATIONS):
            if iteration >= limit:
                progress.with_suffix(".new").write_text(f"{iteration} {os.getpid()} {ms_each(commits)}")
                progress.with_suffix(".new").rename(progress)
                with session.expect("the next block", seconds=3600):
                    while iteration >= (limit := allowed(gate)):
                        time.sleep(LOOK_S)
                if limit >= STOP:
                    measure_parts(session, progress)
                    break
                commits.clear()
            session.train_step(iteration, demo.forward_step, dataset)
            commits.append(time.monotonic())


if __name__ == "__main__":
    main()
