"""unicron drain: empty a node."""

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
    """Empty a node: its tasks move to other slots or shrink, and nothing new comes.

    Example: unicron drain n3
    """
    from unicron.runtime.client import from_environment

    result = from_environment(coordinator, keys).ask("drain", node=node)
    if json:
        print_json({"node": node, "result": result})
    else:
        print(f"{node} is being emptied of {result['workers']} workers: unicron nodes shows when it is")
