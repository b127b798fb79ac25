"""Megatron's overlapped reduction and gather start nothing in a managed model, whatever the script asked for."""

from __future__ import annotations

import pytest

from spawned import in_own_process

pytestmark = pytest.mark.timeout(120)


def test_no_collective_starts_by_itself_once_it_is_managed() -> None:
    in_own_process(train_once)


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
