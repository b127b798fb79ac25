"""unicron logs: what the workers of a task wrote."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from unicron.cli.common import INT_MAX, Coordinator, Json, Keys, Problem, print_json
from unicron.runtime import log_role

FOLLOW_S = 0.2


def main(
    task: Annotated[str, typer.Argument(help="May be left out when there is one.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the logs grow.")] = False,
    rank: Annotated[int, typer.Option(min=-1, max=INT_MAX, help="Only this rank; -1: all.")] = -1,
    stream: Annotated[str, typer.Option(help="stdout, stderr or both.")] = "both",
    log_dir: Annotated[str, typer.Option(help="Where they are; else the coordinator is asked.")] = "",
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """What the workers of a task wrote, each line with its worker's incarnation and rank (its last, if it had several).

    Example: unicron logs -f gpt-small --rank 2 --stream stderr
    """
    directory = Path(log_dir) if log_dir else _ask(task, coordinator, keys)
    if task and (directory / task).is_dir():
        directory = directory / task
    if stream not in ("stdout", "stderr", "both"):
        raise Problem(f"no stream {stream!r}: stdout, stderr or both", 2)
    if not directory.is_dir():
        raise Problem(f"no logs in {directory} on this machine")
    wanted = ("stdout", "stderr") if stream == "both" else (stream,)
    if json:
        print_json({"logs": [str(p) for p in _find(directory, wanted, rank)]})
        return
    positions: dict[Path, int] = {}
    while True:
        for path in _find(directory, wanted, rank):
            _copy_new(path, directory, positions)
        if not follow:
            return
        time.sleep(FOLLOW_S)


def _ask(task: str, coordinator: str, keys: str) -> Path:
    from unicron.runtime.client import from_environment

    with from_environment(coordinator, keys) as client:
        known = [row["task"] for row in client.ask("ps")]
        if not task and len(known) != 1:
            raise Problem(f"name a task: {', '.join(known)}" if known else "no tasks", 2)
        view = client.ask("describe", task=task or known[0])
    return Path(str(view["log_dir"])) / str(view["task"])


def _find(directory: Path, streams: tuple[str, ...], rank: int) -> list[Path]:
    names = {f"{stream}.log" for stream in streams}
    found = [p for p in directory.rglob("*.log") if p.name in names]
    if rank >= 0:
        found = [p for p in found if log_role.of(p.parent) == str(rank)]
    return sorted(found, key=lambda p: (len(str(p)), str(p)))


def _copy_new(path: Path, directory: Path, positions: dict[Path, int]) -> None:
    """Whole lines only: a line that is being written waits for its end."""
    with path.open("rb") as file:
        file.seek(positions.get(path, 0))
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    positions[path] = positions.get(path, 0) + len(whole)
    folder = path.parent.relative_to(directory)
    label = f"[{folder.parent / log_role.of(path.parent)} {path.stem}] "
    for line in whole.decode(errors="replace").splitlines():
        sys.stdout.write(f"{label}{line}\n")
    sys.stdout.flush()
