"""unicron ps: tasks and how they are."""

from __future__ import annotations

from unicron.cli.common import Coordinator, Json, Keys, print_json, print_table

COLUMNS = ("task", "phase", "iteration", "epoch", "replicas", "restarts", "incidents", "cause")


def main(coordinator: Coordinator = "", keys: Keys = "", json: Json = False) -> None:
    """Tasks and how they are.

    Example: unicron ps
    """
    from unicron.runtime.client import from_environment

    tasks = from_environment(coordinator, keys).ask("ps")
    if json:
        print_json({"tasks": tasks})
    else:
        print_table(tasks, COLUMNS, "no tasks")
