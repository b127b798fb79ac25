"""Classification: right by half and family of the labelled corpus, with the misses, and how fast.

    even, odd     halves of failures/corpus.jsonl by int(sha1(id), 16) % 2: rules were written with the even one, and
                  frozen in a commit before the odd one was opened
    severity, scope   rows right of all, and of those with a label of confidence >= 0.6
    root          multi-rank rows that have a root rank, and it was named
    false root    rows where one was named though there is none, or the row is an echo
    throughput    per second of processor time, over text made here: a dull training log, the same with one line in a
                  hundred that rules must look at, and nothing but such lines

The corpus is not part of the repository; without it only the throughput is measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from unicron.diagnosis import Diagnosis, diagnose_ranks, diagnose_text
from unicron.diagnosis.reader import Reader
from unicron.diagnosis.rules import RULES

CONFIDENT = 0.6
GOALS = {  # percent, of confident rows
    "even": {"severity": 95.0, "scope": 90.0, "root": 90.0},
    "odd": {"severity": 88.0, "scope": 82.0, "root": 80.0},
}
TEXT_BYTES = 4 << 20


def shared_data() -> Path:
    """Where the data that is not committed lies, if it does."""
    return Path(os.environ.get("UNICRON_SHARED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


def half(row_id: str) -> str:
    """The half of a row: even if int(sha1(id), 16) % 2 == 0."""
    return "odd" if int(hashlib.sha1(row_id.encode()).hexdigest(), 16) % 2 else "even"


def answer(row: dict[str, Any]) -> Diagnosis:
    return diagnose_ranks(row["ranks"]) if row.get("ranks") else diagnose_text(row["text"])


# ---------------------------------------------------------------- right or wrong


@dataclass
class Score:
    """Counts of one half or of one family in it: what -> [right, asked]; `confident` the same of confident rows."""

    all: Counter[str] = field(default_factory=Counter)
    right: Counter[str] = field(default_factory=Counter)
    misses: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, is_right: bool, is_confident: bool) -> None:
        for name in (what, f"{what} confident") if is_confident else (what,):
            self.all[name] += 1
            self.right[name] += is_right

    def percent(self, what: str) -> float | None:
        return 100.0 * self.right[what] / self.all[what] if self.all[what] else None

    def said(self, what: str) -> str:
        return f"{self.right[what]}/{self.all[what]}" if self.all[what] else "-"


def judge(score: Score, row: dict[str, Any], found: Diagnosis) -> None:
    """Compare one row's labels with the answer."""
    is_confident = row["confidence"] >= CONFIDENT
    wrong = {}
    for what in ("severity", "scope"):
        is_right = str(getattr(found, what)) == row[what]
        score.note(what, is_right, is_confident)
        if not is_right:
            wrong[what] = f"{row[what]}, not {getattr(found, what)}"
    label = row.get("root_rank")
    if row.get("ranks") and label is not None:
        score.note("root", found.root_rank == label, is_confident)
        if found.root_rank != label:
            wrong["root"] = f"{label}, not {found.root_rank}"
    elif found.root_rank is not None and (row.get("ranks") or row["role"] == "secondary"):
        score.all["false root"] += 1
        wrong["root"] = f"none, not {found.root_rank}"
    if wrong:
        score.misses.append({"id": row["id"], "confidence": row["confidence"], "rule": found.rule, **wrong})


def evaluate(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Score]]:
    """half -> family (and "all") -> score."""
    scores: dict[str, dict[str, Score]] = {name: {"all": Score()} for name in GOALS}
    for row in rows:
        found = answer(row)
        families = scores[half(row["id"])]
        for family in ("all", row["family"]):
            judge(families.setdefault(family, Score()), row, found)
    return scores


def verdicts(families: dict[str, Score], goals: dict[str, float]) -> dict[str, bool | None]:
    """Is each goal met? None: nothing to judge it by."""
    met: dict[str, bool | None] = {}
    for what, goal in goals.items():
        percent = families["all"].percent("root" if what == "root" else f"{what} confident")
        met[what] = None if percent is None else percent >= goal
    met["no false root"] = families["all"].all["false root"] == 0
    return met


# ---------------------------------------------------------------- how fast


def dull_lines() -> Iterator[str]:
    for number in range(10**9):
        yield (
            f" [2026-01-01 00:{number // 60 % 60:02d}:{number % 60:02d}] iteration {number:8d}/ 1000000 |"
            f" consumed samples: {number * 256:12d} | elapsed time per iteration (ms): {500 + number % 97}.1 |"
            f" learning rate: 1.{number % 1000:03d}E-04 | global batch size: 256 | lm loss: 2.{number % 997:03d}E+00 |"
            f" loss scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )


def mixed_lines(every: int) -> Iterator[str]:
    dull = dull_lines()
    for number in range(10**9):
        yield RULES[number // every % len(RULES)].example if number % every == 0 else next(dull)


def timed_mb_s(lines: Iterator[str]) -> float:
    text, size = [], 0
    while size < TEXT_BYTES:
        text.append(next(lines))
        size += len(text[-1]) + 1
    reader = Reader()
    began = time.process_time()
    reader.read_unranked(text)
    return size / 1e6 / (time.process_time() - began)


# ---------------------------------------------------------------- how it looks


def as_text(scores: dict[str, dict[str, Score]]) -> list[str]:
    lines: list[str] = []
    for name, families in scores.items():
        columns: dict[str, list[str]] = {f"{name} half": list(families)}
        for what in ("severity", "severity confident", "scope", "scope confident", "root", "root confident"):
            columns[what] = [score.said(what) for score in families.values()]
        columns["false root"] = [str(score.all["false root"]) for score in families.values()]
        met = verdicts(families, GOALS[name])
        whats = ("severity confident", "scope confident", "root", "root confident")
        percents = [f"{what} {families['all'].percent(what) or 0:.1f} %" for what in whats]
        lines += ["", *common.table(columns), f"{', '.join(percents)}; goals {GOALS[name]}: {met}", "misses:"]
        lines += [f"  {json.dumps(miss)}" for miss in families["all"].misses] or ["  none"]
    return lines


def as_json(scores: dict[str, dict[str, Score]]) -> dict[str, Any]:
    return {
        name: {
            "families": {
                family: {what: {"right": score.right[what], "of": score.all[what]} for what in sorted(score.all)}
                for family, score in families.items()
            },
            "goals_percent": GOALS[name],
            "met": verdicts(families, GOALS[name]),
            "misses": families["all"].misses,
        }
        for name, families in scores.items()
    }


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=3)
    parser.add_argument("--corpus", type=Path, default=shared_data() / "failures" / "corpus.jsonl", help="JSON lines")
    parser.add_argument("--half", choices=("even", "odd", "both"), default="both", help="which to open")
    arguments: argparse.Namespace = parser.parse_args()
    bench = common.Bench("classify", "MB/s", configuration={"rules": len(RULES), "text_mb": TEXT_BYTES / 1e6})
    scores: dict[str, dict[str, Score]] = {}
    if arguments.corpus.is_file():
        rows = [json.loads(line) for line in arguments.corpus.read_text().splitlines()]
        wanted = [row for row in rows if arguments.half in ("both", half(row["id"]))]
        scores = {name: found for name, found in evaluate(wanted).items() if arguments.half in ("both", name)}
    else:
        bench.configuration["corpus"] = f"{arguments.corpus} is not there"
    Reader().read_unranked(rule.example for rule in RULES)  # every pattern is compiled once
    for case, every in (("a dull log", 0), ("one line in 100 for the rules", 100), ("only lines for the rules", 1)):
        runs = (mixed_lines(every) if every else dull_lines() for _ in range(arguments.runs))
        bench.add(case, [timed_mb_s(lines) for lines in runs])
    if arguments.json:
        print(json.dumps({**bench.as_json(), "corpus": as_json(scores)}))
        return
    print("\n".join([bench.as_text(), *as_text(scores)]))


if __name__ == "__main__":
    main()
