"""unicron undrain: use a drained node again."""

from __future__ import annotations

from typing import Annotated

import typer

from unicron.cli.common import Coordinator, Json, Keys, print_json


def main(
    node: Annotated[str, typer.Argument(help="Its name (unicron nodes).")],
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """Use a drained node again.

    Example: unicron undrain n3
    """
    from unicron.runtime.client import from_environment

    result = from_environment(coordinator, keys).ask("undrain", node=node)
    if json:
        print_json({"node": node, "result": result})
    else:
        print(f"{node} is in use again")
