"""libcuda and libnccl that inject faults (tests/fakes), built once, and programs that run with them.

They stand for no GPU: what they can show is bookkeeping, error paths and who waits for whom.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "fakes"
INCLUDE = ROOT / "csrc" / "gpu" / "include"


@functools.cache
def build() -> Path:
    """The folder with the fakes; its folder `old` holds an NCCL of 2.27."""
    for name, folder, extra in (
        ("cuda", FOLDER, ()), ("nccl", FOLDER, ()), ("nccl", FOLDER / "old", ("-DFAKE_NCCL_OLD",)),
    ):  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        source = ROOT / "tests" / "fakes" / f"{name}.cc"
        library = folder / f"lib{name}.so.{1 if name == 'cuda' else 2}"
        newest = max(path.stat().st_mtime for path in (source, *INCLUDE.rglob("*.h")))
        if library.exists() and library.stat().st_mtime > newest:
            continue
        fresh = library.with_suffix(f".{os.getpid()}")
        command = ["c++", "-std=c++17", "-shared", "-fPIC", "-O1", "-pthread", *extra, "-I", str(INCLUDE)]
        subprocess.run([*command, str(source), "-o", str(fresh)], check=True, timeout=100)
        fresh.replace(library)
    return FOLDER


def run(program: str, *, old_nccl: bool = False, **environment: str) -> str:
    """Runs Python with the fakes in the place of the real libraries; its output. A failing program fails the test."""
    folder = build()
    path = f"{folder / 'old'}:{folder}" if old_nccl else str(folder)
    result = subprocess.run(
        [sys.executable, "-c", "from unicron import _core\n" + textwrap.dedent(program)],
        env={**os.environ, "LD_LIBRARY_PATH": path, **environment},
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
