"""unicron classify: severity, scope and root of log text, JSON lines, error files and flight recorder dumps."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from unicron.cli.classify_input import Answer, Kind, answers
from unicron.cli.common import Json, Problem, print_json, print_table
from unicron.diagnosis.words import Diagnosis, Finding, Strength
from unicron.types import Severity

TEXT_CHARS = 110
EVIDENCE_ROWS_MAX = 24
COLUMNS = ("id", "severity", "scope", "root", "category", "reason")
EVIDENCE_COLUMNS = ("rank", "severity", "rule", "line", "times", "text")
MEANING = {
    Severity.SEV1: "node or hardware is bad: isolate it, reconfigure",
    Severity.SEV2: "restart the process",
    Severity.SEV3: "try again in place",
    Severity.FATAL: "code, data or configuration is wrong: do not try again",
    Severity.INFO: "nothing to do: count it",
}


def main(
    file: Annotated[
        str, typer.Argument(metavar="[FILE]", help="Log, JSON lines, error.json, or folder of dumps; default stdin.")
    ] = "-",
    kind: Annotated[Kind, typer.Option(help="What FILE is.")] = Kind.AUTO,
    json: Json = False,
) -> None:
    """Severity, scope and root of a failure, out of what it wrote.

    FILE is a log (of one rank, or of many with torchrun's or srun's prefixes), JSON lines with {"id", "text"} or
    {"id", "ranks": {rank: text}}, torchrun's error.json, a folder of NCCL flight recorder dumps, or a folder of
    logs by rank. JSON lines are answered line by line.

    Example: unicron classify --json slurm-4711.out
    """
    if file == "-" and sys.stdin.isatty():
        raise Problem("no FILE and nothing comes in: unicron classify --help shows how", 2)
    found: list[Answer] = []
    for answer in answers(file, kind):
        if json:
            print_json(as_json(answer, with_evidence=answer.id == file))
        else:
            found.append(answer)
    if json:
        return
    if len(found) == 1 and found[0].id == file:
        show(found[0].diagnosis)
    else:
        rows = ({**as_json(answer), "root": answer.diagnosis.root_rank} for answer in found)
        print_table(rows, COLUMNS, "no lines")


def as_json(answer: Answer, *, with_evidence: bool = False) -> dict[str, Any]:
    """The fields that scripts rely on, and the evidence where there is one answer only."""
    found = answer.diagnosis
    fields: dict[str, Any] = {
        "id": answer.id,
        "severity": found.severity.value,
        "scope": found.scope.value,
        "root_rank": found.root_rank,
        "category": found.category.value,
        "reason": found.reason,
    }
    if with_evidence:
        fields["evidence"] = [
            {
                "rank": finding.rank,
                "rule": finding.rule,
                "severity": finding.severity.value,
                "strength": finding.strength.name.lower(),
                "line": finding.line,
                "times": finding.count,
                "text": finding.text,
                "reason": finding.reason,
            }
            for finding in found.evidence
        ]
    return fields


def show(found: Diagnosis) -> None:
    """For people: the verdict, what it rests on, and the echoes under it."""
    root = found.root_rank if found.root_rank is not None else "not known"
    for name, value in (
        ("severity", f"{found.severity.value}: {MEANING[found.severity]}"),
        ("root", root if found.root_rank is None or not root.isdigit() else f"rank {root}"),
        ("scope", found.scope.value),
        ("category", found.category.value),
        ("reason", found.reason),
    ):
        print(f"{name:>9}  {value}")
    causes = [finding for finding in found.evidence if finding.strength > Strength.ECHO]
    echoes = [finding for finding in found.evidence if finding.strength <= Strength.ECHO]
    for title, findings in (("evidence", causes), ("echoes and notes", echoes)):
        if findings:
            print()
            print_table(map(_row, findings[:EVIDENCE_ROWS_MAX]), EVIDENCE_COLUMNS, "", title)
            if len(findings) > EVIDENCE_ROWS_MAX:
                print(f"and {len(findings) - EVIDENCE_ROWS_MAX} more (--json shows them)")


def _row(finding: Finding) -> dict[str, Any]:
    text = finding.text if len(finding.text) <= TEXT_CHARS else f"{finding.text[:TEXT_CHARS]} ..."
    return {
        "rank": finding.rank or None,
        "severity": finding.severity.value,
        "rule": finding.rule,
        "line": finding.line or None,
        "times": finding.count,
        "text": text,
    }
