"""A node whose network is cut while its processes live: known, healed without it, and it comes back."""

import json
import subprocess
import sys

import pytest

from unicron.demo import cut_network


@pytest.mark.timeout(150)
def test_a_cut_off_node_is_lost_and_comes_back() -> None:
    if problem := cut_network.lacks():
        pytest.skip(problem)
    command = [sys.executable, "-m", "unicron.demo.cut_network", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=140)
    assert done.returncode == 0, done.stderr
    (seen,) = json.loads(done.stdout)["rounds"]
    assert 0 < seen["suspect_ms"] <= seen["lost_ms"] <= seen["resumed_ms"]
