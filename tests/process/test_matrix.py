"""A seeded sample of `make matrix` at layouts that the demo's own sample does not have."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unicron.demo import chain, histories, matrix, runner, scenarios
from unicron.demo.matrix_cases import ROWS
from unicron.demo.progress import Progress

SEED = 2026
# (case that is always run, so many more drawn). What is special there: chunks of an interleaved pipeline take turns; no
# other replica has what the open step writes; and not every rank shares a group with the lost one.
# And whoever learned of the commit from a peer must not do the script's own collectives in the heir's first forward.
# With experts spread over lanes a rank waits for tokens of another, and all lanes hold what is outside of experts.
SAMPLES = {
    "1,2,2-interleaved": ("backward", 1), "2,2,1": ("idle", 1), "2,1,2": ("confirm-inside", 1),
    "1,1,4-ep2": ("expert-inside", 1), "1,1,4-distributed-ep2": ("gather-inside", 1), "1,1,4-experts": ("step", 1),
    "1,1,4-distributed-instances-2": ("gather-inside", 1),
}  # fmt: skip
HISTORIES = (5, 7)  # a node lost at the copy of a segment and at the meeting of others' failures, and its return


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_of_the_matrix(name: str, tmp_path: Path) -> None:
    (row,) = [row for row in ROWS if row.name == name]
    always, more = SAMPLES[name]
    cases = [found for found in matrix.cases_of(row) if found[0] == matrix.REPLACED]
    drawn = random.Random(f"{SEED} {name}").sample([found for found in cases if found[1].name != always], more)
    chosen = [found for found in cases if found[1].name == always] + drawn
    results = list(matrix.run_row(row, chosen, tmp_path))
    assert len(results) == len(chosen) == 1 + more
    wrong = {result["case"]: result["reasons"] for result in results if not result["passed"]}
    assert not wrong, f"{wrong}\nreplay: python -m unicron.demo.matrix --rows {name}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "case"), [("1,1,4-ep2", "expert-inside"), ("1,1,4-experts", "reduce-inside")])
def test_mixtures_of_experts_shrink_by_whole_replicas(name: str, case: str, tmp_path: Path) -> None:
    (row,) = [row for row in ROWS if row.name == name]
    chosen = [found for found in matrix.cases_of(row) if (found[0], found[1].name) == (matrix.SHRUNK, case)]
    (result,) = matrix.run_row(row, chosen, tmp_path)
    assert result["passed"], f"{result['reasons']}\nreplay: python -m unicron.demo.matrix --rows {name} --cases {case}"


@pytest.mark.timeout(300)
def test_after_a_return_to_a_checkpoint_nobody_evaluates_where_others_train(tmp_path: Path) -> None:
    """Heirs are given the lost iterations by their script, and the others of their replica are in one train_step."""
    layout = runner.layout_of(2, 1, 2)
    options = runner.Options(layout, folder=tmp_path, measure_unmanaged=False, iterations=16)
    scenario = replace(scenarios.make("checkpoint", layout), evaluate_every=1, window=(), digests=True)
    with runner.Suite(options, Progress()) as suite:
        result = suite.one(replace(scenario, expect=replace(scenario.expect, gradient=False))).result
    assert result["passed"], result["reasons"]
    assert len(result["incidents"]) == layout.dp


@pytest.mark.timeout(300)
def test_in_exact_mode_every_history_ends_in_the_same_bits(tmp_path: Path) -> None:
    layout = runner.layout_of(1, 1, 4, exact=True)
    with runner.Suite(runner.Options(layout, folder=tmp_path, measure_unmanaged=False), Progress()) as suite:
        wanted = histories.reference_digest(suite, layout)
        found = {seed: histories.judge(suite, histories.history(layout, seed), layout, wanted) for seed in HISTORIES}
    wrong = {seed: (result["says"], result["reasons"]) for seed, result in found.items() if not result["passed"]}
    assert not wrong, f"{wrong}\nreplay: python -m unicron.demo.histories --seed {min(wrong)} --count 1"
    assert all(result["incidents"] for result in found.values())


def test_a_history_that_ended_in_another_digest_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "histories.jsonl"
    path.write_text(
        '{"layout": "1,1,4", "optimizer": "plain", "seed": 3, "digest": "a", "passed": true}\n'
        '{"layout": "1,1,4", "optimizer": "plain", "seed": 4, "digest": "b", "passed": true}\n'
        '{"layout": "1,1,4", "optimizer": "plain", "seed": 5, "digest": "c", "passed": false}\n'
        '{"layout": "1,1,4", "optimizer": "distributed", "seed": 6, "digest": "a", "passed": true}\n'
    )
    done = histories.known(path, "1,1,4", "plain")
    assert histories.left_of(range(3, 7), done, "a") == [4, 5, 6]


def test_a_case_whose_incident_names_no_iteration_ends_where_training_is(tmp_path: Path) -> None:
    """Else the next case is judged by what this one computed again."""
    cluster = SimpleNamespace(task=lambda name: {"iteration": 41})
    eye = chain._Eye(cluster, "t", tmp_path)
    assert eye._interrupted([{"iteration": -1}]) == 41
    assert eye._interrupted([{"iteration": 12}, {"iteration": 13}]) == 13
    assert eye._interrupted([]) == 41


def test_nothing_is_broken_before_an_iteration_has_a_usual_time(tmp_path: Path) -> None:
    """In the very first everybody computes again, and no lost time can be told."""
    eye = chain._Eye(SimpleNamespace(), "t", tmp_path)
    view = {"phase": "running", "open_incidents": 0, "workers": []}
    assert [eye._is_ready({**view, "iteration": i}, set()) for i in (-1, 0, 2, 3)] == [False, False, False, True]


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
