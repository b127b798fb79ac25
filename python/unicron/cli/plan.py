"""unicron plan: what the planner would do and why, with a cluster or without."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, Problem, print_json, print_table, sentences
from unicron.planner import Cluster, Planner, PlannerProblem
from unicron.planner.situation import EVENTS
from unicron.runtime.files import load_yaml
from unicron.runtime.what_if import ALL, answer


def main(
    cluster: Annotated[Path | None, typer.Argument(help="CLUSTER.yaml; without it the running cluster.")] = None,
    event: Annotated[
        list[str] | None, typer.Option(help=f"What happens: {EVENTS}; several happen at once; all: each foreseen one.")
    ] = None,
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """What the planner would do and why: with a file for that cluster, else for the one that runs.

    Example: unicron plan examples/cluster.yaml --event node:n1
    """
    words = tuple(event or ())
    if cluster is None:
        from unicron.runtime.client import from_environment

        with from_environment(coordinator, keys) as client:
            found = client.ask("plan", events=words)
            names = {row["task"]: row for row in client.ask("ps")}
    else:
        file = load_yaml(cluster, Cluster)
        try:
            planner = Planner(file)
            found = {name: answer(planner, (name,)) for name in planner.events} if words == (ALL,) else None
            found = found or answer(planner, words)
        except PlannerProblem as problem:
            raise Problem(f"{cluster}: {problem}") from None
        names = {task.name: {"weight": task.weight, "target": task.current} for task in file.tasks}
    if json:
        print_json(found)
        return
    for events, one in found.items() if words == (ALL,) else [(" and ".join(words), found)]:
        _show(names, events, one)


def _headline(events: str) -> str:
    if not events:
        return "What the planner would do now, if nothing else happened:"
    return f"{events}  ({'; '.join(map(meaning, events.split(' and ')))})"


def meaning(event: str) -> str:
    """What happens, in words."""
    kind, _, name = event.partition(":")
    task, _, node = name.partition("@")
    words = {
        "slot": f"task {task} loses a slot, on {node or 'the node where it has most'}",
        "process": f"a process of task {task} dies, its slot is whole",
        "finish": f"task {task} is done",
        "node": f"node {name} is lost with all its slots",
        "join": f"a new node of {name} slots comes" if name.isdecimal() else f"node {name} comes back whole",
        "standby": "a standby is lost",
    }
    return words.get(kind, "")


def _show(tasks: dict[str, dict[str, Any]], events: str, answer: dict[str, Any]) -> None:
    rows = []
    for name, slots in answer["allocation"].items():
        moves = [f"{move['node']} {move['change']:+d}" for move in answer["moves"] if move["task"] == name]
        task = tasks[name]
        rows.append(
            {"task": name, "weight": task["weight"], "slots": f"{task['target']} -> {slots}", "moves": ", ".join(moves)}
        )
    print(_headline(events))
    print_table(rows, ["task", "weight", "slots", "moves"], "no tasks")
    print(sentences(answer["reason"]))
    found = "found in the table" if answer["from_table"] else "solved"
    print(f"({found} in {answer['planned_in_us']:.0f} us)\n")
