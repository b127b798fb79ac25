"""The GPU checks on GPUs that are fit: each answers, and answers ok or says what this model lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.runtime.checks.check import Answer, Look, known_checks
from unicron.runtime.checks.supervise import look_with


@pytest.mark.parametrize("name", ["gpu_memory_errors", "gpu_remapped_rows", "gpu_nvlink", "gpu_pcie", "gpu_throttling"])
def test_nvml(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pynvml")
    result = look_with(known_checks()[name], Look(tmp_path))
    assert result.answer is not Answer.BAD, result.reason


@pytest.mark.parametrize("name", ["gpu_product", "gpu_memory"])
def test_compute(name: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    result = look_with(known_checks()[name], Look(tmp_path))
    assert result.answer is Answer.OK, result.reason


def test_peers(two_gpus: None, tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    result = look_with(known_checks()["gpu_peers"], Look(tmp_path))
    assert result.answer is Answer.OK, result.reason
