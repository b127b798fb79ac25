"""unicron incidents: what failed, why, what was decided, what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, Problem, cost_words, print_json, print_table

COLUMNS = (
    "id",
    "task",
    "severity",
    "fault",
    "root",
    "method",
    "outcome",
    "detect_ms",
    "decide_ms",
    "resume_ms",
    "lost_ms",
    "cost_gpu_s",
    "cause",
)


def main(
    incident: Annotated[str, typer.Argument(metavar="[ID]", help="One incident in full.")] = "",
    task: Annotated[str, typer.Option(help="Only those of this task.")] = "",
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", help="Of a `unicron run` that is over; or a coordinator's journal.db.")
    ] = None,
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """What failed, why, what was decided, what it cost.

    Example: unicron incidents i3
    Example: unicron incidents --log-dir unicron-logs
    """
    from unicron.runtime.client import from_environment

    if log_dir is not None:
        found = kept_incidents(log_dir, incident, task)
    else:
        with from_environment(coordinator, keys) as client:
            found = client.ask("incidents", id=incident, task=task)
    if json:
        print_json({"incidents": found})
    elif incident:
        show(found[0])
    else:
        print_table(map(row_of, found), COLUMNS, "no incidents", "detect, decide, resume: ms since the fault")


def kept_incidents(place: Path, incident: str, task: str) -> list[dict[str, Any]]:
    """Of a journal whose coordinator has ended."""
    from unicron.runtime.kept_journal import find_journal, read_state
    from unicron.runtime.requests import incidents_view
    from unicron.runtime.what_if import RequestProblem

    state, now_ms = read_state(find_journal(place))
    try:
        return incidents_view(state, now_ms, task=task, id=incident)
    except RequestProblem as problem:
        raise Problem(str(problem)) from None


def row_of(incident: dict[str, Any]) -> dict[str, Any]:
    root = incident["root"]
    place = root["node"] if root["rank"] < 0 else f"{root['node']} rank {root['rank']}"
    cost = incident["cost"]["total_gpu_s"]
    return {**incident, "root": place, "outcome": incident["outcome"] or "open", "cost_gpu_s": cost}


def show(incident: dict[str, Any]) -> None:
    for name, value in row_of(incident).items():
        if name == "cost":
            value = cost_words(value)
        if name not in ("timeline", "text", "cost_gpu_s") and value not in ("", None):
            print(f"{name.replace('_', ' '):>26}  {value}")
    if incident["text"]:
        print(f"{'text':>26}  {incident['text']}")
    start = incident["timeline"][0][0] if incident["timeline"] else 0.0
    for at_ms, text in incident["timeline"]:
        print(f"{at_ms - start:>23.1f} ms  {text}")
