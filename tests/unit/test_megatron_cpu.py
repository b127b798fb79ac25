"""megatron-core on a machine without CUDA: every patch, once, and only there."""

from __future__ import annotations

import pytest
import torch

from unicron.training import megatron_cpu

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.is_available(), reason="patches are for machines without CUDA"),
]


@pytest.fixture(scope="module", autouse=True)
def installed():
    return megatron_cpu.install()


def test_once(installed):
    zeros, type_ = torch.zeros, torch.Tensor.type
    assert megatron_cpu.install() == installed and len(installed) == len(megatron_cpu.PATCHES)
    assert torch.zeros is zeros and torch.Tensor.type is type_


def test_nothing_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(megatron_cpu, "_installed", ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(megatron_cpu, "PATCHES", (lambda: pytest.fail("patched"),))
    assert megatron_cpu.install() == ()


def test_factories_answer_on_the_cpu():
    for made in (
        torch.zeros(2, device="cuda"),
        torch.tensor([1], device="cuda"),
        torch.empty(1, device=torch.device("cuda")),
        torch.zeros(1, device=torch.cuda.current_device()),
        torch.empty_like(torch.ones(2), device="cuda"),
    ):
        assert made.device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_type_names_and_conversion():
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1).type(torch.int64).dtype == torch.int64
    assert torch.ones(1).type("torch.DoubleTensor").dtype == torch.float64


def test_the_rng_tracker_forks_the_one_generator():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 5)
    before = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    with tracker.fork():
        second = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(first, torch.rand(3)) and not torch.equal(first, second)


def test_a_fork_that_uses_its_generator_is_not_warned_about(caplog):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 5)
    with tracker.fork():
        torch.rand(1)
    assert not caplog.records


def test_cuda_methods_and_streams_do_nothing():
    tensor, module = torch.ones(1), torch.nn.Linear(1, 1)
    assert tensor.cuda() is tensor and module.cuda() is module
    torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of megatron-core's model code
def test_the_demo_model_trains_in_one_process():
    """The whole path once: schedule, DDP buffers, clip, step; the loss falls."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    from unicron.demo import model as demo
    from unicron.training.data import ByteCorpus, ByteDataset
    from unicron.types import Layout

    layout = Layout(micro_batch=2, num_micro_batches=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model, optimizer, scheduler = demo.build(layout)
        model.config.finalize_model_grads_func = finalize_model_grads
        dataset = ByteDataset(ByteCorpus.from_stdlib(200_000), demo.SEQ_LENGTH, 2, 2)
        losses = []
        for iteration in range(20):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            done = get_forward_backward_func()(
                forward_step_func=demo.forward_step,
                data_iterator=(dataset(iteration, m) for m in range(2)),
                model=[model],
                num_microbatches=2,
                seq_length=demo.SEQ_LENGTH,
                micro_batch_size=2,
                forward_only=False,
            )
            optimizer.step()
            scheduler.step(4)  # samples
            total = sum(report["lm loss"] for report in done)
            losses.append(float(total[0] / total[1]))
        assert losses[0] > 5.2 and losses[-1] < losses[0] - 1.0
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def test_two_stages_never_take_what_goes_forward_for_what_goes_back(monkeypatch):
    """Both neighbours are one rank then (an interleaved pipeline), and gloo matches by tag, in order."""
    from megatron.core.pipeline_parallel import p2p_communication

    monkeypatch.setattr(torch.distributed, "P2POp", lambda what, tensor, rank, group, tag: (what, tensor, tag))
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", lambda ops: ops)
    named = {name: torch.zeros(1) for name in ("send_prev", "recv_prev", "send_next", "recv_next")}
    ops = p2p_communication._batched_p2p_ops(
        **{f"tensor_{name}": tensor for name, tensor in named.items()},
        group=None, prev_pipeline_rank=1, next_pipeline_rank=1,
    )  # fmt: skip
    tag = {name: next(tag for _, tensor, tag in ops if tensor is mine) for name, mine in named.items()}
    assert tag["send_next"] == tag["recv_prev"] != tag["send_prev"] == tag["recv_next"]
    none = dict.fromkeys((f"tensor_{name}" for name in named), None)
    assert p2p_communication._batched_p2p_ops(**none, group=None, prev_pipeline_rank=1, next_pipeline_rank=1) == []


def stage(rank, folder):
    """One of two stages that are each other's both neighbours: sends rank + 10 forward, rank + 20 back."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    from_prev, from_next = torch.zeros(1), torch.zeros(1)
    requests = p2p_communication._batched_p2p_ops(
        tensor_send_prev=torch.tensor([rank + 20.0]), tensor_recv_prev=from_prev,
        tensor_send_next=torch.tensor([rank + 10.0]), tensor_recv_next=from_next,
        group=dist.group.WORLD, prev_pipeline_rank=1 - rank, next_pipeline_rank=1 - rank,
    )  # fmt: skip
    for request in requests:
        request.wait()
    (folder / f"{rank}").write_text(f"{from_prev.item()} {from_next.item()}")
    dist.destroy_process_group()


def test_between_two_stages_over_gloo(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    stages = [context.Process(target=stage, args=(rank, tmp_path), daemon=True) for rank in range(2)]
    for one in stages:
        one.start()
    for one in stages:
        one.join(60)
        assert one.exitcode == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["11.0 21.0", "10.0 20.0"]
