"""unicron keys: the CURVE key pairs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unicron.cli.common import Json, print_json


def main(
    directory: Annotated[Path, typer.Argument(help="Where to put them (made, 0700).")] = Path("keys"),
    replace: Annotated[
        bool, typer.Option(help="Make new ones over existing ones: everybody needs them again.")
    ] = False,
    json: Json = False,
) -> None:
    """Make the key pairs of a cluster: coordinator, agent, client, worker.

    Example: unicron keys /etc/unicron/keys
    """
    from unicron.runtime.keys import make_directory

    pairs = make_directory(directory, replace=replace)
    if json:
        print_json({"directory": str(directory), **{r: p.public for r, p in pairs.items()}})
        return
    for role, pair in pairs.items():
        print(f"{directory / role}.key  {pair.public}")
    print("Agents need agent.key, worker.key and coordinator.pub;")
    print("command lines need client.key and coordinator.pub.")
