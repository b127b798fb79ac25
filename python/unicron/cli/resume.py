"""unicron resume: a suspended task wants slots again."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, order


def main(
    task: Annotated[str, typer.Argument(help="Its name (unicron ps).")],
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """A suspended task wants slots again, in the order of its priority and age, and goes on where it stood.

    Example: unicron resume gpt-small
    """

    def said(_: Any) -> str:
        return f"{task} wants slots again: unicron describe {task}"

    order("resume", said, coordinator, keys, json, task=task)
