"""Faults by name, and what cannot be done to this machine."""

from __future__ import annotations

import pytest
import torch

from unicron.faults.kinds import FaultKind, fault_kind
from unicron.training import gpu


def test_every_fault_has_a_number_of_its_own() -> None:
    assert {fault_kind(kind.name.lower()) for kind in FaultKind} == set(FaultKind.__members__.values())
    assert len(FaultKind) == len(FaultKind.__members__)
    with pytest.raises(ValueError, match="memory"):
        fault_kind("illegal")


def test_an_illegal_access_without_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"fault memory .* has none"):
        gpu.access_illegally(torch.device("cpu"))
