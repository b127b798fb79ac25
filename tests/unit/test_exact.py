"""Exact mode: one gradient, to the bit, however the micro-batches were grouped and ordered; and what does not fit."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from spawned import in_own_process

pytestmark = pytest.mark.timeout(120)


def test_grouping_and_order_do_not_enter_the_sum() -> None:
    in_own_process(sum_in_many_ways)


def test_what_does_not_fit_a_scale_fits_a_smaller_one() -> None:
    in_own_process(overflow)


def build(*, exact: bool) -> tuple[Any, Any, Any, Any]:
    """(gradients, sums(micro-batches), model, layout) of one rank."""
    import torch

    from unicron.training.arena_pool import ArenaPool
    from unicron.training.stand_ins import make_stand_ins
    from unicron.types import Layout

    pool = ArenaPool(0, own_memory=True) if torch.cuda.is_available() else None  # tests/gpu/run.sh runs this, too
    layout = Layout(dp=2, micro_batch=2, num_micro_batches=8, exact=exact)
    make_stand_ins(0, layout)
    from unicron.demo import model as demo
    from unicron.training.chunks import Chunks
    from unicron.training.compute import Computation
    from unicron.training.data import ByteCorpus, ByteDataset
    from unicron.training.exact import ExactGradients, exact_counts
    from unicron.training.gradients import Gradients, num_slots, staging_bytes
    from unicron.training.memory import StateMemory

    with contextlib.nullcontext() if pool is None else pool.born_here():
        built, optimizer, _ = demo.build(layout)
    model = Chunks(built)
    counts = exact_counts(model, layout)
    staging = staging_bytes(model, element_bytes=8, slots=num_slots(pool))
    memory = StateMemory(model, optimizer, staging, pool=pool, exact=counts)
    gradients = ExactGradients(model, memory, layout) if exact else Gradients(model, memory)
    computation = Computation(model, layout, memory.scalars)
    computation.backward_begins = lambda chunk, micro_batch: gradients.backward_begins(chunk)
    dataset = ByteDataset(ByteCorpus.from_stdlib(100_000), demo.SEQ_LENGTH, 2, 8)

    def sums(micro_batches: tuple[int, ...]) -> None:
        gradients.zero()
        optimizer.zero_grad()
        computation.run(0, micro_batches, demo.forward_step, dataset, lambda micro_batch: None)
        gradients.computed()

    return gradients, sums, model, layout


def sum_in_many_ways() -> None:
    import torch

    gradients, sums, _, _ = build(exact=True)

    def added(*groups: tuple[int, ...]) -> tuple[list[torch.Tensor], float]:
        """Each group computed from nothing, then added: as when what a lost replica had is dealt to others."""
        sums(groups[0])
        for group in groups[1:]:
            aside = gradients.put_aside()
            sums(group)
            gradients.put_back(aside, 0)
        gradients.finish()
        squares = gradients.sum_of_squares()
        assert gradients.found(squares) == 0.0
        return [data.clone() for data in gradients.segments + gradients.buffers], squares

    wanted, squares = added((0, 1, 2, 3))
    for groups in (((3, 1, 0, 2),), ((0,), (1, 2, 3)), ((2, 3), (0, 1)), ((3,), (2,), (1,), (0,))):
        values, same = added(*groups)
        assert same == squares
        assert all(torch.equal(a, b) for a, b in zip(values, wanted, strict=True)), groups
    norm = float(torch.cat(gradients.buffers).double().square().sum())
    assert squares == pytest.approx(norm, rel=1e-9)
    in_floats = [data.clone() for data in gradients.buffers]

    import torch.distributed as dist
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    plain, sums, _, _ = build(exact=False)
    sums((0, 1, 2, 3))
    for exact, usual in zip(in_floats, plain.buffers, strict=True):
        assert float((exact - usual).abs().max()) <= 1e-5 * float(usual.abs().max())


def overflow() -> None:
    import math

    import torch

    from unicron.healing.record import OVERFLOW, CommitResult
    from unicron.training.exact import EXPONENT_MAX, REPEAT_BITS, REPEATS_MAX

    gradients, sums, _, _ = build(exact=True)
    sums((0,))
    gradients.finish()
    assert gradients.found(gradients.sum_of_squares()) == 0.0
    first = gradients.base_exponent
    gradients.base_exponent = 60  # as if the last norm had been tiny
    sums((0,))
    found = gradients.found(1.0)
    assert found == OVERFLOW
    tried = CommitResult(0, 100.0, 0.0, 3 * found, 1.0)
    assert tried.overflowed
    assert not CommitResult(0, 100.0, 0.0, 3 * found + 1.0, 1.0).overflowed, "no scale is for what is not finite"
    gradients.repeat = 1
    assert gradients.exponent == 60 - REPEAT_BITS
    sums((0,))
    assert gradients.found(gradients.sum_of_squares()) == 0.0
    gradients.base_exponent, gradients.repeat = EXPONENT_MAX, REPEATS_MAX
    assert gradients.exponent == -EXPONENT_MAX and REPEAT_BITS * (REPEATS_MAX - 1) < 2 * EXPONENT_MAX
    gradients.zero()
    gradients.buffers[0].fill_(torch.finfo(torch.float32).max)
    gradients._is_dirty[0] = True
    gradients.computed()
    assert gradients.found(1.0) == 0.0, "the smallest scale has room for whatever is finite"

    gradients.zero()
    gradients.base_exponent, gradients.repeat = first, 0
    gradients.buffers[0][3] = math.nan
    gradients._is_dirty[0] = True
    gradients.computed()
    assert 0.0 < gradients.found(1.0) < OVERFLOW
    gradients.stepped(CommitResult(0, 100.0, 0.0, 1.0, 1.0))
    assert gradients.exponent == first, "not finite is no matter of scale"
    gradients.stepped(CommitResult(0, 100.0, 4.0**20, 0.0, 1.0, repeat=1))
    small = gradients.exponent
    gradients.stepped(CommitResult(1, 100.0, 4.0**10, 0.0, 1.0))
    assert gradients.exponent == small + 10, "the norm says it, and not how often it was tried"
    assert torch.isfinite(gradients.memory.scalars).all()
    own = gradients.own_state()
    gradients.base_exponent = 0
    gradients.load_own(own)
    assert gradients.exponent == small + 10
