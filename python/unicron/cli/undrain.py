"""unicron undrain: use a drained node again."""

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
    """Use a drained node again.

    Example: unicron undrain n3
    """

    def said(result: Any) -> str:
        return str(result.get("why") or f"{node} is in use again")

    order("undrain", said, coordinator, keys, json, node=node)
