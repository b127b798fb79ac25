"""Dropout's random numbers belong to the micro-batch: the same for whoever computes it, in whatever order."""

from __future__ import annotations

import pytest

from spawned import in_own_process

pytestmark = pytest.mark.timeout(120)


def test_numbers_belong_to_the_micro_batch_and_the_role() -> None:
    in_own_process(draw)


def draw() -> None:
    import torch
    from megatron.core import tensor_parallel

    from unicron.training.randomness import Randomness
    from unicron.training.stand_ins import make_stand_ins
    from unicron.types import Layout

    layout = Layout(tp=2, pp=2, dp=1, num_micro_batches=4)
    make_stand_ins(0, layout)
    tensor_parallel.model_parallel_cuda_manual_seed(7)
    torch.manual_seed(7)
    roles = {rank: Randomness(rank, layout) for rank in range(layout.world_size)}

    def numbers(rank: int, iteration: int, micro_batch: int) -> tuple[float, float]:
        """Outside and inside a tensor-parallel region."""
        with roles[rank].kept():
            roles[rank].begin(iteration, micro_batch)
            with tensor_parallel.get_cuda_rng_tracker().fork():
                inside = float(torch.rand(()))
            return float(torch.rand(())), inside

    first = {(i, m): numbers(0, i, m) for i in range(3) for m in range(4)}
    again = {key: numbers(0, *key) for key in reversed(first)}
    assert again == first, "the order of computing does not matter"
    assert len(set(first.values())) == len(first)
    outside, inside = zip(*(numbers(rank, 1, 2) for rank in range(4)), strict=True)
    assert outside[0] == outside[1] and outside[2] == outside[3] and outside[0] != outside[2], "tp ranks draw the same"
    assert len(set(inside)) == 4, "but inside a tensor-parallel region they do not"

    torch.manual_seed(3)
    undisturbed = [float(torch.rand(())) for _ in range(3)]
    torch.manual_seed(3)
    disturbed = []
    for number in range(3):
        disturbed.append(float(torch.rand(())))
        numbers(0, 5, number)
    assert disturbed == undisturbed, "the script's own numbers go on"
