"""Logs of the daemons: one line an event, to stderr or to a file, with milliseconds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03d %(name)s %(levelname)s %(message)s"


def set_up(path: Path | None = None, *, verbose: bool = False) -> None:
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger("unicron")
    root.handlers[:] = [handler]
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    root.propagate = False
