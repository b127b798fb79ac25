"""What a model's configuration may not be."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from unicron.training.compute import ParallelismRefused, PerTokenLossRequired, check_config, check_ddp_config
from unicron.types import Layout


@pytest.mark.parametrize(("name", "says"), [("context_parallel_size", "context")])
def test_what_cannot_be_healed_is_refused_by_name(name: str, says: str) -> None:
    config = SimpleNamespace(calculate_per_token_loss=True, **{name: 2})
    with pytest.raises(ParallelismRefused, match=f"{name} is 2: {says}") as caught:
        check_config(config)
    assert len(str(caught.value).splitlines()) == 1


def test_a_mean_of_means_is_refused_by_name() -> None:
    with pytest.raises(PerTokenLossRequired):
        check_config(SimpleNamespace(calculate_per_token_loss=False))


def test_two_stages_do_not_send_over_the_group_of_all_ranks() -> None:
    config = SimpleNamespace(
        calculate_per_token_loss=True, pipeline_model_parallel_size=2, batch_p2p_comm=False, overlap_p2p_comm=True
    )
    with pytest.raises(ParallelismRefused, match="batch_p2p_comm"):
        check_config(config)
    config.pipeline_model_parallel_size = 4
    check_config(config)


def test_sizes_of_one_are_welcome() -> None:
    check_config(SimpleNamespace(calculate_per_token_loss=True, context_parallel_size=1, expert_model_parallel_size=1))


def test_shards_that_lie_elsewhere_are_refused_by_name() -> None:
    one, two = Layout(dp=4, sharded=True), Layout(dp=4, sharded=True, instances=2)
    for name, value in (("num_distributed_optimizer_instances", 2), ("use_megatron_fsdp", True)):
        with pytest.raises(ParallelismRefused, match=name):
            check_ddp_config(SimpleNamespace(**{name: value}), one)
    check_ddp_config(SimpleNamespace(num_distributed_optimizer_instances=1, use_megatron_fsdp=False), one)
    check_ddp_config(SimpleNamespace(num_distributed_optimizer_instances=2), two)
    with pytest.raises(ParallelismRefused, match="is 1, the task's 2"):
        check_ddp_config(SimpleNamespace(), two)
