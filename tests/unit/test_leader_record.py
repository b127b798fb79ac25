"""What `make leaders` keeps is of the code it was seen with."""

from __future__ import annotations

from pathlib import Path

import msgspec

from leader_record import Kept, Record, Row

ROW = Row(seed=1, number=1, fault="kill", takeover_s=2.0, joined_s=2.1, answered_s=2.0, pause_s=0.0, load=1.0)


def test_rounds_of_other_sources_are_run_again(tmp_path: Path) -> None:
    path = tmp_path / "leaders.json"
    Record(path, 2).add([ROW])
    same = Record(path, 2)
    assert same.has(1) and "1 rounds (1 of them known before" in same.words()
    assert not Record(path, 3).has(1)  # another lease
    kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    kept.sources = "of other code"
    path.write_bytes(msgspec.json.encode(kept))
    assert not Record(path, 2).has(1)
