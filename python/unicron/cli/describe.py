"""unicron describe: one task, its workers, roles and plan."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, cost_words, print_json, print_table, sentences

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

    with from_environment(coordinator, keys) as client:
        view = client.ask("describe", task=task)
    if json:
        print_json(view)
        return
    layout = view["layout"]
    print(f"{view['task']}: {view['phase']}, epoch {view['epoch']}, iteration {view['iteration']}")
    if view["cause"]:
        print(f"cause: {view['cause']}")
    print(f"command: {' '.join(view['command'])}")
    sizes = ", ".join(f"{name} {layout[name]}" for name in ("tp", "pp", "dp"))
    print(f"layout: {sizes}, replicas {view['replicas']}")
    spent = ", ".join(f"{kind} {seconds:.1f} s" for kind, seconds in view["spent_s"].items())
    ettr = "-" if view["ettr"] is None else f"{view['ettr']:.4f}"
    print(f"ETTR {ettr}; {spent}")
    print(f"recovery cost in GPU-seconds: {cost_words(view['cost'])}")
    workers = sorted(view["workers"], key=lambda w: (not w["is_member"], w["rank"]))
    print_table(workers, COLUMNS, "no workers")
    _print_decision(view)
    _print_layouts(view)


def _print_decision(view: dict[str, Any]) -> None:
    """Why it has the slots that it has."""
    print(f"slots: {view['slots']} now, {view['target']} decided; {view['why']}")
    print(f"priority {view['priority']}, weight {view['weight']:g}")
    allocation = view["allocation"]
    print(f"{allocation['trigger']}: {sentences(allocation['reason'])}")
    earned = ", ".join(
        f"{slots} slots {flops:.3g} FLOP/s ({view['throughput_from'][slots]})"
        for slots, flops in view["throughput"].items()
    )
    print(f"throughput: {earned}")


def _print_layouts(view: dict[str, Any]) -> None:
    """What it may be brought into (unicron reshape), and what that has cost."""
    for other in view["layouts"]:
        name = ",".join(str(other[size]) for size in ("tp", "pp", "dp")) + " distributed" * other["sharded"]
        fits = "" if other["fits"] else "; its slots are not there now"
        print(f"could go over to {name}: about {other['estimated_s']:.3g} s ({other['basis']}){fits}")
    for move in view["layout_changes"][-1:]:
        moved = (move["bytes_node"] + move["bytes_cross"]) / 2**20
        print(f"last change of layout: {move['from']} -> {move['to']}, {move['held_s']:.3g} s, {moved:.3g} MiB moved")
    if view["wide"] != view["layout"]:
        print(
            f"narrower than asked for, until there are slots again: dp {view['layout']['dp']} of {view['wide']['dp']}"
        )
    if view["guests"]:
        guests = ", ".join(f"{rank} on {node}" for rank, node in view["guests"].items())
        print(f"guests, beside the slots, until it is narrower or there are slots: ranks {guests}")
    if view["layout_change_refused"]:
        print(f"a change of layout was called off: {view['layout_change_refused']}")
