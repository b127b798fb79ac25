"""Cleans up after a local cluster whose owner was killed: waits for the owner's end, then leaves
nothing behind.

    python -m unicron.runtime.janitor DIRECTORY < lifeline

Its standard input is a pipe that only the owner holds open. An owner that stops its cluster
properly has done all of this already, and the janitor finds nothing to do.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from unicron.runtime import processes

ORDERLY_S = 2.0  # daemons see the same pipe's end and leave by themselves


def main() -> None:
    directory = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    processes.end_all(directory, ORDERLY_S)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
