"""unicron cancel: stop a task."""

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
    """Stop a task: its workers end, nothing of it is started again.

    Example: unicron cancel gpt-small
    """

    def said(_: Any) -> str:
        return f"{task} is being stopped"

    order("cancel", said, coordinator, keys, json, task=task)
