"""Experts spread over lanes: which ranks are one replica, what is refused, and that routing can be done again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from spawned import in_own_process
from unicron.coordinator.job import Job, refusal_of
from unicron.healing.buddies import holder_of, ward_of
from unicron.healing.machine import HealingMachine
from unicron.runtime.files import FileProblem
from unicron.runtime.job_file import world_layout
from unicron.training.compute import ParallelismRefused, check_config
from unicron.types import EpochPlan, Layout, Member, PlanKind, WaitKind

LAYOUT = Layout(tp=2, pp=2, dp=6, ep=2, num_micro_batches=12)


def test_a_replica_is_so_many_neighbouring_dp_indices() -> None:
    """Megatron's order is tp-cp-ep-dp-pp, so that a stage's lanes are neighbours, and stages lie apart."""
    assert LAYOUT.num_replicas == 3 and LAYOUT.replica_size == 8 and LAYOUT.world_size == 24
    assert LAYOUT.replica_ranks(1) == (4, 5, 6, 7, 16, 17, 18, 19)
    for replica in range(LAYOUT.num_replicas):
        ranks = LAYOUT.replica_ranks(replica)
        assert [LAYOUT.position_of(rank) for rank in ranks] == [*range(LAYOUT.replica_size)]
        assert {LAYOUT.replica_of(rank) for rank in ranks} == {replica}
    assert LAYOUT.peers(5) == (1, 5, 9) and LAYOUT.dense_peers(5) == (1, 3, 5, 7, 9, 11)
    assert [LAYOUT.lane_of(rank) for rank in (4, 5, 6, 7, 18)] == [0, 0, 1, 1, 1]


def test_megatron_means_the_same_ranks() -> None:
    in_own_process(groups_of_megatron)


def groups_of_megatron() -> None:
    from megatron.core import parallel_state

    from unicron.training.stand_ins import drop_stand_ins, make_stand_ins

    for rank in (0, 5, 18):
        make_stand_ins(rank, LAYOUT)
        lanes: Any = parallel_state.get_expert_model_parallel_group()
        copies: Any = parallel_state.get_expert_data_parallel_group()
        dense: Any = parallel_state.get_data_parallel_group()
        assert {LAYOUT.replica_of(r) for r in lanes.ranks} == {LAYOUT.replica_of(rank)} and len(lanes.ranks) == 2
        assert copies.ranks == LAYOUT.peers(rank) and dense.ranks == LAYOUT.dense_peers(rank)
        assert LAYOUT.wait_kind(lanes.ranks) is WaitKind.WORLD and LAYOUT.wait_kind(copies.ranks) is WaitKind.DP
        drop_stand_ins()


def test_micro_batches_are_dealt_in_sets() -> None:
    machine = HealingMachine(16, LAYOUT, 1)  # replica 1, second stage, lane 0
    assert machine.replica == 1 and LAYOUT.num_sets == 6
    machine.loop_iteration = 0
    action = machine._compute_own((0, 1, 2), "")
    assert action.micro_batches == (2, 3)  # type: ignore[union-attr]


def test_a_buddy_is_the_same_lane_of_another_replica() -> None:
    layout = Layout(dp=6, ep=2, num_micro_batches=6, sharded=True, buddy=True)
    members = tuple(Member(rank, f"n{layout.replica_of(rank)}", f"w{rank}") for rank in range(6))
    plan = EpochPlan("t", 1, PlanKind.START, layout, (0, 1, 2), members)
    assert [holder_of(plan, rank) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert all(ward_of(plan, holder_of(plan, rank)) == rank for rank in range(6))
    assert structs.replace(layout, dp=2, sharded=False).steps_undoably, "one replica holds each expert once"


MIXTURE = {
    "calculate_per_token_loss": True, "num_moe_experts": 4, "tensor_model_parallel_size": 2,
    "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2, "moe_router_load_balancing_type": "aux_loss",
    "moe_router_enable_expert_bias": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("expert_tensor_parallel_size", 1), ("moe_router_enable_expert_bias", True),
        ("moe_router_load_balancing_type", "global_aux_loss"), ("moe_token_dispatcher_type", "flex"),
        ("moe_router_load_balancing_type", ["seq_aux_loss", "global_aux_loss"]),
    ],
)  # fmt: skip
def test_what_depends_on_other_replicas_or_on_the_past_is_refused_by_name(name: str, value: Any) -> None:
    check_config(SimpleNamespace(**MIXTURE))
    with pytest.raises(ParallelismRefused, match=name) as caught:
        check_config(SimpleNamespace(**{**MIXTURE, name: value}))
    assert len(str(caught.value).splitlines()) == 1
    check_config(SimpleNamespace(**{**MIXTURE, name: value, "num_moe_experts": None}))


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (Layout(dp=3, ep=2, num_micro_batches=6), "dp 3 is no multiple of ep 2"),
        (Layout(dp=2, ep=2, num_micro_batches=3), "no multiple of ep 2: the lanes"),
        (Layout(dp=4, ep=2, num_micro_batches=2), "2 micro-batches do not reach 4 lanes"),
        (Layout(dp=2, cp=2, num_micro_batches=2), "cp 2 must be 1"),
    ],
)
def test_a_job_that_cannot_be_spread_so_is_refused(layout: Layout, says: str) -> None:
    assert says in refusal_of(Job("j", ("python",), layout))


def test_widths_are_whole_replicas() -> None:
    layout = Layout(dp=4, ep=2, num_micro_batches=8)
    assert refusal_of(Job("j", ("python",), layout, replicas_min=2)) == ""
    assert "outside 0 to 2 replicas" in refusal_of(Job("j", ("python",), layout, replicas_min=3))
    changed = Job("j", ("python",), layout, layouts=(layout,))
    assert "with ep above 1 a running task keeps its layout" in refusal_of(changed)
    assert world_layout(8, 2, 1, 1, 0, ep=2) == Layout(tp=2, dp=4, ep=2, num_micro_batches=16)
    with pytest.raises(FileProblem, match="tp 1 x pp 1 x ep 4: use a multiple of 4"):
        world_layout(6, 1, 1, 1, 0, ep=4)


def test_routing_done_again_gives_the_same_bits() -> None:
    in_own_process(route_twice)


def route_twice() -> None:
    """With as many equal scores as one likes: where all tokens are the same, all experts' scores are, too."""
    import torch

    from unicron.demo import model as demo
    from unicron.demo.variant import Variant
    from unicron.training import megatron_cpu
    from unicron.training.chunks import Chunks
    from unicron.training.compute import Computation
    from unicron.training.data import ByteCorpus, ByteDataset
    from unicron.training.stand_ins import make_stand_ins

    megatron_cpu.install()
    layout = Layout(dp=1, micro_batch=2, num_micro_batches=4)
    make_stand_ins(0, layout)
    built, optimizer, _ = demo.build(layout, Variant(experts=4))
    model = Chunks(built)
    for name, param in model.named_parameters():
        if name.endswith("router.weight"):
            param.data[1:] = param.data[:1]  # all experts alike
    computation = Computation(model, layout, torch.zeros(4, dtype=torch.float64))
    dataset = ByteDataset(ByteCorpus.from_stdlib(100_000), demo.SEQ_LENGTH, 2, 4)

    def sums(micro_batches: tuple[int, ...]) -> torch.Tensor:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        computation.run(0, micro_batches, demo.forward_step, dataset, lambda micro_batch: None)
        return torch.cat([buffer.grad_data for buffer in model.buffers + model.expert_parallel_buffers]).clone()

    once = sums((2,))
    sums((0, 3))
    assert torch.equal(sums((2,)), once) and once.abs().sum() > 0
    apart = sums((0,)) + sums((1,))
    assert torch.allclose(sums((0, 1)), apart, rtol=1e-4, atol=1e-5), "also of the loss that balances experts"


def test_a_script_that_spreads_experts_otherwise_than_the_task_is_refused() -> None:
    in_own_process(build_otherwise)


def build_otherwise() -> None:
    import torch

    from unicron.demo import model as demo
    from unicron.demo.variant import Variant
    from unicron.training import megatron_cpu
    from unicron.training.chunks import Chunks
    from unicron.training.compute import Computation
    from unicron.training.stand_ins import make_stand_ins

    megatron_cpu.install()
    layout = Layout(dp=4, ep=2, num_micro_batches=4)
    make_stand_ins(0, layout)
    model = Chunks(demo.build(layout, Variant(experts=4))[0])
    with pytest.raises(ParallelismRefused, match="expert_model_parallel_size is 2, the task's ep 1"):
        Computation(model, structs.replace(layout, ep=1), torch.zeros(4, dtype=torch.float64))
