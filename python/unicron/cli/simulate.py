"""unicron simulate: a cluster's history under one policy or several, and the papers' tables beside ours."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from unicron.cli.common import Json, Problem, print_json, print_table
from unicron.performance.errors import PerformanceError
from unicron.planner import PlannerProblem
from unicron.runtime.files import load_yaml
from unicron.simulate.explain import summary
from unicron.simulate.history import HistoryProblem
from unicron.simulate.parameters import ParameterProblem
from unicron.simulate.report import as_json, cell, rows_of, write_report
from unicron.simulate.scenario import Scenario, ScenarioProblem, Simulated, simulate
from unicron.simulate.sensitivity import swings
from unicron.simulate.tables import TABLES, Table

PROBLEMS = (HistoryProblem, ParameterProblem, PerformanceError, PlannerProblem, ScenarioProblem)
NAMES = ", ".join(TABLES)


def main(
    scenario: Annotated[Path | None, typer.Argument(help="SCENARIO.yaml (examples/history.yaml is one).")] = None,
    seed: Annotated[int | None, typer.Option(help="Of what is drawn; default the scenario's.")] = None,
    policy: Annotated[str, typer.Option(help="Names with commas, or all; default the scenario's.")] = "",
    incidents: Annotated[Path | None, typer.Option(help="A real cluster's incidents, in place of any.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write this HTML page and the same name with .png.")] = None,
    table: Annotated[str, typer.Option(help=f"No scenario, but the papers' results beside ours: {NAMES}.")] = "",
    json: Json = False,
) -> None:
    """A cluster's history under one policy or several. All its numbers are modelled.

    Example: unicron simulate examples/history.yaml --policy unicron,megatron --report out.html
    """
    if (scenario is None) == (table == ""):
        raise Problem("give a scenario, or --table NAME", 2)
    try:
        if scenario is None:
            _show_table(table, json)
            return
        chosen = load_yaml(scenario, Scenario)
        if incidents is not None:
            failures = msgspec.structs.replace(chosen.failures, kind="file", path=str(incidents.absolute()))
            chosen = msgspec.structs.replace(chosen, failures=failures)
        _run(chosen, scenario.parent, seed, policy, report, json)
    except PROBLEMS as problem:
        raise Problem(str(problem)) from None


def _run(chosen: Scenario, folder: Path, seed: int | None, policy: str, report: Path | None, json: bool) -> None:
    from unicron.simulate.policies import POLICIES

    if seed is not None:
        chosen = msgspec.structs.replace(chosen, seed=seed)
    if policy:
        names = tuple(POLICIES) if policy == "all" else tuple(policy.split(","))
        chosen = msgspec.structs.replace(chosen, policies=names)
    if report is not None:
        _require_writable(report)
    with _progress(1 + len(chosen.policies) * (1 if report is None else 2)) as tell:
        simulated = simulate(chosen, folder, tell)
        written = write_report(simulated, swings(simulated, tell), report) if report is not None else ()
    if json:
        print_json({**as_json(simulated), "files": [str(path) for path in written]})
        return
    _show(simulated)
    for path in written:
        print(f"wrote {path}")


def _require_writable(report: Path) -> None:
    """Said before the minutes that it takes."""
    if report.is_dir():
        raise Problem(f"--report {report} is a folder: give the page's name, as {report}/report.html", 2)
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=report.parent):
            pass
    except OSError as error:
        raise Problem(f"--report {report} cannot be written: {error.strerror}; give another folder", 2) from None


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, because it may take minutes. What it gives is told each of the ``total`` steps that begins;
    0: their number is not known."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    done = itertools.count()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total or None)
        yield lambda step: bar.update(task, description=step, completed=next(done))


def _show(simulated: Simulated) -> None:
    history = simulated.history
    days = history.duration_s / 86_400
    title = f"{simulated.scenario.name}: {history.num_nodes} nodes, {days:.0f} days, {len(history)} failures (modelled)"
    rows = [{name: cell(value) for name, value in row.items()} for row in rows_of(simulated)]
    print_table(rows, list(rows[0]), "no policy", title)
    for line in summary(simulated):
        print(line)


def _show_table(name: str, json: bool) -> None:
    if name not in TABLES:
        raise Problem(f"no table {name!r}; there are {NAMES}", 2)
    with _progress(0) as tell:
        tell(name)
        table: Table = TABLES[name]()
    if json:
        print_json(msgspec.to_builtins(table))
        return
    rows = [{column: cell(row[column]) for column in table.columns} for row in table.rows]
    print_table(rows, table.columns, "nothing", table.title)
    parts = (("ahead", table.ahead), ("assumed", table.assumed), ("moves with", table.moves), ("note", table.notes))
    for heading, lines in parts:
        for line in lines:
            print(f"{heading}: {line}")
