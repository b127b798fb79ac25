"""The simulator: a sample of seeds is good, planted mistakes are found, and a seed's history is always the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from unicron.sim.plants import PLANTS
from unicron.sim.run import options_of, run_seed

SAMPLE = range(1000, 1016)


@pytest.mark.parametrize("seed", SAMPLE)
def test_seed(seed: int) -> None:
    result = run_seed(seed)
    assert result.is_good, f"{result.violations[0]}\nreplay: python -m unicron.sim --seed {seed}"


@pytest.mark.parametrize(
    ("plant", "seed"), [("keep-healthy-cross-group", 1), ("tie-after-reduce", 17), ("no-confirm", 53)]
)
def test_planted_hang_is_found(plant: str, seed: int) -> None:
    """As what it is: nobody advances until a bound runs out. Without the plant the same faults are healed."""
    result = run_seed(seed, plant)
    assert any("nobody advanced" in v or "no progress" in v for v in result.violations), result.violations
    options = options_of(seed, plant)
    options.plant = ""
    assert run_seed(seed, "", options).is_good


def test_every_plant_is_tested() -> None:
    assert set(PLANTS) == {"keep-healthy-cross-group", "tie-after-reduce", "no-confirm"}


def test_same_seed_same_history() -> None:
    """To the byte, also in another process with another hash seed."""
    program = "from unicron.sim.run import run_seed; print(run_seed(7).digest, run_seed(11).digest)"
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=50,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1
    first, second = runs.pop().split()
    assert first != second
    assert run_seed(7).digest == first


def test_history_is_kept_on_demand() -> None:
    options = options_of(7)
    options.keep_log = True
    assert len(run_seed(7, "", options).lines) > 20
    assert not run_seed(7).lines
