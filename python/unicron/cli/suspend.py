"""unicron suspend: a task saves, leaves its slots, and keeps its place."""

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
    """A task saves, leaves its slots, and keeps its place. Nothing that was committed is lost.

    Example: unicron suspend gpt-small
    """

    def said(_: Any) -> str:
        return f"{task} saves and leaves its slots: unicron resume {task} lets it go on"

    order("suspend", said, coordinator, keys, json, task=task)
