"""A scheduler goes back to a state, whatever it counted since."""

from __future__ import annotations

import pytest
import torch

from spawned import in_own_process

pytestmark = pytest.mark.timeout(120)


def test_megatrons_scheduler_is_restored_from_wherever_it_stands() -> None:
    in_own_process(restore_twice)


def restore_twice() -> None:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    from unicron.training.scheduler import advance_scheduler, restore_scheduler
    from unicron.types import Layout

    layout = Layout(micro_batch=2, num_micro_batches=4)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1.0, min_lr=0.0, lr_warmup_steps=160, lr_decay_steps=1000,
        lr_decay_style="linear", start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant",
    )  # fmt: skip
    for _ in range(3):
        advance_scheduler(scheduler, layout)
    state, rate = dict(scheduler.state_dict()), optimizer.param_groups[0]["lr"]
    assert 0.0 < rate < 1.0
    for _ in range(2):
        advance_scheduler(scheduler, layout)
        restore_scheduler(scheduler, state)
        assert (scheduler.num_steps, optimizer.param_groups[0]["lr"]) == (24, rate)


def test_a_scheduler_of_torch() -> None:
    from unicron.training.scheduler import advance_scheduler, restore_scheduler
    from unicron.types import Layout

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    advance_scheduler(scheduler, Layout())
    state = dict(scheduler.state_dict())
    advance_scheduler(scheduler, Layout())
    restore_scheduler(scheduler, state)
    assert scheduler.last_epoch == 1
    advance_scheduler(None, Layout())
