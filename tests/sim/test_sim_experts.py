"""Histories with experts spread over lanes, and with sums that fit no scale: nothing in them is special to a seed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from unicron.sim.options import Options
from unicron.sim.run import options_of, run_seed
from unicron.types import Layout

SAMPLE = range(1, 17)
SHAPES = ((1, 1, 2), (1, 1, 3), (1, 2, 2), (2, 1, 2), (1, 1, 1))  # tp, pp, replicas
LANES = 2


def with_lanes(seed: int) -> Options | None:
    """The seed's own history, at a layout with lanes; None of a seed that has several tasks."""
    options = options_of(seed)
    if len(options.tasks) > 1:
        return None
    stream = random.Random(f"{seed}/lanes")
    tp, pp, replicas = stream.choice(SHAPES)
    sets = replicas * stream.randint(1, 4) + stream.randint(0, 1)
    (task,) = options.tasks
    layout = Layout(
        tp=tp, pp=pp, dp=replicas * LANES, ep=LANES, num_micro_batches=sets * LANES, sharded=task.layout.sharded
    )
    task = replace(task, layout=layout, overflows=0.15)
    return replace(options, tasks=(task,), num_nodes=replicas + task.standbys, slots=layout.replica_size)


@pytest.mark.timeout(120)
def test_lanes_and_repeats() -> None:
    tried = 0
    for seed in SAMPLE:
        options = with_lanes(seed)
        if options is not None:
            result = run_seed(seed, "", options)
            assert result.is_good, f"seed {seed}: {result.violations[0]}"
            tried += 1
    assert tried >= len(SAMPLE) // 2


def test_a_commit_is_of_one_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes one try's commit for another's steps with sums that fit no scale: it is found."""
    from unicron.healing import resolve

    monkeypatch.setattr(
        resolve, "rolls_forward",
        lambda record, commit: commit is not None and record.has_state and record.iteration == commit.iteration,
    )  # fmt: skip
    monkeypatch.setattr("unicron.healing.machine.rolls_forward", resolve.rolls_forward)
    for seed in range(1, 61):
        options = options_of(seed)
        if len(options.tasks) == 1:
            options = replace(options, tasks=(replace(options.tasks[0], overflows=0.3),))
            if not run_seed(seed, "", options).is_good:
                return
    raise AssertionError("not found")
