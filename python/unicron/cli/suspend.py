"""unicron suspend: a task saves, leaves its slots, and keeps its place."""

from __future__ import annotations

from typing import Annotated

import typer

from unicron.cli.common import Coordinator, Json, Keys, print_json


def main(
    task: Annotated[str, typer.Argument(help="Its name (unicron ps).")],
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """A task saves, leaves its slots, and keeps its place. Nothing that was committed is lost.

    Example: unicron suspend gpt-small
    """
    from unicron.runtime.client import from_environment

    result = from_environment(coordinator, keys).ask("suspend", task=task)
    if json:
        print_json({"task": task, "result": result})
    else:
        print(f"{task} saves and leaves its slots: unicron resume {task} lets it go on")
