"""unicron incidents: what failed, why, what was decided, what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from unicron.cli.common import Coordinator, Json, Keys, Problem, Wide, cost_words, print_json, print_table

COLUMNS = (
    "id",
    "task",
    "severity",
    "fault",
    "root",
    "method",
    "outcome",
    "detect_ms",
    "decide_ms",
    "resume_ms",
    "lost_ms",
    "cost_gpu_s",
    "cause",
)
NARROW = {name: name for name in ("id", "task", "severity", "fault", "root", "outcome")}
NARROW |= {"resume": "resume_ms", "lost": "lost_ms", "cause": "cause"}
# Beside the fields with a line of their own; cost has the total.
APART = ("timeline", "text", "cost_gpu_s", "phases_ms", "transfers")
TOLD_AT_ZERO = ("lost_ms", "iterations_lost", "micro_batches_recomputed")
SINCE_THE_FAULT = {
    "detect_ms": "-  (when it happened is not known, times count from when it was seen)",
    "decide_ms": "-  (nothing had to be decided)",
    "resume_ms": "-  (not resumed)",
}
WIDTH = 26  # of the names
# The training loop's actions while it heals (healing/actions.py), in their usual order.
PHASES = {
    "AwaitPlan": "waits for the coordinator's plan: who is lost, who takes the role",
    "RebuildInside": "makes the groups inside the wounded replica again",
    "ExchangeInside": "the replica's members say how far they are",
    "Compute": "computes micro-batches, those of the lost worker again",
    "Tie": "sums gradients inside the replica (tied embeddings)",
    "RebuildCross": "makes the groups between replicas again, where all meet",
    "ExchangeWorld": "all ranks say how far they are",
    "FetchState": "takes parameters and optimizer state from another replica or a buddy",
    "GoBack": "goes back to a shard that was kept",
    "LoadCheckpoint": "loads the last checkpoint",
    "Reduce": "sums gradients between replicas",
    "Commit": "all ranks agree that the iteration is whole",
    "Confirm": "the replica's members agree on what the commit said",
    "Step": "the optimizer writes the parameters",
    "Gather": "every replica's shard of the parameters goes to the others",
    "FinishGather": "those that were still under way when the loop ended are waited for",
    "Repeat": "sums that fit no scale are given up (exact mode)",
    "Settle": "the replica's members agree that the gathering ended well",
}
UNITS = (
    "detect, decide, resume: ms since the fault, or since it was seen where nobody knows when that was (detect: -);\n"
    "lost: ms beyond a usual iteration; -: not known, or it did not come to that"
)
OVER = "for a run that is over: --log-dir FOLDER"


def main(
    incident: Annotated[str, typer.Argument(metavar="[ID]", help="One incident in full.")] = "",
    task: Annotated[str, typer.Option(help="Only those of this task.")] = "",
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", help="Of a `unicron run` that is over; or a coordinator's journal.db.")
    ] = None,
    coordinator: Coordinator = "",
    keys: Keys = "",
    json: Json = False,
    wide: Wide = False,
) -> None:
    """What failed, why, what was decided, what it cost.

    Example: unicron incidents i3

    Example: unicron incidents --log-dir unicron-logs
    """
    from unicron.runtime.client import CoordinatorSilent, from_environment
    from unicron.runtime.keys import KeyProblem

    if log_dir is not None:
        found = kept_incidents(log_dir, incident, task)
    else:
        try:
            with from_environment(coordinator, keys) as client:
                found = client.ask("incidents", id=incident, task=task)
        except (CoordinatorSilent, KeyProblem) as problem:
            text = str(problem)
            raise Problem(text + ("\n" if "\n" in text else "; ") + OVER) from None
    if json:
        print_json({"incidents": found})
    elif incident:
        show(found[0])
    else:
        print_table(map(row_of, found), COLUMNS, "no incidents", UNITS, NARROW, wide=wide)


def kept_incidents(place: Path, incident: str, task: str) -> list[dict[str, Any]]:
    """Of a journal whose coordinator has ended."""
    from unicron.runtime.kept_journal import find_journal, read_state
    from unicron.runtime.requests import incidents_view
    from unicron.runtime.what_if import RequestProblem

    state, now_ms = read_state(find_journal(place))
    try:
        return incidents_view(state, now_ms, task=task, id=incident)
    except RequestProblem as problem:
        raise Problem(str(problem)) from None


def row_of(incident: dict[str, Any]) -> dict[str, Any]:
    root = incident["root"]
    place = root["node"] if root["rank"] < 0 else f"{root['node']} rank {root['rank']}"
    cost = incident["cost"]["total_gpu_s"]
    return {**incident, "root": place, "outcome": incident["outcome"] or "open", "cost_gpu_s": cost}


def show(incident: dict[str, Any]) -> None:
    for name, value in row_of(incident).items():
        if name not in APART and not _says_nothing(name, value):
            print(f"{name.replace('_', ' '):>{WIDTH}}  {_words(name, value)}")
    if incident["text"]:
        print(f"{'text':>{WIDTH}}  {incident['text']}")
    for number, transfer in enumerate(incident.get("transfers", ())):
        print(f"{'' if number else 'state came':>{WIDTH}}  {transfer['words']}")
    phases = incident["phases_ms"]
    if phases:
        print("recovery, step by step (each on the rank that took longest; some wait for others):")
    for name in sorted(phases, key=lambda name: list(PHASES).index(name) if name in PHASES else len(PHASES)):
        words = PHASES.get(name)
        print(f"{phases[name]:>{WIDTH - 3}.1f} ms  {name}{f': {words}' if words else ''}")
    start = incident["timeline"][0][0] if incident["timeline"] else 0.0
    if incident["timeline"]:
        print("timeline:")
    for at_ms, text in incident["timeline"]:
        print(f"{at_ms - start:>{WIDTH - 3}.1f} ms  {text}")


def _says_nothing(name: str, value: Any) -> bool:
    if name in SINCE_THE_FAULT or name in TOLD_AT_ZERO:
        return False
    return value in ("", None, 0, -1)  # False, too


def _words(name: str, value: Any) -> str:
    if name == "cost":
        return f"{cost_words(value)} GPU-seconds"
    if value is None:
        return SINCE_THE_FAULT.get(name, "-  (not known)")
    if value is True:
        return "yes"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
