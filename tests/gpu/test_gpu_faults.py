"""The fault `memory` on a real GPU: what a worker then sees, and what it cannot do any more."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from unicron.diagnosis import diagnose_text
from unicron.training import gpu

torch.cuda.set_device(0)
kept = torch.ones(4, device="cuda")
try:
    gpu.access_illegally(torch.device("cuda", 0))
except RuntimeError as error:
    assert "illegal memory access" in str(error), error
    print(type(error).__name__, "category", diagnose_text(str(error)).category)
try:
    kept.sum().item()
except RuntimeError as error:
    print("lost:", str(error).splitlines()[0], flush=True)
import os
os._exit(0)
"""


def test_an_illegal_access_loses_the_context() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=90
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "illegal_memory" in done.stdout and "lost:" in done.stdout
