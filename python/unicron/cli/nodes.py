"""unicron nodes: machines and how they are."""

from __future__ import annotations

from typing import Any

from unicron.cli.common import Coordinator, Json, Keys, Wide, print_json, print_table

COLUMNS = (
    "node",
    "phase",
    "why",
    "slots",
    "used",
    "tasks",
    "understudies",
    "workers",
    "incarnation",
    "store",
    "network",
)
NARROW = {name: name for name in ("node", "phase", "slots", "used", "tasks", "why")}


def main(coordinator: Coordinator = "", keys: Keys = "", json: Json = False, wide: Wide = False) -> None:
    """Machines and how they are.

    Example: unicron nodes
    """
    from unicron.runtime.client import from_environment

    with from_environment(coordinator, keys) as client:
        nodes = client.ask("nodes")
    if json:
        print_json({"nodes": nodes})
    else:
        print_table(map(row_of, nodes), COLUMNS, "no agent has said hello yet", narrow=NARROW, wide=wide)


def row_of(node: dict[str, Any]) -> dict[str, Any]:
    return {
        **node,
        "drained": "yes" if node["drained"] else "no",
        "tasks": [f"{task}:{count}" for task, count in node["tasks"].items()],
        "network": network_words(node.get("control_network"), node.get("state_network")),
    }


def network_words(control: dict[str, Any] | None, state: dict[str, Any] | None) -> str:
    """One name where both go the same way."""
    if control is None or state is None:
        return "-"  # its agent is older than the choice
    name, other = (each["interface"] or each["address"] for each in (control, state))
    return name if name == other else f"{name}, state {other}"
