"""A real megatron-core GPT on a real local cluster: a seeded sample of the demo's scenarios at every layout.

Each scenario's own verdict is the test: outcome, severity, digest equal to the undisturbed run's, gradient, counts of
micro-batches, nothing left behind.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from unicron.demo import runner, scenarios
from unicron.demo.progress import Progress
from unicron.demo.variant import Variant

SEED = 2024
SAMPLE = 1  # besides the one that is always run at this layout
# What once failed at just that layout: in-replica groups at the start, a hang in confirm, growing back with tp or pp.
ALWAYS = {"1,1,4": ("checkpoint",), "2,1,2": ("kill-commit",), "1,2,2": ("kill-reduce", "kill-end", "kill-rest")}
QUICK = tuple(name for name in scenarios.in_all() if name not in ("coordinator", "checkpoint", "fatal"))


def sample(layout: str) -> tuple[str, ...]:
    drawn = random.Random(f"{SEED} {layout}").sample([n for n in QUICK if n not in ALWAYS[layout]], SAMPLE)
    return (*ALWAYS[layout], *drawn)


def judge(layout: str, optimizer: str, names: tuple[str, ...], folder: Path, **script: Any) -> None:
    tp, pp, dp = map(int, layout.split(","))
    sizes = runner.layout_of(tp, pp, dp, sharded=optimizer == "distributed")
    options = runner.Options(sizes, folder=folder, measure_unmanaged=False, variant=Variant(**script))
    with runner.Suite(options, Progress()) as suite:
        wrong = {
            outcome.result["scenario"]: outcome.result["reasons"]
            for outcome in suite.run(names)
            if not outcome.result["passed"]
        }
    again = f"unicron demo --scenario {','.join(wrong)} --layout {layout} --optimizer {optimizer} --report {folder}"
    assert not wrong, f"{wrong}\nreplay: {again}"


@pytest.mark.timeout(420)
@pytest.mark.parametrize("layout", ALWAYS)
def test_scenarios_end_as_they_must(layout: str, tmp_path: Path) -> None:
    judge(layout, "plain", sample(layout), tmp_path)


@pytest.mark.timeout(420)
def test_a_distributed_optimizer_loses_nothing_but_to_a_lost_node(tmp_path: Path) -> None:
    """Its shards have no copy: an open step is undone and finished, shards are gathered again, a node costs the
    iterations since the checkpoint. Dropout's masks are those of the micro-batches, and gradients are reduced under the
    backward, as the script asks."""
    judge("2,1,2", "distributed", ("kill-step", "kill-gather", "node-lost"), tmp_path, overlap=True, dropout=0.1)


@pytest.mark.timeout(300)
def test_roles_of_a_drained_node_move_while_it_trains(tmp_path: Path) -> None:
    judge("1,1,2", "plain", ("drain",), tmp_path)
