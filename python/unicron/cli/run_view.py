"""What `unicron run` shows: the workers' lines, incidents as they happen, and where the task is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status

from unicron.coordinator.lifecycle import ALL_EXITED, ALL_FINISHED
from unicron.runtime import log_role
from unicron.runtime.runner import Result, Watch

LINES_PER_LOOK_MAX = 2000


class RunView:
    def __init__(self, log_dir: Path, *, quiet: bool, to_stderr: bool) -> None:
        """Workers' stdout goes to stdout, unless that is kept for JSON; the rest goes to stderr."""
        self._log_dir = log_dir
        self._quiet = quiet
        self._stdout = sys.stderr if to_stderr else sys.stdout
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        # What lies there from an earlier run is not this one's output.
        self._positions = {path: path.stat().st_size for path in self._logs()}

    def watch(self) -> Watch:
        return Watch(
            self._state, self._incident, lambda name: self.say(f"{name} started again"), unjoined=self._unjoined
        )

    def _unjoined(self, seconds: float) -> None:
        self.say(f"the workers run for {seconds:.0f} s, and not all have called unicron.join(): waiting for them")

    def say(self, text: str) -> None:
        self._console.print(f"unicron: {text}", markup=False)

    def _state(self, row: dict[str, Any]) -> None:
        self._show_lines()
        if self._status is not None:
            where = f"iteration {row['iteration']}" if row["iteration"] >= 0 else ""
            self._status.update(f"{row['task']} {row['phase']} {where} epoch {row['epoch']}")

    def _incident(self, incident: dict[str, Any]) -> None:
        root = incident["root"]
        place = f"rank {root['rank']} on {root['node']}" if root["rank"] >= 0 else root["node"]
        what = f"{incident['id']} {incident['severity']}: {incident['fault']}{f' ({place})' if place else ''}"
        if incident["outcome"] is None:
            self.say(what)
            return
        cost = f", {incident['lost_ms']:.0f} ms lost" if incident["lost_ms"] else ""
        cause = f": {incident['cause']}" if incident["cause"] else ""
        self.say(f"{what} {incident['outcome']}{cost}{cause}")
        for transfer in incident["transfers"]:
            if transfer["slow"]:
                self.say(f"warning: state came slowly: {transfer['words']}")

    def _logs(self) -> list[Path]:
        return sorted(self._log_dir.rglob("std*.log")) if self._log_dir.is_dir() else []

    def _show_lines(self) -> None:
        if self._quiet:
            return
        for path in self._logs():
            start = self._positions.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                data = file.read(1 << 20)
            whole = data[: data.rfind(b"\n") + 1]
            self._positions[path] = start + len(whole)
            if not whole:
                continue
            role = log_role.of(path.parent)
            stream = self._stdout if path.stem == "stdout" else sys.stderr
            for line in whole.decode(errors="replace").splitlines()[-LINES_PER_LOOK_MAX:]:
                stream.write(f"[{role}] {line}\n")
            stream.flush()

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        self._show_lines()

    def summary(self, result: Result) -> None:
        counts: dict[str, int] = {}
        for incident in result.incidents:
            outcome = incident["outcome"] or "open"
            counts[outcome] = counts.get(outcome, 0) + 1
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        self.say(
            f"{result.task} {result.outcome} after {result.seconds:.1f} s"
            f"{f'; incidents: {told}' if told else ''}; logs in {self._log_dir}"
        )
        if result.cause not in (ALL_FINISHED, ALL_EXITED):
            self.say(f"cause: {result.cause}")
