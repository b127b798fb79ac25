"""A whole iteration of the real model without peers: every role's forward, backward and step, with finite numbers."""

from __future__ import annotations

import pytest

from spawned import in_own_process

LAYOUTS = {
    "first and last stage": ((1, 2, 2), (0, 3)),
    "tensor parallel": ((2, 1, 2), (1,)),
    "whole": ((1, 1, 4), (2,)),
}


def _warm_up_all_roles() -> None:
    import torch

    from unicron.demo import model as demo
    from unicron.training.chunks import Chunks
    from unicron.training.data import ByteCorpus, ByteDataset
    from unicron.training.memory import StateMemory
    from unicron.training.sandbox import Sandbox
    from unicron.training.stand_ins import drop_stand_ins, make_stand_ins
    from unicron.types import Layout

    empty = torch.empty
    for (tp, pp, dp), ranks in LAYOUTS.values():
        layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=2, num_micro_batches=2 * dp)
        dataset = ByteDataset(ByteCorpus.from_stdlib(100_000), demo.SEQ_LENGTH, 2, 2 * dp, 1)
        for rank in ranks:
            make_stand_ins(rank, layout)
            model, optimizer, scheduler = demo.build(layout)
            chunks = Chunks(model)
            memory = StateMemory(chunks, optimizer, 1 << 20)
            sandbox = Sandbox(rank, layout, (chunks, optimizer, scheduler), memory)
            beats: list[int] = []
            sandbox.run(demo.forward_step, dataset, lambda beats=beats: beats.append(1))
            assert sandbox.missed == {}, (layout, rank, sandbox.missed)
            assert set(sandbox.seconds) == {"compute", "tie", "step"} and sandbox.is_finite, (layout, rank)
            if pp == 1 or layout.coords(rank)[2] == 0:
                assert sandbox.num_micro_batches == len(beats) == 2, (layout, rank)
            drop_stand_ins()
    assert torch.empty is empty, "only the sandbox sees zeros"


@pytest.mark.timeout(120)
def test_every_role_does_a_whole_iteration_without_peers() -> None:
    in_own_process(_warm_up_all_roles)
