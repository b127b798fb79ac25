"""A tiny megatron-core GPT that takes its time: several of them fit on two cores, and each records what it does.

argv: folder of the records, iterations, seconds to rest after each. The data and the model are the same for every task,
so all losses lie on one curve, whatever happens to the task.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unicron
from unicron.training.data import ByteCorpus, ByteDataset

FOLDER, ITERATIONS, REST_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def main() -> None:
    with unicron.join() as session:
        from unicron.demo import model as demo
        from unicron.demo.record import Counted, Recorder

        layout = session.layout
        corpus = ByteCorpus.from_stdlib(500_000)
        dataset = Counted(ByteDataset(corpus, demo.SEQ_LENGTH, layout.micro_batch, layout.num_micro_batches, 7))
        model, optimizer, scheduler = demo.build(layout)
        recorder = Recorder(FOLDER, session.rank)
        session.manage(model, optimizer, scheduler)
        recorder.process_began()
        step = functools.partial(forward_step, recorder)
        for iteration in session.iterations(ITERATIONS):
            start_ns = time.monotonic_ns()
            metrics = session.train_step(iteration, step, dataset)
            recorder.committed(iteration, metrics, start_ns)
            session.save_if_due(iteration)
            time.sleep(REST_S)


def forward_step(recorder: Any, data_iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    from unicron.demo import model as demo

    batch = next(data_iterator)
    recorder.forward_begins(*batch["address"])
    return demo.forward_step(iter([batch]), model)


if __name__ == "__main__":
    main()
