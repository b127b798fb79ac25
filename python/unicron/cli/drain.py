"""unicron drain: empty a node."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, order


def main(
    node: Annotated[str, typer.Argument(help="Its name (unicron nodes).")],
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """Empty a node: its tasks move to other slots or shrink, and nothing new comes.

    Example: unicron drain n3
    """

    def said(result: Any) -> str:
        return (
            f"{node} is being emptied of {result['workers']} workers and understudies: unicron nodes shows when it is"
        )

    order("drain", said, coordinator, keys, json, node=node)
