"""The logs of a `unicron run` make room for those of the next one of the same name, as its journal does."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def make_room(logs: Path, task: str) -> tuple[int, Path | None]:
    """(a descriptor to hold for the life of the run, where the logs of the run before are now: LOGS/TASK-1, -2, ...).

    Another run of this name that lives and writes there keeps its folder, and shares it with this one.
    """
    own = logs / ".unicron"
    own.mkdir(parents=True, exist_ok=True)
    held = os.open(own / f"{task}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return held, None
    folder = logs / task
    if not any(folder.rglob("std*.log")):
        return held, None
    number = 1
    while (logs / f"{task}-{number}").exists():
        number += 1
    return held, folder.rename(logs / f"{task}-{number}")
