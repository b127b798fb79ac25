"""unicron plan: strict input, decisions that follow the reward, and their words."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from unicron.cli import main
from unicron.planner import Cluster, Planner, PlannerProblem, check
from unicron.planner.cluster import FLOPS_MAX, NUMBER_MAX, WEIGHT_MAX
from unicron.planner.explain import explain
from unicron.planner.planner import at_least
from unicron.planner.situation import situation_of

pytestmark = pytest.mark.timeout(30)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster.yaml"


def cluster(**changes: Any) -> dict[str, Any]:
    """Two nodes of four slots, two tasks; `changes` to the whole."""
    task = {"workers": {"min": 1, "max": 8}, "throughput": {n: n * 1e14 for n in range(1, 9)}}
    return {
        "nodes": [{"name": "n0", "slots": 4}, {"name": "n1", "slots": 4}],
        "tasks": [
            {**task, "name": "a", "holds": {"n0": 4}},
            {**task, "name": "b", "holds": {"n1": 4}, "weight": 0.5},
        ],
        **changes,
    }


def decoded(content: dict[str, Any]) -> Cluster:
    return msgspec.convert(content, Cluster)


def task(**changes: Any) -> dict[str, Any]:
    return {"name": "a", "workers": {"min": 1, "max": 2}, "throughput": {1: 1.0, 2: 2.0}, **changes}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tasks": [task(), task()]}, "two tasks are called a"),
        ({"nodes": [{"name": "n", "slots": 1}, {"name": "n", "slots": 1}]}, "two nodes are called n"),
        ({"tasks": [task(weight=-1.0)]}, "weight -1.0 must be"),
        ({"tasks": [task(weight=float("nan"))]}, "weight nan must be"),
        ({"tasks": [task(throughput={2: 1.0})]}, "throughput has no value for 1 slots"),
        ({"tasks": [task(throughput={1: 1.0, 2: float("nan")})]}, "throughput at 2 slots is nan"),
        ({"tasks": [task(throughput={1: 1.0, 2: "fast"})]}, "throughput at 2 slots is fast"),
        ({"tasks": [task(throughput={1: 1.0, 2: 1.0, 3: 1.0})]}, "throughput names 3 slots"),
        ({"tasks": [task(workers={"min": 9, "max": 9}, throughput={9: 1.0})]}, "needs 9 slots, the cluster has 8"),
        ({"tasks": [task(workers={"min": 2, "max": 1})]}, "workers.max 1 is below workers.min 2"),
        ({"tasks": [task(workers={"min": 0, "max": 1})]}, "workers.min is 0"),
        ({"tasks": [task(workers={"min": 1, "max": 4, "unit": 2})]}, "not workers.min and a multiple of unit"),
        ({"tasks": [task(relayout_s={2: -1.0})]}, "relayout_s at 2 slots is -1.0"),
        ({"tasks": [task(group=2)]}, "must be multiples of group 2"),
        ({"tasks": [task(group=8, workers={"min": 8, "max": 8}, throughput={8: 1.0})]}, "group 8 fits no node"),
        ({"tasks": [task(holds={"n9": 1})]}, "no node n9"),
        ({"tasks": [task(holds={"n0": 3})]}, "holds 3 slots, which its workers do not allow"),
        ({"nodes": [{"name": "n0", "slots": 4, "broken": 5}]}, "5 of 4 slots are broken"),
        ({"nodes": [{"name": "n0", "slots": 4, "broken": 1}, {"name": "n1", "slots": 4}]}, "hold 4 of 3 usable"),
        ({"failures": {"prior": 0.0}}, "failures.prior is 0.0"),
        ({"transitions": {"repair_s": float("nan")}}, "transitions.repair_s is nan"),
        ({"standbys": -1}, "standbys is -1"),
        ({"tasks": [task(weight=1e300)]}, "weight 1e+300 must be"),
        ({"tasks": [task(throughput={1: 1.0, 2: 1e308})]}, "throughput at 2 slots is 1e+308"),
        ({"tasks": [task(relayout_s={2: 1e308})]}, "relayout_s at 2 slots is 1e+308"),
        ({"failures": {"prior": 1e-300}}, "failures.prior is 1e-300"),
        ({"failures": {"prior_slot_s": 1e308}}, "failures.prior_slot_s is 1e+308"),
    ],
)
def test_bad_input_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlannerProblem, match=re.escape(reason)):
        check(decoded(cluster(**changes)))


def test_the_greatest_numbers_of_each_kind_can_be_planned_with() -> None:
    for prior in (1 / NUMBER_MAX, NUMBER_MAX):
        failures = {"prior": prior, "prior_slot_s": NUMBER_MAX, "slot_s": NUMBER_MAX}
        huge = task(weight=WEIGHT_MAX, throughput={1: FLOPS_MAX, 2: FLOPS_MAX}, holds={"n0": 2})
        planner = Planner(decoded(cluster(tasks=[huge, task(name="b")], failures=failures)))
        assert math.isfinite(planner.decision(("node:n0",)).reward)


@pytest.mark.parametrize("event", ["slot:c", "slot:a@n1", "node:n7", "join:n0", "join:", "standby", "flood", "join:0"])
def test_an_event_that_cannot_happen_is_refused(event: str) -> None:
    with pytest.raises(PlannerProblem):
        Planner(decoded(cluster())).decision([event])


def test_a_lost_node_costs_the_lighter_task() -> None:
    """a's node is lost; a slot earns twice as much in a as in b, so a takes b's, whole."""
    decision = Planner(decoded(cluster())).decision(["node:n0"])
    assert decision.allocation == {"a": 4, "b": 0}
    assert decision.how == "reconfigure"
    assert {(move.task, move.node, move.change) for move in decision.moves} == {
        ("a", "n0", -4), ("a", "n1", 4), ("b", "n1", -4),
    }  # fmt: skip


@pytest.mark.parametrize(("seconds", "slots"), [(20.0, 8), (1e9, 4)])
def test_another_layout_is_taken_when_its_time_is_worth_it(seconds: float, slots: int) -> None:
    """It is on 4 slots; on 8 it runs in another layout only."""
    gpt = {
        "name": "gpt", "workers": {"min": 4, "max": 4}, "throughput": {4: 4e14, 8: 7e14}, "holds": {"n0": 4},
        "relayout_s": {8: seconds},
    }  # fmt: skip
    planner = Planner(decoded(cluster(tasks=[gpt])))
    decision = planner.decision(())
    assert decision.allocation == {"gpt": slots}
    said = "goes over to another layout, on 8 slots, in about 20 s" in explain(planner, decision)
    assert said == (slots == 8)


def test_who_lost_slots_goes_on_without_them_before_it_changes_its_layout() -> None:
    gpt = {
        "name": "gpt", "workers": {"min": 2, "max": 4, "unit": 2}, "throughput": {2: 1e14, 3: 2e14, 4: 4e14},
        "holds": {"n0": 4}, "relayout_s": {3: 10.0},
    }  # fmt: skip
    planner = Planner(decoded(cluster(nodes=[{"name": "n0", "slots": 4}], tasks=[gpt])))
    counts = planner._counts[0]
    healthy = dict(zip(counts.tolist(), planner._seconds(planner.cluster.tasks[0], counts, None), strict=True))
    wounded = dict(zip(counts.tolist(), planner._seconds(planner.cluster.tasks[0], counts, 60.0), strict=True))
    assert healthy[3] == 10.0 and wounded[3] == 10.0 + planner.cluster.transitions.shrink_s


def test_a_finished_task_leaves_its_slots() -> None:
    decision = Planner(decoded(cluster())).decision(["finish:a"])
    assert decision.allocation == {"a": 0, "b": 8}
    assert decision.waf == pytest.approx(0.5 * 8e14)


def test_a_dead_process_restarts_in_place() -> None:
    hasty = cluster(failures={"prior_slot_s": 100.0})  # no time to earn what a move costs
    decision = Planner(decoded(hasty)).decision(["process:b"])
    assert decision.allocation == {"a": 4, "b": 4}
    assert decision.moves == ()


def test_no_move_that_costs_more_than_it_earns() -> None:
    """All slots in a would earn more per second, but not within the time until the next failure."""
    eager = decoded(cluster())
    assert Planner(eager).decision([]).allocation == {"a": 8, "b": 0}
    hasty = decoded(cluster(failures={"prior_slot_s": 100.0}))
    assert Planner(hasty).decision([]).allocation == {"a": 4, "b": 4}


def rigid(**changes: Any) -> Cluster:
    """One task that runs on four slots or not at all."""
    only = {"name": "a", "workers": {"min": 4, "max": 4}, "throughput": {4: 1e15}, "holds": {"n0": 4}}
    return decoded({"nodes": [{"name": "n0", "slots": 4}], "tasks": [only], **changes})


def test_standby_or_wait_by_the_same_reward() -> None:
    assert Planner(rigid(standbys=1)).decision(["slot:a"]).how == "standby"
    waits = Planner(rigid(transitions={"repair_s": 600.0})).decision(["slot:a"])
    assert (waits.how, waits.allocation, waits.moves) == ("wait", {"a": 4}, ())
    # A repair that outlasts the time until the next failure earns less than nothing: the task stops.
    gives_up = Planner(rigid(transitions={"repair_s": 1e9})).decision(["slot:a"])
    assert gives_up.allocation == {"a": 0}
    assert gives_up.other_rewards["wait"] < gives_up.reward


def test_every_entry_of_the_table_is_a_direct_solve() -> None:
    from unicron.runtime.files import load_yaml

    planner = Planner(load_yaml(EXAMPLE, Cluster))
    for event in planner.events:
        found, direct = planner.lookup(event), planner.solve([event])
        assert (found.reward_flop, found.moves) == (direct.reward_flop, direct.moves), event
        assert planner.decision([event]).from_table


def test_what_a_spent_standby_costs_is_said() -> None:
    from unicron.planner.explain import explain

    planner = Planner(rigid(standbys=1))
    said = explain(planner, planner.decision(["slot:a"]))
    assert "Chosen: spend standbys. Until they are back that may cost" in said
    assert planner.standby_cost(situation_of(planner.cluster, ("slot:a",))) > 0


def test_several_events_at_once_are_solved() -> None:
    planner = Planner(decoded(cluster()))
    both = planner.decision(["slot:a", "slot:a"])
    assert not both.from_table
    assert sum(both.allocation.values()) <= 6 or both.how == "wait"
    assert planner.decision(["join:8", "node:n0", "finish:b"]).allocation == {"a": 8, "b": 0}


def test_poisson_tail() -> None:
    assert at_least(0, 2.0) == pytest.approx(1.0)
    assert at_least(1, 0.0) == 0.0
    assert at_least(1, 1.0) == pytest.approx(0.6321205588)


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, str(EXAMPLE), "--event", "node:n1", "--json")
    found = json.loads(out)
    assert code == 0
    assert {"allocation", "waf", "reward", "moves", "reason", "planned_in_us", "from_table"} <= found.keys()
    assert found["from_table"] is True
    assert found["reason"].startswith("After node:n1 28 slots become 20.")
    assert found["unplaced"] == {}
    assert sum(found["allocation"].values()) <= 20


def test_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = plan(capsys, str(EXAMPLE), "--event", "all")
    assert code == 0
    assert "slot:gpt-7b" in out
    assert "join:8" in out
    code, out, _ = plan(capsys, str(EXAMPLE))
    assert code == 0
    assert "28 slots for 3 tasks." in out


def test_unknown_field_and_problem_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wrong = tmp_path / "cluster.yaml"
    wrong.write_text(EXAMPLE.read_text().replace("standbys:", "standby:"))
    code, _, err = plan(capsys, str(wrong))
    assert code == 1
    assert "unknown field standby; did you mean standbys?" in err
    wrong.write_text(EXAMPLE.read_text().replace("weight: 2.0", "wieght: 2.0"))
    assert "wieght" in plan(capsys, str(wrong))[2]
    wrong.write_text(EXAMPLE.read_text().replace("weight: 2.0", "weight: -2.0"))
    code, _, err = plan(capsys, str(wrong))
    assert code == 1
    assert err.count("\n") == 1
    assert "task gpt-7b: weight -2.0" in err
