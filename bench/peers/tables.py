"""The kept runs as the page shows them: knobs, what a fault costs, what nothing costs, and a picture.

A cell is (fault, system, setting); of several runs the median, with the least and the most.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from peers import job
from peers.systems import FAULTS, SYSTEMS, Setting

Row = dict[str, Any]
Cell = tuple[str, str, str]
SECONDS = {
    "detected_s": "detected",
    "next_commit_s": "next commit",
    "full_world_s": "full world",
    "lost_s": "lost",
}
WORDS = (
    f"The fault strikes in iteration {job.FAULT_ITERATION}, after a micro-batch of the struck rank. Seconds since "
    f"then: `detected` is the first word of anybody (a log line, a vote), `next commit` the interrupted iteration or "
    f"a later one done, `full world` all ranks again, `lost` the wall time beyond a usual iteration. Weights and "
    f"losses after {job.COMPARED} iterations, against the system's own undisturbed run. No commit within "
    f"{job.REACTION_S_MAX:g} s: no reaction; not all ranks {job.FULL_S_MAX:g} s later: not whole."
)
EXPLAINED = """Where unicron is not ahead, and why:

* `agent`: the ranks of torchrun and dlrover-run train on without their agent, and until it is back nobody sees what
  becomes of them. unicron's end with their agent: the others go on without them, at the cost of a part of an iteration,
  and the node is whole again when its agent is.
* `stop` with its defaults: a stopped worker is given some seconds to continue (`stopped_grace_ms`), because somebody
  may have stopped it on purpose. torchft's heartbeat is as long.
* Nothing fails: `megatron` is the script that unicron runs, without unicron. So what lies between `torchrun plain` and
  `megatron` is megatron-core's (the peers' loop is a bare one), and what lies between `megatron` and `unicron` is a
  fixed cost of each iteration: more collectives of four ranks on the cores of this machine, agents, coordinator. Beside
  iterations of a tenth of a second it is not seen any more: see the cost of being managed.
"""
COUNTS = {"redone": "iterations redone", "samples_again": "samples again", "samples_lost": "samples lost"}


def load(folder: Path) -> list[Row]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def cells(rows: Iterable[Row]) -> dict[Cell, list[Row]]:
    """In the order of the faults, then of the systems, then of the settings."""
    found: dict[Cell, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["fault"], row["system"], row["setting"]].append(row)
    order = {
        (fault, name, setting): number
        for number, (fault, name, setting) in enumerate(
            (fault, name, setting) for fault in FAULTS for name in SYSTEMS for setting in SYSTEMS[name].settings
        )
    }
    return {cell: found[cell] for cell in sorted(found, key=lambda cell: order[cell])}


def page(rows: list[Row], picture: str, title: str) -> str:
    """A section of docs/BENCHMARKS.md."""
    machines = sorted({f"{row['machine']['cpu']}, {row['machine']['cores']} cores" for row in rows})
    loads = [load for row in rows for load in row["load"]]
    parts = [
        f"## the peers on the same work: {title}",
        "",
        f"`bench/peers/run.sh`, on {'; '.join(machines)}; load {min(loads):g} to {max(loads):g}, said of every cell.",
        "",
        *sorted({row["work"] for row in rows}),
        "",
        WORDS,
        "",
        *table(fault_lines(rows)),
        "",
        *([f"![next commit]({picture})", ""] if picture else []),
        "Nothing fails:",
        "",
        *table(steady_lines(rows)),
        "",
        *([EXPLAINED] if any(row["system"] == "megatron" for row in rows) else []),
        "Knobs:",
        "",
        *table(knob_lines(rows)),
    ]
    return "\n".join(parts) + "\n"


def work() -> str:
    """What is done, in the words that are kept with a run."""
    every = "every iteration" if job.CHECKPOINT_EVERY == 1 else f"every {job.CHECKPOINT_EVERY} iterations"
    return (
        f"GPT {job.LAYERS} x {job.HIDDEN}, sequences of {job.SEQ_LENGTH}, global batch {job.SAMPLES} samples in "
        f"{job.NUM_MICRO_BATCHES} micro-batches of {job.MICRO_BATCH}, {job.WORLD_SIZE} ranks over {job.BACKEND}, Adam "
        f"at {job.LEARNING_RATE:g}. Who goes on from a checkpoint writes one {every}."
    )


def fault_lines(rows: list[Row]) -> list[Row]:
    return [fault_line(cell, runs) for cell, runs in cells(rows).items() if cell[0] != "none"]


def fault_line(cell: Cell, runs: list[Row]) -> Row:
    fault, system, setting = cell
    line: Row = {"fault": fault, "system": system, "setting": setting, "runs": len(runs)}
    for key, title in SECONDS.items():
        line[title] = spread([run.get(key) for run in runs])
    for run in runs:  # words in the place of a time that never came
        if run["status"] == "no reaction":
            line["next commit"] = f"no reaction in {job.REACTION_S_MAX:g} s"
        elif run["status"].startswith(("ended", "did not")) and not line["next commit"]:
            line["next commit"] = run["status"]
        if not line["full world"]:
            line["full world"] = "not whole"
    for key, title in COUNTS.items():
        line[title] = spread([run.get(key) for run in runs])
    line["weights"] = weights(runs)
    line["losses differ by"] = spread([run.get("loss_max_abs_diff") for run in runs])
    line["load"] = spread([run["load"][0] for run in runs])
    return line


def weights(runs: list[Row]) -> str:
    known = [run for run in runs if "weights_equal" in run]
    if not known:
        return ""
    if all(run["weights_equal"] for run in known):
        return "equal bit for bit"
    return "differ by " + spread([run["weights_max_abs_diff"] for run in known])


def steady_lines(rows: list[Row]) -> list[Row]:
    return [
        {
            "system": system, "setting": setting, "runs": len(runs),
            "CPU ms an iteration, all processes": spread([run.get("cpu_ms_per_iteration") for run in runs]),
            "ms an iteration": spread([run.get("iteration_ms") for run in runs]),
            "load": spread([run["load"][0] for run in runs]),
        }
        for (fault, system, setting), runs in cells(rows).items() if fault == "none"
    ]  # fmt: skip


def knob_lines(rows: list[Row]) -> list[Row]:
    used = {(row["system"], row["setting"]) for row in rows}
    return [
        {"system": name, "setting": title, "what it is": system.says, "knobs": knobs(setting)}
        for name, system in SYSTEMS.items() for title, setting in system.settings.items() if (name, title) in used
    ]  # fmt: skip


def knobs(setting: Setting) -> str:
    words = [*setting.arguments, *setting.master, *(f"{key}={value}" for key, value in setting.environment.items())]
    told = " ".join(f"`{word}`" for word in words)
    return "; ".join(part for part in (told, setting.says) if part)


def spread(values: list[float | None]) -> str:
    """Median (least to most); "" when there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    middle = figure(statistics.median(known))
    return middle if min(known) == max(known) else f"{middle} ({figure(min(known))} to {figure(max(known))})"


def figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def table(lines: list[Row]) -> list[str]:
    if not lines:
        return ["(no run is kept)"]
    names = list(lines[0])
    body = [[str(line[name]) for name in names] for line in lines]
    return ["| " + " | ".join(cells) + " |" for cells in (names, ["---"] * len(names), *body)]


def draw(rows: list[Row], path: Path) -> bool:
    """Seconds to the next commit of every cell that has one, by fault; whether there is a picture."""
    from matplotlib.figure import Figure

    found = {cell: [run["next_commit_s"] for run in runs if run.get("next_commit_s")] for cell, runs in
             cells(row for row in rows if row["fault"] != "none").items()}  # fmt: skip
    found = {cell: times for cell, times in found.items() if times}
    if len(found) < 2:
        return False
    image = Figure(figsize=(8, 0.8 + 0.3 * len(found)), layout="constrained")
    axes = image.add_subplot()
    for place, ((_, system, _), times) in enumerate(found.items()):
        color = "tab:green" if system == "unicron" else "tab:gray"
        axes.barh(place, statistics.median(times), color=color)
        axes.plot(times, [place] * len(times), ".", color="black")
    axes.set_yticks(range(len(found)), [f"{fault}: {system}, {setting}" for fault, system, setting in found])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds from the fault to the next committed iteration")
    axes.grid(axis="x", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path)
    return True
