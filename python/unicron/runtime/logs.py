"""Logs of the daemons: one line an event, to stderr or to a file, with milliseconds."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03d %(name)s %(levelname)s %(message)s"


class Once:
    """Says each thing once, however often it is asked to: a stranger must not fill the log."""

    def __init__(self, log: logging.Logger, most: int = 1000) -> None:
        self._log, self._most = log, most
        self._said: set[tuple[str, ...]] = set()

    def warn(self, about: tuple[str, ...], text: str) -> None:
        """about: what makes it the same thing. After ``most`` of them nothing new is said."""
        if about not in self._said and len(self._said) < self._most:
            self._said.add(about)
            self._log.warning("%s (said once)", text)


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
