"""unicron coordinator: a cluster's decider."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    config: Annotated[Path, typer.Argument(help="CONFIG.yaml: listen, keys, journal or etcd, metrics, machine.")],
    copy_from: Annotated[
        Path | None,
        typer.Option(help="Copy this journal (SQLite, its coordinator ended) into CONFIG's etcd, and end."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> int:
    """A cluster's decider. It may die and come back: its journal tells it what it had decided.

    With etcd in CONFIG there may be several: one decides, the others wait to take over. To move from SQLite to etcd:
    end the coordinator, add etcd to CONFIG, --copy-from its journal, start as many as wanted, and give agents all
    addresses (docs/OPERATION.md).

    Example: unicron coordinator cluster.yaml
    """
    from unicron.runtime import logs
    from unicron.runtime.coordinator_daemon import copy_journal, run
    from unicron.runtime.coordinator_settings import CoordinatorSettings
    from unicron.runtime.files import load_yaml

    settings = load_yaml(config, CoordinatorSettings)
    logs.set_up(verbose=verbose)
    if copy_from is None:
        return run(settings)
    count = copy_journal(settings, copy_from)
    print(f"copied {count} entries of {copy_from} into etcd; start the coordinators with {config}")
    return 0
