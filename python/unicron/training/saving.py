"""When to save and from where to restore: the session's side of training/checkpoint.py.

Saves name the number of committed steps, so the iteration to go on with is the name's own number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unicron.training import checkpoint

CLOSE_S_MAX = 60.0


class Saving:
    def __init__(
        self, directory: str, every: int, state: tuple[Any, Any, Any], own: Callable[[], dict[str, Any]]
    ) -> None:
        """state: model, optimizer, scheduler. own: what unicron keeps beside them, plain values."""
        self._state, self._own = state, own
        self._every = every if directory else 0
        self._directory = directory
        self._saver = checkpoint.Saver(directory) if self._every else None
        self._last = -1
        self._epoch = 0  # of the newest save

    def is_due(self, iteration: int) -> bool:
        return self._saver is not None and self._every > 0 and (iteration + 1) % self._every == 0

    def save_if_due(self, iteration: int, epoch: int) -> bool:
        """After the step of `iteration`. The epoch names this attempt: every rank of it computes the same tag."""
        if self._saver is None or not self.is_due(iteration):
            return False
        self._save(self._saver, iteration, epoch)
        return True

    def save_again_if_due(self, iteration: int, epoch: int) -> bool:
        """Nothing follows this iteration, and a recovery came after its save was begun: parts may be missing, and an
        heir's always are."""
        if self._saver is None or not self.is_due(iteration) or (self._last, self._epoch) == (iteration, epoch):
            return False
        self._save(self._saver, iteration, epoch)
        return True

    def save_missing(self, iteration: int, epoch: int) -> None:
        """The own part of a save that the others made in this epoch, in which this rank's predecessor was lost."""
        if self._saver is None or not self.is_due(iteration):
            return
        if iteration + 1 not in map(checkpoint.iteration_of, checkpoint.complete(self._directory)):
            self._save(self._saver, iteration, epoch)

    def save_last(self, iteration: int, epoch: int) -> None:
        """The task leaves its slots after this iteration: saved whether it is due or not, unless it just was."""
        if self._saver is None:
            self._saver = checkpoint.Saver(self._directory)
        if self._last != iteration:
            self._save(self._saver, iteration, epoch)

    def _save(self, saver: checkpoint.Saver, iteration: int, epoch: int) -> None:
        self._look_for_recovery(saver, epoch)
        saver.save(iteration + 1, *self._state, extra=self._own(), tag=f"e{epoch}")
        self._last = iteration

    def _look_for_recovery(self, saver: checkpoint.Saver, epoch: int) -> None:
        if epoch != self._epoch:
            saver.interrupt()
            self._epoch = epoch

    def poll(self) -> tuple[int, str] | None:
        """(iteration, path) of a checkpoint that became complete since the last call."""
        if self._saver is None:
            return None
        done = [r for r in self._saver.poll() if r.complete]
        return (done[-1].iteration, str(done[-1].path)) if done else None

    def finish(self, epoch: int) -> tuple[int, str] | None:
        """Waits for what was begun, and is complete yet; epoch: of the newest plan."""
        if self._saver is None:
            return None
        self._look_for_recovery(self._saver, epoch)
        self._saver.close(CLOSE_S_MAX)
        return self.poll()

    def load(self, path: str) -> tuple[int, dict[str, Any]]:
        """(the iteration to go on with, what `own` gave when it was saved)."""
        found = checkpoint.load(path, *self._state)
        return int(found["iteration"]), found["extra"]
