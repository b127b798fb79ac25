"""unicron bench: run a measurement of bench/. The benches live in the checkout, not in an installed wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from unicron.cli.common import Json, Problem

PREFIX = "bench_"


def folder() -> Path:
    """bench/ of the checkout this package was built from, or of the current one."""
    for root in (Path(__file__).resolve().parents[3], Path.cwd()):
        if (root / "bench" / "common.py").is_file():
            return root / "bench"
    raise Problem("the benches are not part of the wheel: clone the repository and run this in it")


def main(
    name: Annotated[str, typer.Argument(help="Which; without a name they are listed.")] = "",
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own, such as --runs 5.")] = None,
    layout: Annotated[str, typer.Option(help="tp,pp,dp, for benches that have it.")] = "",
    json: Json = False,
) -> None:
    """Run a measurement, or list them.

    Example: unicron bench recovery --layout 1,1,4 --json
    """
    benches = {path.stem.removeprefix(PREFIX): path for path in sorted(folder().glob(f"{PREFIX}*.py"))}
    if not name:
        for known, path in benches.items():
            print(f"{known:<12} {path.read_text(encoding='utf-8').splitlines()[0].strip(chr(34))}")
        return
    if name not in benches:
        raise Problem(f"no bench {name!r}: {', '.join(benches)}", 2)
    options = [*(["--layout", layout] if layout else []), *(["--json"] if json else []), *(arguments or [])]
    raise SystemExit(subprocess.run([sys.executable, str(benches[name]), *options], check=False).returncode)
