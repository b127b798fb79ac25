"""unicron top: tasks, nodes and what the cluster earns, as it changes."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from unicron.cli import nodes, ps
from unicron.cli.common import Coordinator, Json, Keys, cost_words, print_json, print_table, sentences

TASKS = ("task", "phase", "slots", "target", "weight", "iteration", "ettr", "waf", "why")
NODES = ("node", "phase", "drained", "slots", "used", "tasks", "faults")
BARS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
BARS_MAX = 60


def main(
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option(help="One look, and end.")] = False,
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
) -> None:
    """Tasks, nodes and what the cluster earns, as it changes. With --json, or into a pipe, one look.

    Example: unicron top --every 2
    """
    from unicron.runtime.client import from_environment

    once = once or not sys.stdout.isatty()

    with from_environment(coordinator, keys) as client:
        while True:
            view = {"cluster": client.ask("cluster"), "tasks": client.ask("ps"), "nodes": client.ask("nodes")}
            if json:
                print_json(view)
                return
            if not once:
                print("\x1b[2J\x1b[H", end="")
            show(view)
            if once:
                return
            time.sleep(every)


def show(view: dict[str, Any]) -> None:
    cluster = view["cluster"]
    made, cost = cluster["allocation"], cluster["cost"]
    print(f"{cluster['used']} of {cluster['slots']} slots in use, WAF {cluster['waf']:.3g} FLOP/s {_graph(cluster)}")
    print(f"{cluster['incidents']} incidents; recovery cost in GPU-seconds: {cost_words(cost)}")
    if made["number"]:
        source = "found in the table" if made["from_table"] else "solved"
        print(f"allocation {made['number']} ({source}): {made['trigger']}: {sentences(made['reason'])}")
    print_table(map(_task, view["tasks"]), TASKS, "no tasks", narrow=ps.NARROW)
    print_table(map(nodes.row_of, view["nodes"]), NODES, "no agent has said hello yet", narrow=nodes.NARROW)


def _task(task: dict[str, Any]) -> dict[str, Any]:
    assumed = " assumed" if task["waf"] and task["waf_from"] == "assumed" else ""
    return {**ps.row_of(task), "waf": f"{task['waf']:.3g}{assumed}"}


def _graph(cluster: dict[str, Any]) -> str:
    """WAF over time: the newest changes, each as high as it was."""
    values = [waf for _, waf in cluster["waf_over_time"]][-BARS_MAX:]
    most = max(values, default=0.0)
    return "".join(BARS[round(value / most * (len(BARS) - 1))] for value in values) if most > 0 else ""
