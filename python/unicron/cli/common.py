"""What every command shares: calling typer, errors as one line, JSON or a table, the coordinator's
address.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from unicron.runtime.client import CoordinatorRefused, CoordinatorSilent, RequestUnfit, from_environment
from unicron.runtime.files import FileProblem
from unicron.runtime.journal_problem import JournalProblem
from unicron.runtime.keys import KeyProblem

if TYPE_CHECKING:
    from rich.table import Table

    from unicron.types import Layout

FAILURE = 1
INT_MAX = 2**31 - 1  # of an option that counts or names a number
WIDTH = 200  # of a table with all its columns, at least
FOLDED = ("why", "cause")  # columns of sentences
FOLDED_MIN = 14
KNOWN_PROBLEMS = (
    CoordinatorRefused,
    CoordinatorSilent,
    FileProblem,
    JournalProblem,
    KeyProblem,
    OSError,
    RequestUnfit,
)

Instances = Annotated[
    int, typer.Option("--optimizer-instances", help="Of a distributed optimizer: so many ranks hold each shard.", min=1)
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Coordinator = Annotated[str, typer.Option(help="host:port; default UNICRON_COORDINATOR, else the local one.")]
Interface = Annotated[
    str,
    typer.Option(
        help="Of control: name, address or CIDR; default UNICRON_INTERFACE, else the route to the coordinator.",
        show_default=False,
    ),
]
StateInterface = Annotated[
    str,
    typer.Option(
        help="Of the workers' process groups; default UNICRON_STATE_INTERFACE, else control's.", show_default=False
    ),
]
Wide = Annotated[bool, typer.Option("--wide", help="All columns, also where the terminal is too narrow for them.")]
Keys = Annotated[str, typer.Option(help="Key directory; default UNICRON_KEYS, else ./keys.")]


class Problem(Exception):
    """A failure that was understood: its text is the one line."""

    def __init__(self, text: str, code: int = FAILURE) -> None:
        super().__init__(text)
        self.code = code


def call(verb: str, function: Callable[..., Any], words: list[str]) -> int:
    """Run a verb's main; its return value is the exit code (None: 0)."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    context = {"allow_interspersed_args": verb != "run", "help_option_names": ["-h", "--help"]}
    context["ignore_unknown_options"] = verb == "bench"  # they are the measurement's
    app.command(context_settings=context)(function)
    try:
        result = app(words, prog_name=f"unicron {verb}", standalone_mode=False)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _failed(verb, error)
    return result if isinstance(result, int) else 0


def _failed(verb: str, error: Exception) -> int:
    if isinstance(error, Problem):
        sys.stderr.write(f"unicron {verb}: {error}\n")
        return error.code
    show = getattr(error, "format_message", None)  # click's usage errors
    if show is not None:
        sys.stderr.write(f"unicron {verb}: {show().rstrip('.')}; unicron {verb} --help shows how\n")
        return int(getattr(error, "exit_code", 2))
    if type(error).__name__ == "Abort":
        return 130
    if isinstance(error, KNOWN_PROBLEMS):
        sys.stderr.write(f"unicron {verb}: {error}\n")
        return FAILURE
    raise error


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=None, default=str) + "\n")
    sys.stdout.flush()


def order(verb: str, said: Callable[[Any], str], coordinator: str, keys: str, json: bool, **subject: Any) -> None:
    """Ask the coordinator to do it to one task or node. said: the line for people, of the result."""
    with from_environment(coordinator, keys) as client:
        result = client.ask(verb, **subject)
    if json:
        print_json({**subject, "result": result})
    else:
        print(said(result))


def print_table(
    rows: Iterable[dict[str, Any]],
    columns: Sequence[str],
    empty: str,
    title: str = "",
    narrow: Mapping[str, str] | None = None,
    *,
    wide: bool = False,
) -> None:
    """narrow: the columns, and the field of each, for a terminal in which the others do not fit, unless wide. Where it
    is given, sentences alone are folded (FOLDED): a task or a phase is never cut. Into a pipe goes a line a row, with
    all of it, for those who cut it themselves."""
    from rich.console import Console
    from rich.measure import Measurement

    rows = list(rows)
    if not rows:
        print(empty)
        return
    if not sys.stdout.isatty():
        _print_lines(rows, columns, title)
        return
    console = Console()

    def needed(table: Table) -> int:
        return Measurement.get(console, console.options.update(width=10_000), table).minimum

    keeps = narrow is not None
    table = _table(rows, {column.replace("_", " "): column for column in columns}, title, keeps=keeps)
    if narrow is not None and not wide and needed(table) > console.width:
        table = _table(rows, narrow, title, keeps=True)
        table.collapse_padding = True
    if keeps:  # a terminal breaks a line that is too long, and shows all of it
        console.width = max(console.width, needed(table), WIDTH if wide else 0)
    console.print(table)


def _print_lines(rows: list[dict[str, Any]], columns: Sequence[str], title: str) -> None:
    from rich.cells import cell_len

    table = [[column.replace("_", " ") for column in columns]]
    table += [[" ".join(_cell(row.get(column)).split("\n")) for column in columns] for row in rows]
    widths = [max(map(cell_len, cells)) for cells in zip(*table, strict=True)]
    print(f"{title}\n" if title else "", end="")
    for cells in table:
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
        print("  ".join(padded).rstrip())


def _table(rows: list[dict[str, Any]], fields: Mapping[str, str], title: str, *, keeps: bool) -> Table:
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, box=None, pad_edge=False, header_style="bold")
    for name, field in fields.items():
        widest = max(cell_len(text) for text in (name, *(_cell(row.get(field)) for row in rows)))
        is_whole = keeps and name not in FOLDED
        least = (widest if is_whole else min(widest, FOLDED_MIN)) if keeps else None
        table.add_column(name, no_wrap=is_whole, overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(Text(_cell(row.get(field))) for field in fields.values()))  # brackets are not markup
    return table


def sentences(text: str) -> str:
    """Of a decision's reason, which may be several hundred characters: a line each, indented from the second on."""
    return text.replace(". ", ".\n  ")


def with_instances(layout: Layout, instances: int) -> Layout:
    """--optimizer-instances. Raises Problem with the reason when the layout cannot have so many."""
    from unicron.types import refusal_of_instances

    wanted = msgspec.structs.replace(layout, instances=instances)
    if why := refusal_of_instances(wanted):
        raise Problem(why, 2)
    return wanted


def buddies_of(buddy: bool, every: int) -> bool:
    """Whether shards are copied at all. every: --buddy-every, which is another way to want it."""
    from unicron.healing.buddies import EVERY_MIN

    if buddy and every:
        raise Problem("--buddy copies after every iteration, --buddy-every beside the training: say one of them", 2)
    if every and every < EVERY_MIN:
        raise Problem(f"--buddy-every {every}: must be at least {EVERY_MIN}; --buddy copies after every iteration", 2)
    return buddy or every > 0


def cost_words(cost: dict[str, float]) -> str:
    """C_recovery in GPU-seconds, part by part."""
    return ", ".join(f"{name.removesuffix('_gpu_s').replace('_', '-')} {value:.1f}" for name, value in cost.items())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
