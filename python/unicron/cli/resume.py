"""unicron resume: a suspended task wants slots again."""

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
    """A suspended task wants slots again, in the order of its priority and age, and goes on where it stood.

    Example: unicron resume gpt-small
    """
    from unicron.runtime.client import from_environment

    result = from_environment(coordinator, keys).ask("resume", task=task)
    if json:
        print_json({"task": task, "result": result})
    else:
        print(f"{task} wants slots again: unicron describe {task}")
