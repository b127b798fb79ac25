"""A worker's GPU paths (arena slabs, NCCL groups, settling) as a whole, on a machine without a GPU.

See tests/support/pretend_gpu.py for what is pretended. What a GPU does is tested by tests/gpu.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from unicron.demo.watch import failures

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="torch has NCCL; tests/gpu is for that")
FOLDER = Path(__file__).resolve().parents[1] / "gpu"
SCRIPT, MOVES = FOLDER / "managed.py", FOLDER / "moves.py"


@pytest.mark.timeout(240)
def test_killed_workers_are_replaced_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--pretend", "--layout", "1,1,2", "--cases", "kill-reduce,kill-step",
               "--iterations", "16", "--at", "8", "--folder", str(tmp_path)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=220)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = [json.loads(line) for line in (tmp_path / "managed.jsonl").read_text().splitlines()]
    sources = {run["case"]: [incident["state_source"] for incident in failures(run["incidents"])] for run in runs}
    # A state torn in the step is never used: it comes from the replica; the other lies in the dead worker's arena.
    assert sources == {"reference": [], "kill-reduce": ["own_arena"], "kill-step": ["replica"]}
    said = "".join(path.read_text() for path in tmp_path.rglob("stdout.log"))
    assert "adopted 1 slabs, marked True" in said


@pytest.mark.timeout(240)
def test_who_dies_under_the_backward_is_replaced_bit_for_bit(tmp_path: Path) -> None:
    """Three slots, and a place for each segment that is reduced there."""
    command = [sys.executable, str(SCRIPT), "--pretend", "--overlap", "--layout", "1,1,2", "--cases",
               "kill-eager-inside", "--iterations", "12", "--at", "6", "--folder", str(tmp_path)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=220)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MiB of gradients (" in "".join(path.read_text() for path in tmp_path.rglob("stderr.log"))


@pytest.mark.timeout(240)
def test_a_lost_node_is_waited_for_where_nobody_can_be_a_guest(tmp_path: Path) -> None:
    """One GPU a node, and the coordinator was not told that it has any."""
    command = [sys.executable, str(SCRIPT), "--pretend", "--sharded", "--instances", "2", "--layout", "1,1,2",
               "--cases", "node-now", "--iterations", "30", "--at", "8", "--folder", str(tmp_path)]  # fmt: skip
    environment = {**os.environ, "PRETEND_GPUS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=220)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.timeout(240)
def test_a_role_moves_to_another_gpu_and_back_bit_for_bit(tmp_path: Path) -> None:
    command = [sys.executable, str(MOVES), "--pretend", "--layout", "1,1,2", "--cases", "all", "--moves", "2",
               "--iterations", "120", "--timeout", "100", "--folder", str(tmp_path)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=220)
    assert result.returncode == 0, result.stdout + result.stderr
    said = "".join(path.read_text() for path in tmp_path.rglob("stdout.log"))
    assert said.count("a group stands beside those in use") == 2 * 4  # of each move: two pairs' ends, a group of two
