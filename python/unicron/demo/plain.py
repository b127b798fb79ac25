"""The demo's script in plain processes with torchrun's environment contract: nothing supervises these.

One process imports, then forks the ranks: imports are most of such a short run. Usage, by runner.py:
python -m unicron.demo.plain WORLD_SIZE PORT LOG_FOLDER [arguments of unicron.demo.train]"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import traceback
from pathlib import Path

SCRIPT = "unicron.demo.train"


def main() -> int:
    world_size, port, logs = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    import megatron.core  # noqa: F401
    import torch

    import unicron.demo.model
    import unicron.training  # noqa: F401

    torch.set_num_threads(1)
    sys.argv = [SCRIPT, *sys.argv[4:]]
    children = [_fork(rank, world_size, port, logs / f"{rank}.log") for rank in range(world_size)]
    signal.signal(signal.SIGTERM, lambda *_: _end(children))
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children)


def _end(children: list[int]) -> None:
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _fork(rank: int, world_size: int, port: str, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        runpy.run_module(SCRIPT, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
