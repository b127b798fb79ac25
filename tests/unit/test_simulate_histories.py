"""Histories: as bursty, as unevenly spread and as long in repair as the clusters they are drawn after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from unicron.simulate.generate import CAUSES, RATE, Rates, generate
from unicron.simulate.history import HistoryProblem, Kind
from unicron.simulate.tables import gpu_hours, moves, verdict
from unicron.simulate.traces import TRACE_A, TRACE_B, by_counts, read_incidents

INCIDENTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "infinitehbd" / "incidents.csv"


def test_rate_mix_and_bursts() -> None:
    history = generate(2048, 54.0, 1, Rates())
    assert len(history) == pytest.approx(RATE * 2.048 * 54, rel=0.3)
    shares = np.bincount(history.cause, minlength=len(CAUSES) + 2)[: len(CAUSES)] / len(history)
    wanted = np.array([cause.number for cause in CAUSES]) / sum(cause.number for cause in CAUSES)
    assert np.abs(shares - wanted).max() < 0.06
    many = generate(2048, 5400.0, 2, Rates())
    intervals = np.diff(many.at_s)
    assert intervals.std() / intervals.mean() == pytest.approx(1.76, rel=0.05)
    assert (np.diff(history.at_s) >= 0).all() and (history.node < 2048).all()


def test_nodes_that_fail_again() -> None:
    """584 incidents on 400 nodes: the worst tenth of the nodes that were hit have 27.6 % of them."""
    shares = []
    for seed in range(40):
        history = generate(400, 348.0, seed, Rates(per_1000_node_days=4.2))
        counts = np.sort(np.bincount(history.node, minlength=400))[::-1]
        hit = int((counts > 0).sum())
        shares.append(counts[: round(hit / 10)].sum() / counts.sum())
    assert float(np.mean(shares)) == pytest.approx(0.276, abs=0.02)


def test_repair_times() -> None:
    history = generate(4096, 3000.0, 3, Rates())
    gpu = history.lasts_s[np.isin(history.cause, (0, 1))] / 3600
    assert np.median(gpu) == pytest.approx(3.21, rel=0.1)
    assert (history.lasts_s[history.kind == Kind.PROCESS] == 0).sum() > 0


def test_spot_and_moves_come_on_top() -> None:
    history = generate(100, 10.0, 0, Rates(preempt_per_1000_node_days=200.0, moves_every_s=600.0))
    assert (history.kind == Kind.MOVE).sum() == 1439
    assert (history.kind == Kind.PREEMPT).sum() == pytest.approx(200, rel=0.5)


def test_a_cluster_of_65536_gpus_for_a_year() -> None:
    assert len(generate(8192, 365.0, 0, Rates())) == pytest.approx(RATE * 8.192 * 365, rel=0.1)


def test_too_much_is_refused() -> None:
    with pytest.raises(HistoryProblem, match="too many"):
        generate(8192, 1e7, 0, Rates())


@pytest.mark.parametrize("counts", [TRACE_A, TRACE_B], ids=["a", "b"])
def test_traces_by_their_counts(counts: object) -> None:
    trace = TRACE_A if counts is TRACE_A else TRACE_B
    history = by_counts(trace, 16, 5)
    assert (history.kind == Kind.NODE).sum() == trace.node_faults
    assert len(history) == trace.node_faults + trace.others
    away = history.lasts_s[history.kind == Kind.NODE] / 86_400
    assert away.min() >= trace.repair_days[0] and away.max() <= trace.repair_days[1]


def test_a_table_of_incidents(tmp_path: Path) -> None:
    file = tmp_path / "incidents.csv"
    file.write_text(
        "node,start_day,end_day,duration_h,level,class,desc,mapped_severity\n"
        "n003,1.5,2.0,12,H,GPU,ECC,SEV1\nn001,0.5,0.75,6,S,Tool,late,SEV2\n"
    )
    history = read_incidents(file)
    assert history.num_nodes == 4 and history.duration_s == 2 * 86_400
    assert history.at_s.tolist() == [43_200.0, 129_600.0] and history.kind.tolist() == [Kind.PROCESS, Kind.NODE]
    assert history.lasts_s.tolist() == [0.0, 43_200.0] and history.causes == ("Tool: late", "GPU: ECC")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node,start_day\n", "no column"),
        ("node,start_day,end_day,class,desc,mapped_severity\n", "no incident"),
        ("node,start_day,end_day,class,desc,mapped_severity\nnX,1,2,a,b,SEV1\n", "line 2"),
        ("node,start_day,end_day,class,desc,mapped_severity\nn1,1,2,a,b,SEV9\n", "line 2"),
    ],
)
def test_a_bad_table_is_refused(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "incidents.csv"
    file.write_text(text)
    with pytest.raises(HistoryProblem, match=says):
        read_incidents(file)


def test_the_real_cluster() -> None:
    if not INCIDENTS.exists():
        pytest.skip(f"{INCIDENTS} is not here: it is never committed")
    history = read_incidents(INCIDENTS, 400)
    assert len(history) == 584 and history.duration_s == 349 * 86_400
    assert (history.kind == Kind.NODE).sum() == 565


def test_published_percentages_come_out_where_the_recipe_gives_them() -> None:
    """TrainMover: standby against none, -35.91 % at 8K and -55 % at 64K and 128K; only without its 2-minute term."""
    rows = {(row["GPUs"], row["infrastructure s"]): row["standby against none %"] for row in gpu_hours().rows}
    assert rows[8192, 0.0] == pytest.approx(-35.9, abs=1.0)
    assert rows[65536, 0.0] == pytest.approx(-55, abs=1.0) and rows[131072, 0.0] == pytest.approx(-55, abs=1.0)
    assert rows[65536, 120.0] == pytest.approx(-15.5, abs=1.0)


def test_where_unicron_is_not_ahead_is_counted_from_the_rows() -> None:
    found = {"here": {"a": (1.0, 2.0), "b": (3.0, 2.0)}, "there": {"a": (1.0, 2.0), "b": (1.0, 2.0)}}
    assert verdict(found, less_is_better=True, why="so") == ("unicron is not ahead of b at here (3 against 2): so",)
    all_less = {"here": {"a": (1.0, 2.0)}}
    assert verdict(all_less, less_is_better=True, why="") == ("unicron is ahead of every other policy in every row",)
    assert "not ahead of a at here" in verdict(all_less, less_is_better=False, why="")[0]


def test_ettr_under_moves_every_ten_minutes() -> None:
    """TrainMover's table: .98 .98 .98 .97 from 128 GPUs on."""
    for row in moves().rows:
        said, modelled = float(str(row["TrainMover, published"])), float(str(row["TrainMover, modelled"]))
        assert modelled == pytest.approx(said, abs=0.011)
