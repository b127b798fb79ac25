"""unicron nodes: machines and how they are."""

from __future__ import annotations

from unicron.cli.common import Coordinator, Json, Keys, print_json, print_table

COLUMNS = ("node", "phase", "why", "slots", "used", "tasks", "understudies", "workers", "incarnation", "store")


def main(coordinator: Coordinator = "", keys: Keys = "", json: Json = False) -> None:
    """Machines and how they are.

    Example: unicron nodes
    """
    from unicron.runtime.client import from_environment

    with from_environment(coordinator, keys) as client:
        nodes = client.ask("nodes")
    if json:
        print_json({"nodes": nodes})
    else:
        rows = ({**n, "tasks": [f"{task}:{count}" for task, count in n["tasks"].items()]} for n in nodes)
        print_table(rows, COLUMNS, "no agent has said hello yet")
