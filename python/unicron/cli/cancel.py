"""unicron cancel: stop a task."""

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
    """Stop a task: its workers end, nothing of it is started again.

    Example: unicron cancel gpt-small
    """
    from unicron.runtime.client import from_environment

    result = from_environment(coordinator, keys).ask("cancel", task=task)
    if json:
        print_json({"task": task, "result": result})
    else:
        print(f"{task} is being stopped")
