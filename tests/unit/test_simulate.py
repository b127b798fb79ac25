"""Policies on histories: sums that must come out, cases worked out by hand, and what is said of them."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest

from unicron.simulate import measured
from unicron.simulate.account import USES
from unicron.simulate.explain import summary
from unicron.simulate.history import History, HistoryProblem, Kind, history_of
from unicron.simulate.parameters import PARAMETERS, ParameterProblem, values_of
from unicron.simulate.policies import POLICIES
from unicron.simulate.scenario import (
    Failures,
    Outcome,
    Scenario,
    ScenarioProblem,
    ScenarioTask,
    Width,
    first_widths,
    play,
    setting_of,
    simulate,
    tasks_from,
)
from unicron.simulate.sensitivity import swings

ROOT = Path(__file__).resolve().parents[2]
HOUR_S = 3600.0
SMALL = Scenario(
    tasks=(
        ScenarioTask("a", "gpt3-1.3b", 2.0, Width(1, 3)),
        ScenarioTask("b", "gpt3-1.3b", 1.0, Width(1, 3)),
    ),
    nodes=6, gpu="A100-80GB", days=4.0, standbys=1, failures=Failures(per_1000_node_days=800.0, repair_scale=0.1),
    policies=tuple(POLICIES),
)  # fmt: skip
ONE = Scenario(tasks=(ScenarioTask("a", "gpt3-1.3b", 1.0, Width(1, 2)),), nodes=2, gpu="A100-80GB", standbys=0)


def one(policy: str, rows: list[tuple[float, int, Kind, float, str]], **changes: object) -> Outcome:
    """One job on two nodes for ten hours."""
    assume = changes.pop("assume", {})
    scenario = msgspec.structs.replace(ONE, **changes)
    history = history_of("by hand", scenario.nodes, 10 * HOUR_S, rows)
    return play(scenario, history, tasks_from(scenario, scenario.nodes), policy, assume)  # type: ignore[arg-type]


# ---------------------------------------------------------------- sums


@pytest.mark.parametrize("seed", range(4))
def test_every_gpu_hour_is_accounted_for(seed: int) -> None:
    simulated = simulate(msgspec.structs.replace(SMALL, seed=seed))
    for name, outcome in simulated.outcomes.items():
        account = outcome.account
        total = account.num_gpus * account.duration_s
        assert sum(account.gpu_s.values()) == pytest.approx(total, rel=1e-9), name
        assert set(account.gpu_s) == set(USES)
        assert min(account.gpu_s.values()) >= -1e-6, (name, account.gpu_s)
        assert 0 <= outcome.ettr <= 1
        assert 0 < account.flop <= simulated.ideal * account.duration_s * (1 + 1e-9), name
        curve = account.curve
        assert curve.sum() * account.duration_s / len(curve) == pytest.approx(account.flop, rel=1e-9), name
        assert account.num_events >= len(simulated.history)


def test_all_policies_break_the_same_nodes() -> None:
    simulated = simulate(SMALL)
    down = {outcome.account.gpu_s["down"] for outcome in simulated.outcomes.values()}
    assert len(down) == 1 and down.pop() > 0


def test_the_same_seed_is_the_same_history_and_another_is_another() -> None:
    first, second = (simulate(msgspec.structs.replace(SMALL, seed=3, policies=("unicron",))) for _ in range(2))
    other = simulate(msgspec.structs.replace(SMALL, seed=4, policies=("unicron",)))
    waf = [run.outcomes["unicron"].account.flop for run in (first, second, other)]
    assert waf[0] == waf[1] != waf[2]


# ---------------------------------------------------------------- by hand


def test_checkpoint_restart_by_hand() -> None:
    """A process dies after 1.4 h of training in a job that saves every half hour: 0.4 h are computed again."""
    at_s = 1.4 * HOUR_S
    outcome = one("megatron", [(at_s, 0, Kind.PROCESS, 0.0, "x")])
    values = values_of({})
    again_s = at_s % values["common.checkpoint_interval_s"]
    gpu_s = outcome.account.gpu_s
    assert gpu_s["recompute"] == pytest.approx(again_s * 16)
    assert gpu_s["detection"] == pytest.approx(values["megatron.detect_other_s"] * 16)
    assert gpu_s["infrastructure"] == pytest.approx(values["common.infrastructure_s"] * 16)
    assert gpu_s["transition"] == pytest.approx(80.0 * 16)  # as at 32 GPUs, the least that was published
    down_s = outcome.account.downtimes[0].total_s
    assert outcome.ettr == pytest.approx(1 - (again_s + down_s) / (10 * HOUR_S))


def test_a_fixed_layout_waits_for_its_node_and_a_spare_ends_the_wait() -> None:
    lost = [(HOUR_S, 0, Kind.NODE, 2 * HOUR_S, "x")]
    waiting = one("trainmover", lost).account.gpu_s["waiting"]
    assert waiting == pytest.approx(2 * HOUR_S * 8)  # the other node waits
    assert one("trainmover", lost, nodes=3, standbys=1).account.gpu_s["waiting"] == 0


def test_a_node_that_fails_while_away_only_stays_away_longer() -> None:
    rows = [(HOUR_S, 0, Kind.NODE, 2 * HOUR_S, "x"), (2 * HOUR_S, 0, Kind.NODE, 4 * HOUR_S, "x")]
    assert one("torchft", rows).account.gpu_s["down"] == pytest.approx(5 * HOUR_S * 8)


def test_unicron_shrinks_and_grows_with_the_planner() -> None:
    outcome = one("unicron", [(HOUR_S, 0, Kind.NODE, 2 * HOUR_S, "x")])
    assert outcome.account.num_plans == 2
    assert outcome.account.gpu_s["waiting"] == 0
    assert outcome.account.gpu_s["productive"] == pytest.approx((10 * 16 - 2 * 8) * HOUR_S, rel=1e-2)


def test_all_nodes_may_be_gone_at_once() -> None:
    rows = [(HOUR_S, node, Kind.NODE, HOUR_S * (1 + node), "x") for node in range(2)]
    for policy in POLICIES:
        outcome = one(policy, rows)
        assert outcome.account.gpu_s["down"] == pytest.approx(3 * HOUR_S * 8)
        assert outcome.account.gpu_s["productive"] > 6 * HOUR_S * 16 * 0.9, policy


@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.PREEMPT])
def test_what_is_announced_costs_no_work_and_no_detection(kind: Kind) -> None:
    for policy in POLICIES:
        gpu_s = one(policy, [(1.4 * HOUR_S, 0, kind, HOUR_S, "x")]).account.gpu_s
        assert gpu_s["recompute"] == 0 and gpu_s["detection"] == 0, policy
        assert gpu_s["transition"] > 0, policy


def test_planned_moves_by_hand() -> None:
    rows = [(600.0 * number, 0, Kind.MOVE, 0.0, "move") for number in range(1, 60)]
    outcome = one("trainmover", rows, assume={"common.infrastructure_s": 0.0})
    assert outcome.ettr == pytest.approx(1 - 59 * 11.5 / (10 * HOUR_S), abs=1e-9)


def test_detection_is_counted_for_all_or_none() -> None:
    for name, counted in (("none", False), ("same", True)):
        simulated = simulate(msgspec.structs.replace(SMALL, detection=name))
        for policy, outcome in simulated.outcomes.items():
            assert (outcome.account.gpu_s["detection"] > 0) == (counted and policy != "") or policy == "torchft"


def test_unicrons_own_times_come_from_the_benches() -> None:
    assert measured.read(ROOT)._asdict() == measured.stored()._asdict()
    with pytest.raises(OSError):
        measured.read(ROOT / "nowhere")


def test_everybody_begins_with_the_planners_allocation() -> None:
    history = History("none", 6, 1.0, *(history_of("x", 6, 1.0, []).__dict__[n] for n in (
        "at_s", "node", "kind", "lasts_s", "cause")), ())  # fmt: skip
    tasks = tasks_from(SMALL, 6)
    assert sum(first_widths(tasks, 6, setting_of(SMALL, history, {}))) == 6


# ---------------------------------------------------------------- what is said


def test_who_is_ahead_is_said_with_a_reason() -> None:
    simulated = simulate(SMALL)
    lines = summary(simulated)
    ours = max(simulated.outcomes[name].account.flop for name in ("unicron", "unicron-standby"))
    ahead = {n for n, o in simulated.outcomes.items() if o.account.flop > ours}
    assert {line.split()[0] for line in lines if " more than " in line.split(":")[0]} == ahead
    assert lines


def test_a_parameter_moves_only_who_reads_it() -> None:
    simulated = simulate(msgspec.structs.replace(SMALL, policies=("unicron", "megatron")))
    found = swings(simulated)
    assert {swing.policy for swing in found if swing.what == "common.checkpoint_interval_s"} == {"megatron"}
    assert {swing.policy for swing in found if swing.what.startswith("unicron.")} == {"unicron"}
    assert found == sorted(found, key=lambda swing: -swing.width)


def test_every_parameter_has_a_range_around_its_value_and_is_read_by_somebody() -> None:
    gone = (Kind.NODE, Kind.PREEMPT)
    away = [
        (HOUR_S * n, node, kind, HOUR_S * 0.5, "x")
        for n, kind in enumerate(Kind, 1)
        for node in ((1,) if kind in gone else range(3))
    ]
    more = [(HOUR_S * 8, n, Kind.NODE, HOUR_S, "x") for n in range(2)]  # nobody is left: it starts again
    read = frozenset[str]().union(
        *(one(policy, [*away, *more], nodes=3, standbys=n).read for policy in POLICIES for n in (0, 1))
    )
    for row in PARAMETERS.values():
        assert row.low <= row.value <= row.high, row.name
        assert row.source and math.isfinite(row.value)
    assert set(PARAMETERS) - read == set()


# ---------------------------------------------------------------- refusals


def test_refusals_name_what_is_wrong() -> None:
    with pytest.raises(ParameterProblem, match=r"did you mean megatron\.detect_node_s"):
        values_of({"megatron.detect_nod_s": 1.0})
    with pytest.raises(ScenarioProblem, match="no policy slurm"):
        simulate(msgspec.structs.replace(SMALL, policies=("slurm",)))
    with pytest.raises(ScenarioProblem, match="no model 'gpt5'"):
        simulate(msgspec.structs.replace(SMALL, tasks=(ScenarioTask("a", "gpt5"),)))
    with pytest.raises(ScenarioProblem, match=r"give failures\.path"):
        simulate(msgspec.structs.replace(SMALL, failures=Failures(kind="file")))
    with pytest.raises(ScenarioProblem, match="standbys is 6"):
        simulate(msgspec.structs.replace(SMALL, standbys=6))
    with pytest.raises(HistoryProblem, match="event 1"):
        history_of("x", 2, 10.0, [(1.0, 2, Kind.NODE, 1.0, "c")])
