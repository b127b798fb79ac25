"""unicron plan: what the planner would do and why, without a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from unicron.cli.common import Json, Problem, print_json, print_table
from unicron.planner import Cluster, Planner, PlannerProblem
from unicron.planner.explain import explain
from unicron.planner.situation import EVENTS
from unicron.runtime.files import load_yaml

ALL = "all"


def main(
    cluster: Annotated[Path, typer.Argument(help="CLUSTER.yaml")],
    event: Annotated[
        list[str] | None, typer.Option(help=f"What happens: {EVENTS}; several happen at once; all: each foreseen one.")
    ] = None,
    json: Json = False,
) -> None:
    """What the planner would do and why.

    Example: unicron plan examples/cluster.yaml --event node:n1
    """
    file = load_yaml(cluster, Cluster)
    try:
        planner = Planner(file)
        questions = [(name,) for name in planner.events] if event == [ALL] else [tuple(event or ())]
        answers = [_answer(planner, events) for events in questions]
    except PlannerProblem as problem:
        raise Problem(f"{cluster}: {problem}") from None
    if json:
        print_json(answers[0] if event != [ALL] else dict(zip(planner.events, answers, strict=True)))
        return
    for events, answer in zip(questions, answers, strict=True):
        _show(file, events, answer)


def _answer(planner: Planner, events: tuple[str, ...]) -> dict[str, Any]:
    began = time.perf_counter_ns()
    planner.find(events)
    planned_in_us = (time.perf_counter_ns() - began) / 1000
    decision = planner.decision(events)
    return {
        "allocation": decision.allocation,
        "waf": decision.waf,
        "reward": decision.reward,
        "moves": msgspec.to_builtins(decision.moves),
        "reason": explain(planner, decision),
        "planned_in_us": planned_in_us,
        "from_table": decision.from_table,
        "how": decision.how,
        "unplaced": decision.unplaced,
    }


def _show(cluster: Cluster, events: tuple[str, ...], answer: dict[str, Any]) -> None:
    rows = []
    for task in cluster.tasks:
        moves = [f"{move['node']} {move['change']:+d}" for move in answer["moves"] if move["task"] == task.name]
        rows.append(
            {"task": task.name, "weight": task.weight, "slots": f"{task.current} -> {answer['allocation'][task.name]}",
             "moves": ", ".join(moves)}
        )  # fmt: skip
    print_table(rows, ["task", "weight", "slots", "moves"], "no tasks", " and ".join(events) or "as things are")
    print(answer["reason"])
    found = "found in the table" if answer["from_table"] else "solved"
    print(f"({found} in {answer['planned_in_us']:.0f} us)\n")
