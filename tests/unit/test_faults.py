"""Faults by name, and what cannot be done to this machine."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from unicron import _core
from unicron.faults.kinds import FaultKind, fault_kind
from unicron.training import gpu


def test_every_fault_has_a_number_of_its_own() -> None:
    assert {fault_kind(kind.name.lower()) for kind in FaultKind} == set(FaultKind.__members__.values())
    assert len(FaultKind) == len(FaultKind.__members__)
    with pytest.raises(ValueError, match="memory"):
        fault_kind("illegal")


def test_what_spins_computes_until_it_is_killed() -> None:
    code = "from unicron.faults.perform import perform; print('.', flush=True); perform(16, 'here')"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        before = _core.process_activity(process.pid)
        deadline = time.monotonic() + 20
        while (now := _core.process_activity(process.pid)) and before and time.monotonic() < deadline:
            if now[0] - before[0] > 50_000_000:
                break
            time.sleep(0.02)
        assert process.poll() is None and before and now and now[0] - before[0] > 50_000_000
        process.kill()


def test_an_illegal_access_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"fault memory .* has none"):
        gpu.access_illegally(torch.device("cpu"))
