"""unicron drain: empty a node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, Problem, print_json

if TYPE_CHECKING:
    from unicron.runtime.client import CoordinatorClient

LOOK_S = 0.5


def main(
    node: Annotated[str, typer.Argument(help="Its name (unicron nodes).")],
    wait: Annotated[float, typer.Option(help="Seconds to wait at most until no slot of it is used.")] = 0.0,
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """Empty a node: its tasks move to other slots or shrink, and nothing new comes.

    Example: unicron drain n3 --wait 600
    """
    from unicron.runtime.client import from_environment

    if not 0 <= wait < float("inf"):
        raise Problem(f"--wait {wait:g}: give seconds, 0 or more", 2)
    with from_environment(coordinator, keys) as client:
        # To wait again is no mistake, to drain again is one.
        is_drained = wait > 0 and any(row["drained"] for row in client.ask("nodes") if row["node"] == node)
        result: Any = None if is_drained else client.ask("drain", node=node)
        used = _used_after(client, node, wait) if wait else None
    if json:
        print_json({"node": node, "result": result, "used": used})
    elif used is None:
        print(
            f"{node} is being emptied of {result['workers']} workers and understudies: unicron nodes shows when it is"
        )
    elif not used:
        print(f"{node} is empty: no slot of it is used")
    if used:
        raise Problem(f"{node} still has {used} used slots after {wait:g} s: unicron nodes; it goes on being emptied")


def _used_after(client: CoordinatorClient, node: str, wait_s: float) -> int:
    """Its used slots, once there are none or the time is over."""
    deadline = time.monotonic() + wait_s
    while True:
        used = next((row["used"] for row in client.ask("nodes") if row["node"] == node), 0)
        left_s = deadline - time.monotonic()
        if not used or left_s <= 0:
            return int(used)
        time.sleep(min(LOOK_S, left_s))
