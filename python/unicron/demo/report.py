"""After the demo: both loss curves in one picture, and a table of what failed and what it cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from unicron.demo.runner import Outcome

PICTURE = "loss.png"
COLUMNS_MAX = 4
INK, REFERENCE, DISTURBED, MARK = "#222222", "#9aa5b1", "#1f5fbf", "#c2382b"


def picture(outcomes: Sequence[Outcome], folder: Path) -> Path:
    """One small chart a scenario: undisturbed wide and grey, disturbed thin on top, marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = [outcome for outcome in outcomes if outcome.run.losses]
    columns = max(1, min(COLUMNS_MAX, len(drawn)))
    rows = max(1, math.ceil(len(drawn) / columns))
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(max(6.0, 3.6 * columns), 2.5 * rows), squeeze=False, sharey=True
    )
    flat = [axis for row in axes for axis in row]
    for axis, outcome in zip(flat, drawn, strict=False):
        _chart(axis, outcome)
    for axis in flat[len(drawn) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("loss (nats a byte)")
    layout = drawn[0].result["layout"] if drawn else {}
    sizes = ", ".join(f"{name} {size}" for name, size in layout.items())
    figure.suptitle(f"undisturbed (grey), disturbed (blue); {sizes}", color=INK, fontsize=10)
    figure.tight_layout()
    path = folder / PICTURE
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _chart(axis: Any, outcome: Outcome) -> None:
    reference, run, result = outcome.reference, outcome.run, outcome.result
    end = max(result["iterations"], max(run.losses))
    axis.plot(*_points(reference.losses, end), color=REFERENCE, linewidth=4, solid_capstyle="round")
    axis.plot(*_points(run.losses, end), color=DISTURBED, linewidth=1.2)
    for iteration, _ in outcome.marks:
        axis.axvline(iteration, color=MARK, linewidth=0.8, linestyle=":")
    verdict = result["outcome"] if result["passed"] else f"{result['outcome']}: not as it must be"
    colour = INK if result["passed"] else MARK
    axis.set_title(f"{result['scenario']}: {verdict}", fontsize=9, color=colour)
    axis.set_xlabel("iteration", fontsize=8)
    axis.tick_params(labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _points(losses: dict[int, float], end: int) -> tuple[list[int], list[float]]:
    iterations = sorted(i for i in losses if i <= end)
    return iterations, [losses[i] for i in iterations]


# -------------------------------------------------------------------- tables


def table(results: Sequence[dict[str, Any]]) -> Table:
    """One row an incident; a scenario without one has a row of its own."""
    shown = Table(title="What failed, and what it cost", title_justify="left", box=None)
    for name in ("scenario", "outcome", "fault", "severity", "seen by"):
        shown.add_column(name)
    for name in ("detect ms", "resume ms", "lost ms", "computed again"):
        shown.add_column(name, justify="right")
    shown.add_column("state from")
    shown.add_column("verdict")
    for result in results:
        verdict = "[green]ok[/]" if result["passed"] else "[red]FAILED[/]"
        first = (result["scenario"], result["outcome"])
        if not result["incidents"]:
            shown.add_row(*first, *[""] * 8, verdict)
        for number, incident in enumerate(result["incidents"]):
            last = number == len(result["incidents"]) - 1
            shown.add_row(*first, *_cells(incident), verdict if last else "")
            first = ("", "")
    return shown


def _cells(incident: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(incident["fault"]),
        str(incident["severity"]),
        str(incident["method"]),
        _ms(incident["detect_ms"], 2),
        _ms(incident["resume_ms"]),
        _ms(incident["lost_ms"]),
        str(incident["micro_batches_recomputed"]),
        str(incident["state_source"]),
    )


def _ms(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def summary(results: Sequence[dict[str, Any]]) -> str:
    """The last line."""
    passed = sum(result["passed"] for result in results)
    lost = [
        incident["lost_ms"]
        for result in results
        if result["outcome"] in ("healed", "resized")
        for incident in result["incidents"]
        if incident["lost_ms"]
    ]
    text = f"{passed} of {len(results)} scenarios ended as they must"
    if lost:
        text += f"; time lost to a failure: median {sorted(lost)[len(lost) // 2]:.0f} ms"
        text += f", most {max(lost):.0f} ms"
    return text


def show(outcomes: Sequence[Outcome], folder: Path, console: Console) -> None:
    """Table, reasons, picture and last line."""
    results = [outcome.result for outcome in outcomes]
    console.print(table(results), soft_wrap=False)
    for result in results:
        for reason in result["reasons"]:
            console.print(f"{result['scenario']}: {reason}", markup=False)
    path = picture(outcomes, folder)
    console.print(f"loss curves: {path}", markup=False)
    console.print(summary(results), markup=False)
