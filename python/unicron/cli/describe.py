"""unicron describe: one task, its workers, roles and plan."""

from __future__ import annotations

from typing import Annotated

import typer

from unicron.cli.common import Coordinator, Json, Keys, print_json, print_table

COLUMNS = ("rank", "worker", "node", "purpose", "phase", "stage", "iteration", "pid")


def main(
    task: Annotated[str, typer.Argument(help="May be left out when there is one task.")] = "",
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """One task: its workers, roles and plan.

    Example: unicron describe gpt-small
    """
    from unicron.runtime.client import from_environment

    view = from_environment(coordinator, keys).ask("describe", task=task)
    if json:
        print_json(view)
        return
    layout = view["layout"]
    print(f"{view['task']}: {view['phase']}, epoch {view['epoch']}, iteration {view['iteration']}")
    print(f"command: {' '.join(view['command'])}")
    sizes = ", ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp"))
    print(f"layout: {sizes}, replicas {view['replicas']}")
    if view["cause"]:
        print(f"cause: {view['cause']}")
    workers = sorted(view["workers"], key=lambda w: (not w["is_member"], w["rank"]))
    print_table(workers, COLUMNS, "no workers")
