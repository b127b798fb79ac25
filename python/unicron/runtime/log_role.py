"""Whose log a folder is. It is named after the role that its worker was started for; an understudy may get another."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = "role"
ERROR_FILE_SETTING = "TORCHELASTIC_ERROR_FILE"  # it lies beside the logs


def say(rank: int) -> None:
    """This worker's role from here on. Without a log folder there is nothing to say."""
    place = os.environ.get(ERROR_FILE_SETTING, "")
    if place:
        with contextlib.suppress(OSError):
            new = Path(place).with_name(f"{FILE}.new")
            new.write_text(str(rank), encoding="utf-8")
            new.rename(new.with_name(FILE))


def of(folder: Path) -> str:
    try:
        return (folder / FILE).read_text(encoding="utf-8")
    except OSError:
        return folder.name
