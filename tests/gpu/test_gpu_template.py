"""Workers are forked from a process that has imported everything: it must not have started CUDA."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import importlib, os, sys
for name in "torch,megatron.core,unicron.training,unicron.demo.model,unicron.demo.record".split(","):
    importlib.import_module(name)
import torch
assert not torch.cuda.is_initialized(), "an import initialised CUDA"
assert torch.cuda.is_available()
child = os.fork()
if child == 0:
    try:
        assert float(torch.ones(3, device="cuda").sum()) == 3.0
    except BaseException as error:
        print(f"forked worker: {error!r}", file=sys.stderr)
        os._exit(1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_worker_can_use_its_gpu() -> None:
    environment = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=110
    )
    assert result.returncode == 0, result.stderr[-3000:]
