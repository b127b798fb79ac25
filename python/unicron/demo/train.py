"""The demo's training script: a GPT on bytes of real text, written as any user would write it.

Everything unicron is in four lines: join, manage, iterations, train_step. What else is here records
the run (demo/record.py), or is a fault of the script itself (--poison: a sample that no incarnation
can digest). Without unicron around it (torchrun, or plain python) the same script trains unmanaged.

Example: unicron run --agents 4 -m unicron.demo.train --iterations 32 --results /tmp/run"""

from __future__ import annotations

import argparse
import functools
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import unicron
from unicron.demo.variant import Variant
from unicron.training.data import ByteCorpus, ByteDataset

CORPUS_BYTES = 2_000_000
DATA_SEED = 1234
EVALUATION_S = 60.0
LOOK_EVERY = 3  # iterations, where looking at parameters means to wait for them
SPIKE = float(1 << 20)


def main() -> None:
    options = parse()
    with unicron.join(
        tp=options.tp,
        pp=options.pp,
        ep=options.ep,
        micro_batch=options.micro_batch,
        num_micro_batches=options.num_micro_batches,
        sharded=options.sharded,
        instances=options.instances,
    ) as session:
        from unicron.demo import model as demo
        from unicron.demo.record import Counted, Recorder

        layout = session.layout
        dataset = Counted(
            ByteDataset(
                ByteCorpus.from_stdlib(CORPUS_BYTES),
                demo.SEQ_LENGTH,
                layout.micro_batch,
                layout.num_micro_batches,
                DATA_SEED,
            )
        )
        model, optimizer, scheduler = demo.build(layout, Variant.of(options))
        records = Path(tempfile.mkdtemp()) if session.rehearses else options.results
        tp, _, pp = layout.coords(session.rank)
        recorder = Recorder(
            records,
            session.rank,
            options.gradients,
            magnitudes=options.magnitudes,
            digests=options.digests,
            place=(tp, pp),
        )
        recorder.watch(model)
        session.on_reduced(recorder.reduced)
        session.manage(model, optimizer, scheduler)
        recorder.process_began(managed=session.managed)
        step = functools.partial(forward_step, recorder, options.poison, options.spike, session.rank)
        for iteration in session.iterations(options.iterations + options.extra):
            if options.extra and iteration >= told_end(options.results):
                break
            start_ns = time.monotonic_ns()
            recorder.iteration_begins(iteration)
            metrics = session.train_step(iteration, step, dataset)
            recorder.committed(iteration, metrics, start_ns)
            is_late = options.overlap and layout.sharded  # parameters come under the next forward, mostly
            if not is_late or (iteration % LOOK_EVERY == 0 and session.wait_for_parameters()):
                recorder.digests(iteration, model, optimizer)
            else:
                recorder.digests(iteration)
            session.save_if_due(iteration)
            if options.evaluate_every and (iteration + 1) % options.evaluate_every == 0:
                with session.expect("evaluation", seconds=EVALUATION_S):
                    demo.evaluate(model, dataset, layout.micro_batch)
            if options.extra and iteration == options.iterations - 1:
                session.wait_for_parameters()
                recorder.state(iteration, model, optimizer)
        if not options.extra:
            recorder.state(options.iterations - 1, model, optimizer)


def told_end(folder: Path) -> float:
    """Iterations to train, when whoever watches has seen what it wants; else without end."""
    try:
        return int((folder / "end").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return math.inf


def forward_step(
    recorder: Any, poison: tuple[int, ...], spike: int, rank: int, data_iterator: Iterator[Any], model: Any
) -> tuple[Any, Any]:
    """Megatron's contract, with the count of what is begun."""
    from megatron.core.utils import get_attr_wrapped_model

    from unicron.demo import model as demo

    batch = next(data_iterator)
    if not get_attr_wrapped_model(model, "vp_stage"):  # a later chunk's forward is no new one
        recorder.forward_begins(*batch["address"])
        if (rank, *batch["address"]) == poison:
            raise ValueError(f"poisoned sample in micro-batch {batch['address']}: token 256 of 256")
    output, loss_func = demo.forward_step(iter([batch]), model)
    return output, functools.partial(spiked, loss_func) if batch["address"] == (spike, 1) else loss_func


def spiked(loss_func: Any, output: Any) -> tuple[Any, Any, Any]:
    """A micro-batch like no other: its gradient is SPIKE times what it would be."""
    loss, tokens, report = loss_func(output)
    return loss * SPIKE, tokens, report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=32, help="compared after this many")
    parser.add_argument(
        "--extra",
        type=int,
        default=0,
        help="go on for at most this many, until the file RESULTS/end names an earlier end",
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of this run")
    parser.add_argument("--gradients", type=numbers, default=(), help="iterations, e.g. 10,11,12")
    parser.add_argument("--magnitudes", action="store_true", help="also sum of |g_m| (reference)")
    parser.add_argument("--digests", action="store_true", help="of gradient and state, every iteration")
    parser.add_argument("--evaluate-every", type=int, default=0, help="iterations; 0: never")
    parser.add_argument("--sgd", action="store_true", help="with momentum, in the place of Adam")
    parser.add_argument("--unclipped", action="store_true", help="gradients of whatever norm")
    parser.add_argument("--overlap", action="store_true", help="ask Megatron to hide communication")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true", help="with a loss scale that adapts")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--virtual-pp", type=int, default=1, help="model chunks a rank: an interleaved pipeline")
    parser.add_argument("--spike", type=int, default=-1, help="iteration of a gradient like no other")
    parser.add_argument("--experts", type=int, default=0, help="in each layer; 0: none")
    parser.add_argument("--poison", type=numbers, default=(), help="rank,iteration,micro-batch")
    unmanaged = parser.add_argument_group("without unicron (under it the task says them)")
    unmanaged.add_argument("--tp", type=int, default=1)
    unmanaged.add_argument("--pp", type=int, default=1)
    unmanaged.add_argument("--ep", type=int, default=1)
    unmanaged.add_argument("--micro-batch", type=int, default=2)
    unmanaged.add_argument("--num-micro-batches", type=int, default=0)
    unmanaged.add_argument("--sharded", action="store_true", help="the distributed optimizer")
    unmanaged.add_argument("--instances", type=int, default=1, help="of it")
    return parser.parse_args()


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


if __name__ == "__main__":
    main()
