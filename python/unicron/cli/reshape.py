"""unicron reshape: a running task goes over to another layout, in memory."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from unicron.cli.common import INT_MAX, Coordinator, Json, Keys, order

SIZE = re.compile(r"[0-9]{1,10}")


def main(
    task: Annotated[str, typer.Argument(help="Its name (unicron ps).")],
    layout: Annotated[str, typer.Argument(help="tp,pp,dp; one of those that its job file lists as layouts.")],
    optimizer: Annotated[str, typer.Option(help="plain or distributed; left out: as it is.")] = "",
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """A running task goes over to another layout, in memory: no checkpoint is read, no iteration is lost.

    `unicron describe` lists the layouts that it may take, with estimated times, and what changes have cost.

    Example: unicron reshape gpt-small 2,1,2
    """
    sizes = layout.split(",")
    if len(sizes) != 3 or not all(SIZE.fullmatch(size.strip()) and 0 < int(size) <= INT_MAX for size in sizes):
        raise typer.BadParameter(f"layout {layout!r}: give tp,pp,dp, each from 1 to {INT_MAX}, for example 2,1,2")
    wanted = dict(zip(("tp", "pp", "dp"), map(int, sizes), strict=True))
    if optimizer not in ("", "plain", "distributed"):
        raise typer.BadParameter(f"optimizer {optimizer!r}: plain or distributed")
    if optimizer:
        wanted["sharded"] = int(optimizer == "distributed")

    def said(result: Any) -> str:
        return f"{task} goes over to {layout}; about {result['estimated_s']:.3g} s between two iterations"

    order("reshape", said, coordinator, keys, json, task=task, layout=wanted)
