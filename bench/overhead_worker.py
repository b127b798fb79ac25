"""The demo's training loop in blocks: it waits at a gate, trains as many iterations as the gate says, and says so.

Run by bench_overhead.py, managed (under an agent) and unmanaged (plain processes), with the same code. The gate is a
file whose content is the number of iterations allowed so far; each rank appends its progress to a file of its own. Both
are looked at between blocks only, so they cost the measured iterations nothing.

    overhead_worker.py GATE PROGRESS_FOLDER TP PP NUM_MICRO_BATCHES MICRO_BATCH
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import unicron
from unicron.training.data import ByteCorpus, ByteDataset

LOOK_S = 0.02
ITERATIONS = 1_000_000


def allowed(gate: Path) -> int:
    try:
        return int(gate.read_text() or 0)
    except (FileNotFoundError, ValueError):
        return 0


def main() -> None:
    gate, folder = Path(sys.argv[1]), Path(sys.argv[2])
    tp, pp, num_micro_batches, micro_batch = map(int, sys.argv[3:7])
    with unicron.join(tp=tp, pp=pp, micro_batch=micro_batch, num_micro_batches=num_micro_batches) as session:
        from unicron.demo import model as demo

        layout = session.layout
        model, optimizer, scheduler = demo.build(layout)
        session.manage(model, optimizer, scheduler)
        corpus = ByteCorpus.from_stdlib(2_000_000)
        dataset = ByteDataset(corpus, demo.SEQ_LENGTH, layout.micro_batch, layout.num_micro_batches, 1234)
        progress = folder / f"{session.rank}"
        limit = 0
        for iteration in session.iterations(ITERATIONS):
            if iteration >= limit:
                progress.with_suffix(".new").write_text(f"{iteration} {os.getpid()}")
                progress.with_suffix(".new").rename(progress)
                with session.expect("the next block", seconds=3600):
                    while iteration >= (limit := allowed(gate)):
                        time.sleep(LOOK_S)
                if limit >= ITERATIONS:
                    break
            session.train_step(iteration, demo.forward_step, dataset)


if __name__ == "__main__":
    main()
