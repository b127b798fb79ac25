"""Builds the C++ unit tests (tests/cpp) and runs them: the layers without Python."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cpp-tests"


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


@pytest.mark.timeout(600)  # the first time it compiles the core
def test_cpp() -> None:
    assert shutil.which("cmake"), "cmake is missing: pip install cmake"
    run(
        "cmake", "-S", str(ROOT), "-B", str(BUILD), "-G", "Ninja", "-DUNICRON_BUILD_TESTS=ON",
        "-DUNICRON_BUILD_PYTHON=OFF", "-DUNICRON_CUDA=OFF",
    )  # fmt: skip
    run("cmake", "--build", str(BUILD), "-j", "2")
    output = run("ctest", "--test-dir", str(BUILD), "--output-on-failure")
    assert "100% tests passed" in output


@pytest.mark.timeout(120)
def test_cuda_on_without_a_compiler_is_refused(tmp_path: Path) -> None:
    """UNICRON_CUDA=ON insists; a wrong value names the right ones."""
    common = ("cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", "-DUNICRON_BUILD_PYTHON=OFF")
    for setting, why in (
        (("-DUNICRON_CUDA=ON", "-DCMAKE_CUDA_COMPILER=NOTFOUND"), "no working CUDA compiler was found"),
        (("-DUNICRON_CUDA=maybe",), "give AUTO, ON or OFF"),
    ):
        result = subprocess.run((*common, *setting), capture_output=True, text=True, check=False, timeout=100)
        assert result.returncode != 0
        assert why in " ".join(result.stderr.split())
