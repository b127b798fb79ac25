"""unicron ps: tasks and how they are."""

from __future__ import annotations

from typing import Any

from unicron.cli.common import Coordinator, Json, Keys, Wide, print_json, print_table

COLUMNS = ("task", "phase", "priority", "weight", "slots", "target", "iteration", "epoch", "incidents", "ettr", "why")
NARROW = {name: name for name in ("task", "phase", "slots", "iteration", "incidents", "ettr", "why")}
NARROW["slots"] = "slots_of_target"


def main(coordinator: Coordinator = "", keys: Keys = "", json: Json = False, wide: Wide = False) -> None:
    """Tasks and how they are.

    Example: unicron ps
    """
    from unicron.runtime.client import from_environment

    with from_environment(coordinator, keys) as client:
        tasks = client.ask("ps")
    if json:
        print_json({"tasks": tasks})
    else:
        print_table(map(row_of, tasks), COLUMNS, "no tasks", narrow=NARROW, wide=wide)


def row_of(task: dict[str, Any]) -> dict[str, Any]:
    ettr = "-" if task["ettr"] is None else f"{task['ettr']:.3f}"
    held = f"{task['slots']}/{task['target']}"
    why = task["cause"] or task["leaving"] or task["why"]
    return {**task, "ettr": ettr, "slots_of_target": held, "why": why}
