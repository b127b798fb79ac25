"""unicron submit: give a job to the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unicron.cli.common import Coordinator, Json, Keys, print_json


def main(
    job: Annotated[Path, typer.Argument(help="JOB.yaml")],
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """Give a job to the cluster.

    Example: unicron submit job.yaml
    """
    from unicron.runtime.client import from_environment
    from unicron.runtime.job_file import load_job

    wish = load_job(job)
    result = from_environment(coordinator, keys).ask("submit", job=wish)
    if json:
        print_json({"task": wish["name"], "result": result})
    else:
        print(f"{wish['name']} is admitted: unicron describe {wish['name']}")
