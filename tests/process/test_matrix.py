"""A seeded sample of `make matrix` at layouts that the demo's own sample does not have."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from unicron.demo import matrix
from unicron.demo.matrix_cases import ROWS

SEED = 2026
SAMPLE = 1  # besides the one that is always run at this row
# What is special there: chunks of an interleaved pipeline take turns; no other replica has what the open step writes,
# and not every rank shares a group with the lost one.
ALWAYS = {
    "1,2,2-interleaved": ("replace", "backward"),
    "2,2,1": ("replace", "step", "idle"),
    "1,1,4": ("shrink", "copy"),
}


@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", ALWAYS)
def test_a_sample_of_the_matrix(name: str, tmp_path: Path) -> None:
    (row,) = [row for row in ROWS if row.name == name]
    how, *names = ALWAYS[name]
    same = [found for found in matrix.cases_of(row) if found[0] == how]
    drawn = random.Random(f"{SEED} {name}").sample(
        [f for f in same if f[1].name not in names], 0 if how == "shrink" else SAMPLE
    )
    always = [found for found in same if found[1].name in names]
    results = list(matrix.run_row(row, [*always, *drawn], tmp_path))
    assert len(results) == len(always) + len(drawn)
    wrong = {result["case"]: result["reasons"] for result in results if not result["passed"]}
    assert not wrong, f"{wrong}\nreplay: python -m unicron.demo.matrix --rows {name}"


def test_what_passed_is_not_run_again(tmp_path: Path) -> None:
    row = ROWS[0]
    path = tmp_path / "matrix.jsonl"
    path.write_text(
        '{"row": "1,1,4", "how": "replace", "case": "tie", "passed": false, "reasons": ["x"]}\n'
        '{"row": "1,1,4", "how": "replace", "case": "tie", "passed": true, "reasons": []}\n'
        '{"row": "1,1,4", "how": "shrink", "case": "tie", "passed": false, "reasons": ["x"]}\n'
    )
    left = [(how, case.name) for _, how, case in matrix.to_do([row], matrix.known(path))]
    assert ("replace", "tie") not in left and ("shrink", "tie") in left and ("replace", "commit") in left
    assert len(left) == len(matrix.cases_of(row)) - 1
