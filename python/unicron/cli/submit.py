"""unicron submit: give a job to the cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

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
    from unicron.runtime.job_file import doubt_of, load_job, refuse_missing_script

    read = load_job(job)  # what is wrong with the file is said without a coordinator, too
    refuse_missing_script(read)
    if doubt := doubt_of(read):
        print(f"unicron submit: {job}: command: {doubt}", file=sys.stderr)
    with from_environment(coordinator, keys, adds_tasks=True) as client:
        wish = load_job(job, gpu=str(client.ask("ping").get("gpu", "")))
        result = client.ask("submit", job=wish)
        name = result["task"]
        row: dict[str, Any] = next((row for row in client.ask("ps") if row["task"] == name), {})
    if json:
        print_json({"task": name, "result": result, "slots": row.get("target", 0), "why": row.get("why", "")})
    else:
        print(f"{name} is admitted ({row.get('why', '')}): unicron describe {name}")
