"""What people see while the demo runs: one live line, and a line for whatever fails and heals.

On a terminal the line is redrawn in place (rich); elsewhere a line is printed every few iterations,
so that a log of the demo can be read too. Everything goes to stderr: stdout is for the results."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.status import Status

WIDTH = 160  # where no terminal says how wide it is
LINE_EVERY = 10  # iterations, where nothing can be redrawn


def make_console() -> Console:
    width = None if sys.stderr.isatty() else WIDTH
    return Console(stderr=True, highlight=False, soft_wrap=True, width=width)


class Progress:
    """The watch's listener and the suite's narrator."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or make_console()
        self._status: Status | None = None
        self._name, self._total = "", 0
        self._iteration, self._loss = -1, 0.0
        self._members, self._waiting = 0, 0
        self._news = ""
        self._began = 0.0

    # ---------------------------------------------------------------- the suite

    def begins(self, name: str, says: str, iterations: int) -> None:
        self._name, self._total = name, iterations
        self._iteration, self._loss, self._news = -1, 0.0, ""
        self._began = time.monotonic()
        self.console.print(f"[bold]{name}[/]  {escape(says)}")
        if self.console.is_terminal:
            self._status = self.console.status("starting")
            self._status.start()

    def ends(self, result: dict[str, Any] | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        took = f"{time.monotonic() - self._began:.1f} s"
        if result is None:
            loss = f", loss {self._loss:.3f}" if self._iteration >= 0 else ""
            self.console.print(f"  finished after {took}{loss}")
        elif result["passed"]:
            self.console.print(f"  [green]as it must be:[/] {result['outcome']}, {took}")
        else:
            self.console.print(f"  [red]not as it must be[/] ({result['outcome']}, {took}):")
            for reason in result["reasons"]:
                self.console.print(f"    {escape(reason)}")

    # ---------------------------------------------------------------- the watch

    def moved(self, iteration: int, loss: float) -> None:
        crossed = iteration // LINE_EVERY != self._iteration // LINE_EVERY
        self._iteration, self._loss = iteration, loss
        if self._status is None and crossed and self._name:
            self.console.print(f"  {self._line()}")
        self._redraw()

    def workers(self, members: int, waiting: int) -> None:
        self._members, self._waiting = members, waiting
        self._redraw()

    def happened(self, text: str) -> None:
        self._news = text
        if self._name:
            self.console.print(f"  {escape(text)}")
        self._redraw()

    def incident(self, incident: dict[str, Any]) -> None:
        self.happened(describe(incident))

    def _redraw(self) -> None:
        if self._status is not None:
            self._status.update(self._line())

    def _line(self) -> str:
        place = f"iteration {self._iteration + 1}/{self._total}"
        loss = f"loss {self._loss:.3f}" if self._iteration >= 0 else "starting"
        workers = f"{self._members} workers + {self._waiting} waiting"
        news = f"  {escape(self._news)}" if self._news and self._status is not None else ""
        return f"{place}  {loss}  {workers}{news}"


def describe(incident: dict[str, Any]) -> str:
    """One incident in one line, as it stands."""
    root = incident["root"]
    place = root["node"] if root["rank"] < 0 else f"rank {root['rank']} on {root['node']}"
    text = f"{incident['severity']} {incident['fault']}: {place}"
    if incident.get("cause"):
        text += f" ({incident['cause']})"
    if incident.get("detect_ms") is not None:
        text += f", seen after {incident['detect_ms']:.1f} ms by {incident['method']}"
    if incident.get("outcome") is None:
        return text
    text += f"; {incident['outcome']}"
    if incident.get("resume_ms") is not None and incident["outcome"] in ("healed", "resized"):
        text += f" {incident['resume_ms']:.0f} ms after the fault"
    again = incident.get("micro_batches_recomputed") or 0
    if again:
        text += f", {again} micro-batches computed again"
    if incident.get("iterations_lost"):
        text += f", {incident['iterations_lost']} iterations lost"
    return text
