"""Megatron's overlapped reduction and gather start nothing in a managed model, whatever the script asked for."""

from __future__ import annotations

import pytest

from spawned import in_own_process

pytestmark = pytest.mark.timeout(120)


def test_no_collective_starts_by_itself_once_it_is_managed() -> None:
    in_own_process(train_once)


def test_manage_says_what_takes_its_place() -> None:
    in_own_process(say)


def say() -> None:
    import os

    from msgspec.structs import replace

    from unicron.demo import model as demo
    from unicron.demo.variant import Variant
    from unicron.training import eager
    from unicron.training.chunks import Chunks
    from unicron.training.overlap import Overlap, plan_own, says, take_over
    from unicron.training.stand_ins import make_stand_ins
    from unicron.types import Layout

    layout = Layout(dp=2, micro_batch=2, num_micro_batches=4, sharded=True)
    make_stand_ins(0, layout)
    built, optimizer, _ = demo.build(layout, Variant(overlap=True))
    model = Chunks(built)
    was_on = take_over(model, optimizer)
    gather, reduce = says(model, layout, was_on, Overlap(eager.plan_of(model, layout), gathers_late=True))
    assert gather == "overlap_param_gather: unicron gathers the parameters under the next forward"
    for other, why in (
        (replace(layout, buddy=True), "copies of the shards"),
        (replace(layout, dp=1), "has all of them"),
    ):
        (line,) = says(model, other, ["overlap_param_gather"], Overlap())
        assert (
            line.startswith("overlap_param_gather off: unicron gathers the parameters behind the step") and why in line
        )
    assert reduce.startswith("overlap_grad_reduce: unicron reduces 0.8 of 0.8 MiB of gradients (6 segments) under"), (
        reduce
    )
    os.environ[eager.MIB_SETTING] = "0.5"
    plan = eager.plan_of(model, layout)
    assert plan is not None and plan.order == (1, 2, 3) and plan.nbytes <= 1 << 19
    for other, why in ((Layout(dp=1), "one replica"), (Layout(dp=2, exact=True), "exact sums")):
        assert eager.plan_of(model, other) is None
        (line,) = says(model, other, ["overlap_grad_reduce"], Overlap())
        assert line.startswith("overlap_grad_reduce off: unicron reduces after the backward") and why in line
    assert plan_own(model, optimizer, layout) == Overlap() and says(model, layout, (), Overlap()) == [], "nobody asked"
    built, optimizer, _ = demo.build(layout, Variant(overlap=True))
    assert plan_own(Chunks(built), optimizer, layout).gathers_late


def train_once() -> None:
    from unicron.training.overlap import take_over
    from unicron.training.stand_ins import make_stand_ins
    from unicron.types import Layout

    layout = Layout(dp=2, micro_batch=2, num_micro_batches=4, sharded=True)
    make_stand_ins(0, layout)
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from unicron.demo import model as demo
    from unicron.demo.variant import Variant
    from unicron.training.chunks import Chunks
    from unicron.training.data import ByteCorpus, ByteDataset

    model, optimizer, _ = demo.build(layout, Variant(overlap=True))
    started: list[str] = []
    for bucket_group in model.bucket_groups:
        bucket_group.start_grad_sync = lambda *_, **__: started.append("gradients")
        bucket_group.start_param_sync = lambda *_, **__: started.append("parameters")
    assert take_over(Chunks(model), optimizer) == ("overlap_grad_reduce", "overlap_param_gather")
    assert take_over(Chunks(model), optimizer) == ()
    model.config.finalize_model_grads_func = lambda *_, **__: None
    dataset = ByteDataset(ByteCorpus.from_stdlib(100_000), demo.SEQ_LENGTH, 2, 4)
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=demo.forward_step,
        data_iterator=iter([dataset(0, m) for m in range(2)]),
        model=[model],
        num_microbatches=2,
        seq_length=demo.SEQ_LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    assert not started, started
    assert all(float(buffer.grad_data.abs().sum()) > 0 for buffer in model.buffers)
