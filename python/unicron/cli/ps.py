"""unicron ps: tasks and how they are."""

from __future__ import annotations

from typing import Any

from unicron.cli.common import Coordinator, Json, Keys, print_json, print_table

COLUMNS = ("task", "phase", "priority", "weight", "slots", "target", "iteration", "epoch", "incidents", "ettr", "why")


def main(coordinator: Coordinator = "", keys: Keys = "", json: Json = False) -> None:
    """Tasks and how they are.

    Example: unicron ps
    """
    from unicron.runtime.client import from_environment

    with from_environment(coordinator, keys) as client:
        tasks = client.ask("ps")
    if json:
        print_json({"tasks": tasks})
    else:
        print_table(map(row_of, tasks), COLUMNS, "no tasks")


def row_of(task: dict[str, Any]) -> dict[str, Any]:
    ettr = "-" if task["ettr"] is None else f"{task['ettr']:.3f}"
    return {**task, "ettr": ettr, "why": task["cause"] or task["leaving"] or task["why"]}
