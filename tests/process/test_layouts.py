"""Real processes, a real megatron-core GPT: a task changes its layout in memory, also with a death in the middle."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from unicron.demo.layouts import Course

# From a pipeline with tied embeddings and main parameters of their own: its copies must have been equal all along.
WAY = ((1, 2, 1), (2, 1, 1), (1, 2, 2))


@pytest.mark.timeout(300)
def test_a_task_goes_through_layouts_and_survives_a_kill_in_a_move(tmp_path: Path) -> None:
    said: list[str] = []
    options = Namespace(folder=tmp_path, bf16=True, optimizer="distributed", instances=2, way=WAY, leg=2, kill=True)
    with Course(options, said.append) as course:
        run, view = course.moving()
        incidents = course.incidents()
    moves = view["layout_changes"]
    assert [(move["from"], move["to"]) for move in moves] == [
        ("1,2,1,sharded", "2,1,1,sharded"), ("2,1,1,sharded", "1,2,2,sharded"),
    ]  # fmt: skip
    assert moves[0]["digest"]
    assert sorted(run.losses) == list(range(len(run.losses))), "no iteration is missing or was done twice elsewhere"
    assert not run.disagreements
    lines = [json.loads(line) for path in tmp_path.rglob("rank_*.jsonl") for line in path.read_text().splitlines()]
    assert len({line["tokens"] for line in lines if line["event"] == "iteration"}) == 1, "as often as there are ranks"
    assert run.losses[len(run.losses) - 1] < run.losses[0]
    assert [i["fault"] for i in incidents if i["severity"] == "SEV2"][:1] == ["worker lost"], said
    assert view["layout_change_refused"].startswith("called off")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("optimizer", ["plain", "distributed"])
def test_a_tied_embedding_whose_copies_came_to_differ_moves_all_the_same(tmp_path: Path, optimizer: str) -> None:
    """Three replicas are not added up in one order everywhere, so the last stage's copy differs in its last bits; every
    change of layout was called off for it, again and again."""
    way = ((1, 2, 3), (1, 2, 1))
    options = Namespace(folder=tmp_path, bf16=False, optimizer=optimizer, instances=1, way=way, leg=4, kill=False)
    said: list[str] = []
    with Course(options, said.append) as course:
        run, view = course.moving()
    assert [move["from"].removesuffix(",sharded") for move in view["layout_changes"]] == ["1,2,3"], said
    assert not run.disagreements and run.losses[len(run.losses) - 1] < run.losses[0]
