"""Real ranks killed while parameters are under way, and the next forward waits for them: the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from unicron.demo import matrix
from unicron.demo.matrix_cases import Row
from unicron.demo.variant import Variant

CASES = ("gather-inside", "gather-late-first", "gather-late", "reset-gather-late")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2)])
def test_who_dies_is_replaced_bit_for_bit(tp: int, pp: int, tmp_path: Path) -> None:
    row = Row(f"{tp},{pp},2-distributed-overlap", tp, pp, 2, sharded=True, variant=Variant(overlap=True))
    chosen = [found for found in matrix.cases_of(row) if found[1].name in CASES]
    results = list(matrix.run_row(row, chosen, tmp_path))
    assert len(results) == len(CASES)
    wrong = {result["case"]: result["reasons"] for result in results if not result["passed"]}
    assert not wrong, wrong
    logs = [path.read_text() for path in tmp_path.rglob("stderr.log")]
    assert any("gathers the parameters under the next forward" in text for text in logs)
