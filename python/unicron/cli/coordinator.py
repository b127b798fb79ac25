"""unicron coordinator: a cluster's decider."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def main(
    config: Annotated[Path, typer.Argument(help="CONFIG.yaml: listen, keys, journal, machine.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> int:
    """A cluster's decider. It may die and come back: its journal tells it what it had decided.

    Example: unicron coordinator cluster.yaml
    """
    from unicron.runtime import logs
    from unicron.runtime.coordinator_process import CoordinatorProcess, CoordinatorSettings
    from unicron.runtime.files import load_yaml

    settings = load_yaml(config, CoordinatorSettings)
    logs.set_up(verbose=verbose)
    return CoordinatorProcess(settings).run()
