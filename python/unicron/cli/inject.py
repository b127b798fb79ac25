"""unicron inject: a fault, exactly there."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unicron.cli.common import INT_MAX, Coordinator, Json, Keys, Problem, print_json
from unicron.faults.kinds import ALIASES, FaultKind, FaultPoint

FAULTS = tuple(kind.name.lower() for kind in FaultKind)
POINTS = (*ALIASES, *(point.name.lower() for point in FaultPoint))


def main(
    fault: Annotated[str, typer.Argument(help=", ".join(FAULTS))],
    task: Annotated[str, typer.Option(help="Never guessed: a fault must not hit a stranger's task.")],
    rank: Annotated[int, typer.Option(min=0, max=INT_MAX, help="The role whose worker it hits.")] = 0,
    iteration: Annotated[int, typer.Option(min=-1, max=INT_MAX, help="-1: the next time it passes.")] = -1,
    point: Annotated[str, typer.Option(help=", ".join(POINTS))] = "now",
    micro_batch: Annotated[
        int, typer.Option(min=-1, max=INT_MAX, help="-1: any. In the reduction the segment's number.")
    ] = -1,
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """Arm a fault in a worker, which then does it to itself exactly there.

    Example: unicron inject kill --task gpt-small --rank 2 --iteration 30 --point reduce
    """
    from unicron.runtime.client import from_environment

    for name, value, known in (("fault", fault, FAULTS), ("point", point, POINTS)):
        if value not in known:
            raise Problem(f"no {name} {value!r}; known: {', '.join(known)}", 2)
    where = {"iteration": iteration, "point": point, "micro_batch": micro_batch}
    arguments: dict[str, Any] = {"task": task, "rank": rank, "fault": fault, **where}
    with from_environment(coordinator, keys) as client:
        client.ask("inject", **arguments)
    if json:
        print_json({"task": task, "rank": rank, "fault": fault, **where})
    else:
        print(f"{fault} is armed in rank {rank} of {task}")
