"""Which rows have which cases, and where their faults are armed; what a history is judged by."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unicron.demo import histories, matrix
from unicron.demo.matrix_cases import REPLACE, ROWS, SHRINK, SHRINK_AGAIN, Case, Row, shrink_scenario
from unicron.demo.results import Run
from unicron.demo.runner import layout_of
from unicron.demo.scenarios import Act
from unicron.demo.variant import Variant
from unicron.demo.watch import Seen
from unicron.faults.kinds import fault_kind, fault_point

ROW = {row.name: row for row in ROWS}
CASE = {case.name: case for case in REPLACE}


def names_of(row: str, how: str = matrix.REPLACED) -> set[str]:
    return {case.name for its, case in matrix.cases_of(ROW[row]) if its == how}


def test_points_that_a_layout_does_not_pass_are_no_cases_of_it() -> None:
    assert "tensor-inside" in names_of("2,1,2") and not {"receive-inside", "tie-inside"} & names_of("2,1,2")
    assert {"receive-inside", "send-inside", "tie-inside"} <= names_of("1,2,2")
    assert not {"tensor-inside", "confirm-inside", "gather-inside"} & names_of("1,1,4")
    assert "gather-inside" in names_of("1,1,4-distributed") and "settle-inside" not in names_of("1,1,4-distributed")
    assert "settle-inside" in names_of("1,2,2-distributed-overlap")
    everywhere = {"reduce-inside", "reduce-seen-by-others", "commit-inside", "commit-seen-by-others", "log", "evaluate"}
    assert all(everywhere <= names_of(row.name) for row in ROWS)


def test_parameters_are_gathered_in_several_buckets_only_where_communication_is_hidden() -> None:
    assert "gather-some" in names_of("1,2,2-distributed-overlap")
    assert "gather-some" not in names_of("1,1,4-distributed")


def test_exact_sums_and_gradients_without_clipping_have_rows() -> None:
    exact = [row for row in ROWS if row.layout().exact]
    assert {row.sizes[:2] for row in exact} >= {(2, 1), (1, 2)} and any(row.variant.bf16 for row in exact)
    assert any(row.variant.unclipped for row in ROWS)
    assert "--unclipped" in Variant(unclipped=True).arguments() and "--unclipped" not in Variant().arguments()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_fault_has_a_place_and_no_rank_has_two(row: Row) -> None:
    layout = row.layout()
    for turn, (_, case) in enumerate(matrix.cases_of(row)):
        faults = case.faults(layout, turn)
        assert len(faults) == case.incidents() or case.again_incidents == 0
        assert len({fault.rank for fault in faults}) == len(faults), case.name
        for fault in faults:
            assert fault.rank < layout.world_size and fault_kind(fault.fault) and fault_point(fault.point)


def test_rows_with_buddies_lose_nodes_for_good_and_others_of_the_distributed_optimizer_do_not() -> None:
    shrunk = names_of("1,1,4-distributed-buddy", matrix.SHRUNK)
    assert {"step", "gather-inside", "buddy"} <= shrunk and "settle-inside" not in shrunk
    assert "settle-inside" in names_of("1,2,2-distributed-buddy-3", matrix.SHRUNK)
    assert not names_of("1,1,4-distributed", matrix.SHRUNK) and "gather" not in names_of("1,1,4", matrix.SHRUNK)


def test_where_buddies_are_the_node_comes_back_when_the_layout_is_narrower_and_it_must_be_wide_again() -> None:
    (case,) = [case for case in SHRINK if case.name == "step"]
    scenario = shrink_scenario(case, ROW["1,1,4-distributed-buddy-3"].layout(), 0)
    (back,) = scenario.acts
    assert (back.do, back.when_dp, scenario.expect.narrowed_to, scenario.expect.is_grown) == ("start_agent", 3, 3, True)
    assert (scenario.expect.outcome, scenario.expect.iterations_lost_max) == ("resized", 4)
    assert shrink_scenario(case, ROW["1,1,4-distributed-buddy"].layout(), 0).expect.iterations_lost_max == 0


def test_again_and_again_is_a_death_in_the_recovery_of_a_recovery_of_a_recovery() -> None:
    case = CASE["again-and-again"]
    faults = case.faults(layout_of(1, 1, 4), 1)
    assert [(f.rank, f.point, f.micro_batch) for f in faults[:-1]] == [(2, "heal", -1), (3, "heal", 1), (0, "heal", 2)]
    assert (faults[-1].rank, faults[-1].point) == (1, "compute") and case.incidents() == 4
    assert [f.rank for f in case.faults(layout_of(2, 1, 2), 0)] == [2, 1, 3, 0]


def test_again_inside_is_in_another_rank_of_the_same_replica() -> None:
    second, first = CASE["again-while-computing-again"].faults(layout_of(2, 1, 2), 1)
    assert (second.rank, first.rank) == (3, 2) and second.point == "compute_again"


def test_a_worker_may_die_in_the_recovery_of_a_lost_node() -> None:
    (case,) = [case for case in SHRINK_AGAIN if case.name == "again-while-computing-again"]
    scenario = shrink_scenario(case, layout_of(1, 1, 4), 0)
    assert [(f.rank, f.fault) for f in scenario.faults] == [(1, "kill"), (0, "node")]
    assert scenario.expect.severities == ("SEV1", "SEV2") and scenario.expect.recomputed_replicas == 4.0, "all"
    assert [act.node for act in scenario.acts] == [0], "the one that died"


def test_a_single_case_has_one_fault() -> None:
    (fault,) = Case("x", "kill", "commit", 2).faults(layout_of(1, 2, 2), 0)
    assert (fault.point, fault.micro_batch) == ("commit", 2)


# -------------------------------------------------------------------- histories


def judged(replicas: tuple[int, ...], tmp_path: Path, acts: tuple[Act, ...] = ()) -> dict[str, Any]:
    layout = layout_of(1, 1, 4, exact=True)
    run = Run(folder=tmp_path)
    seen = Seen(view={"phase": "done"}, replicas=replicas)
    suite = SimpleNamespace(reference=lambda _: run, carry_out=lambda *_, **__: (run, seen, {}, ""))
    scenario = histories._scenario(layout, 3, [], list(acts))
    wanted = histories.reference_digest(suite, layout)  # type: ignore[arg-type]
    return histories.judge(suite, scenario, layout, wanted)  # type: ignore[arg-type]


def test_a_history_ends_as_wide_as_it_began(tmp_path: Path) -> None:
    assert judged((0, 1, 2, 3), tmp_path)["passed"]
    assert judged((0, 1, 3), tmp_path)["reasons"] == [
        "3 of 4 replicas at the end: it did not become as wide as before"
    ]  # fmt: skip


def test_a_history_that_loses_a_node_goes_on_until_it_is_back() -> None:
    layout = layout_of(1, 1, 4, exact=True)
    for seed in range(20):
        history = histories.history(layout, seed)
        assert bool(history.extra_s) == bool(history.acts), seed


@pytest.mark.parametrize("sizes", [(1, 1, 4), (1, 2, 2)])
def test_overlapped_histories_fail_under_the_backward_and_lose_no_node(sizes: tuple[int, int, int]) -> None:
    layout = layout_of(*sizes, sharded=sizes[1] > 1)
    every = [histories.history(layout, seed) for seed in range(40)]
    faults = [fault for each in every for fault in each.faults]
    assert not any(each.acts or fault.fault == "node" for each in every for fault in each.faults)
    assert {fault.micro_batch for fault in faults if fault.point == "eager"} == {0, 1, 2}
    assert all(fault_point(fault.point) and fault_kind(fault.fault) for fault in faults)
    assert all(len({fault.rank for fault in each.faults}) == len(each.faults) for each in every)


def test_only_rows_whose_script_asks_for_overlap_reduce_under_the_backward() -> None:
    eager = {"eager-before", "eager-inside", "eager-seen-by-others", "exception-eager-inside"}
    assert eager <= names_of("1,2,2-distributed-overlap") & names_of("1,1,4-overlap")
    assert not eager & names_of("1,1,4") and {"eager-inside"} <= names_of("1,1,4-overlap", matrix.SHRUNK)


def test_histories_with_buddies_lose_nodes_without_spare_slots() -> None:
    layout = layout_of(1, 1, 4, sharded=True, exact=True, buddy=True)
    made = [histories.history(layout, seed) for seed in range(60)]
    lost = [[fault.fault for fault in history.faults].count("node") for history in made]
    assert set(lost) == {0, 1, 2} and all(not history.spares and not history.layouts for history in made)
    widths = {tuple(act.when_dp for act in history.acts) for history in made}
    assert {(), (0,), (3,), (2, 0)} == widths, "back at once, when narrower, and when narrower still"
    fixed = [histories.history(layout, seed, may_move=False) for seed in range(60)]
    assert {act.when_dp for history in fixed for act in history.acts} == {0}
