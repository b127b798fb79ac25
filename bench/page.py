"""docs/BENCHMARKS.md and its pictures, out of bench/results: no number in them is typed by hand.

python bench/page.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import common
from peers import tables

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parent / "docs" / "BENCHMARKS.md"
ROWS_MAX = 24  # in a picture

INTRODUCTION = """# Benchmarks

Made by `python bench/page.py` out of the files in `bench/results/`: change a number by measuring again. `unicron bench`
lists the benches, `make bench` runs those that fit a CPU and `make bench-check` compares a new run with the kept one by
the ratios inside each run. A machine shared with others is noisy: medians are given, with the 99th percentile, the
least and the most. A row that has a goal says so, and whether its median meets it; older results have none.
"""


def results() -> list[tuple[str, dict[str, Any]]]:
    """(name, result) of every file that a bench wrote, by folder and name."""
    found = []
    for path in sorted(RESULTS.glob("*/*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and "rows" in result and "machine" in result:
            found.append((f"{path.parent.name}/{path.stem}", result))
    return found


def _bench_of(stem: str) -> str:
    """The file whose result it is: many_moves_114 is of bench_many_moves.py."""
    words = stem.split("_")
    names = ("_".join(words[:count]) for count in range(len(words), 0, -1))
    return next((f"bench_{name}.py" for name in names if (HERE / f"bench_{name}.py").exists()), f"bench_{words[0]}.py")


def section(name: str, result: dict[str, Any], picture: str) -> str:
    machine, configuration = result["machine"], result["configuration"]
    command = result.get("command") or _bench_of(name.rpartition("/")[2])
    versions = ", ".join(f"{package} {version}" for package, version in machine["versions"].items())
    settings = ", ".join(f"{key} {common.plain(value)}" for key, value in configuration.items())
    where = (
        f"`{command}` in {result['unit']}, on {machine['cpu']}, {machine['cores']} cores, load {machine['load_1min']} "
        f"at the start; {versions}."
    )
    lines = [
        f"## {result['bench']}: {name}",
        "",
        where,
        *(["", settings] if settings else []),
        "",
        *table(result),
        *corpus(result.get("corpus") or {}),
    ]
    if picture:
        lines += ["", f"![{result['bench']}]({picture})"]
    return "\n".join(lines) + "\n"


def table(result: dict[str, Any]) -> list[str]:
    known = ["case", "median", "p99", "min", "max", "runs", "ratio"]
    facts = dict.fromkeys(key for row in result["rows"] for key in row if key not in known)
    has = {"p99": any("p99" in row for row in result["rows"]), "ratio": bool(result["baseline"])}
    names = [*(name for name in known if has.get(name, True)), *facts]
    head = [f"x {result['baseline']}" if name == "ratio" else name for name in names]
    rows = [[common.plain(row.get(name, "")) for name in names] for row in result["rows"]]
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]


def corpus(halves: dict[str, Any]) -> list[str]:
    """What bench_classify.py adds where the corpus of failures was there: right answers of those asked for."""
    lines = []
    for half, found in halves.items():
        families = found["families"]
        whats = [what for what in dict.fromkeys(w for each in families.values() for w in each) if what != "false root"]
        rows = [[family, *map(_right, (counts.get(what) for what in whats))] for family, counts in families.items()]
        head = [f"{half} half of the corpus", *whats]
        words = {True: "yes", False: "no", None: "not judged"}
        met = ", ".join(f"{what} {words[is_met]}" for what, is_met in found["met"].items())
        goals = ", ".join(f"{what} {percent:g} %" for what, percent in found["goals_percent"].items())
        lines += ["", *("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))]
        wrong = len(found["misses"])
        lines += ["", f"Goals (roots of all rows, others of confident ones): {goals}. Met: {met}. Wrong: {wrong} rows."]
    return lines


def _right(count: dict[str, int] | None) -> str:
    return f"{count['right']} of {count['of']}" if count else ""


def draw(name: str, result: dict[str, Any], folder: Path) -> str:
    """A picture of the medians, least to most; its path beside the page. "" when there is nothing to draw."""
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["median"] > 0 and row["min"] > 0][:ROWS_MAX]
    if len(rows) < 2:
        return ""
    figure = Figure(figsize=(8, 0.6 + 0.3 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    medians = [row["median"] for row in rows]
    spread = [[row["median"] - row["min"] for row in rows], [row["max"] - row["median"] for row in rows]]
    axes.errorbar(medians, places, xerr=spread, fmt="o", color="tab:blue", ecolor="tab:gray", capsize=3)
    axes.set_yticks(list(places), [row["case"] for row in rows])
    axes.invert_yaxis()
    if max(medians) > 30 * min(medians):
        axes.set_xscale("log")
    axes.set_xlabel(result["unit"])
    axes.grid(axis="x", alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('/', '_')}.png"
    figure.savefig(path)
    return f"{folder.name}/{path.name}"


def peers(pictures: Path) -> list[str]:
    """The sections of bench/peers/, when runs of it are kept."""
    sections = []
    for name in ("peers", "peers_gpu"):
        picture = pictures / f"{name}.png"
        if rows := tables.load(RESULTS / name):
            drawn = f"{pictures.name}/{picture.name}" if tables.draw(rows, picture) else ""
            sections.append(tables.page(rows, drawn, name))
    return sections


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--page", type=Path, default=PAGE, help="the file to write; pictures beside it")
    arguments = parser.parse_args()
    pictures = arguments.page.parent / "benchmarks"
    sections = [section(name, result, draw(name, result, pictures)) for name, result in results()]
    sections += peers(pictures)
    arguments.page.write_text("\n".join([INTRODUCTION, *sections]))
    print(f"{arguments.page}: {len(sections)} tables")


if __name__ == "__main__":
    main()
