"""The report of a simulation: one HTML page without links to anywhere, and its figures as one PNG beside it."""

from __future__ import annotations

import base64
import html
import io
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from unicron.simulate.account import BINS, LOST
from unicron.simulate.explain import summary
from unicron.simulate.measured import stored
from unicron.simulate.parameters import PARAMETERS, values_of
from unicron.simulate.policies import POLICIES
from unicron.simulate.scenario import Simulated
from unicron.simulate.sensitivity import Swing

DAY_S = 86_400.0
SWINGS_MAX = 24  # in the figure; the table has all
STYLE = (
    "body{font:15px/1.45 sans-serif;max-width:70em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "td:first-child,th:first-child{text-align:left}img{max-width:100%}.m{color:#777;font-size:85%}"
)


def write_report(simulated: Simulated, swings: Sequence[Swing], path: Path) -> tuple[Path, Path]:
    """Writes path and path with .png; returns both."""
    picture = figure(simulated, swings)
    png = path.with_suffix(".png")
    png.write_bytes(picture)
    path.write_text(page(simulated, swings, picture), encoding="utf-8")
    return path, png


# ---------------------------------------------------------------- figures


def figure(simulated: Simulated, swings: Sequence[Swing]) -> bytes:
    """WAF over time, GPU-hours lost by cause, downtime per event, and how far assumptions move the result."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = swings[:SWINGS_MAX]
    picture = Figure(figsize=(13, 13 + 0.16 * len(shown)), layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(3, 2, gridspec_kw={"height_ratios": (4, 4, 4 + 0.16 * len(shown))})
    grid = axes[0, 0].get_gridspec()
    for place in (*axes[0, :], *axes[2, :]):
        place.remove()
    _draw_waf(picture.add_subplot(grid[0, :]), simulated)
    _draw_lost(axes[1, 0], simulated)
    _draw_downtime(axes[1, 1], simulated)
    _draw_swings(picture.add_subplot(grid[2, :]), shown)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=90)
    return buffer.getvalue()


def _draw_waf(axes: Any, simulated: Simulated) -> None:
    days = [(number + 0.5) / BINS * simulated.history.duration_s / DAY_S for number in range(BINS)]
    for number, (name, outcome) in enumerate(simulated.outcomes.items()):
        style = ("-", "--", ":")[number // 10 % 3]  # matplotlib has ten colours
        axes.plot(days, outcome.account.curve / simulated.ideal, style, label=name, linewidth=1)
    axes.set(title="WAF over time, share of the ideal (modelled)", xlabel="day", ylim=(-0.02, 1.05))
    axes.legend(fontsize=8, ncol=3)


def _draw_lost(axes: Any, simulated: Simulated) -> None:
    names = list(simulated.outcomes)
    left = [0.0] * len(names)
    for use in LOST:
        hours = [simulated.outcomes[name].account.gpu_hours[use] for name in names]
        if any(hours):
            axes.barh(names, hours, left=left, label=use)
            left = [a + b for a, b in zip(left, hours, strict=True)]
    axes.set(title="GPU-hours lost by cause (modelled)", xlabel="GPU-hours")
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _draw_downtime(axes: Any, simulated: Simulated) -> None:
    names, data = [], []
    for name, outcome in simulated.outcomes.items():
        seconds = [down.total_s for down in outcome.account.downtimes if down.total_s > 0]
        if seconds:
            names.append(name)
            data.append(seconds)
    if data:
        axes.boxplot(data, orientation="horizontal", tick_labels=names, whis=(1, 99), sym=".")
        axes.set_xscale("log")
        axes.invert_yaxis()
    axes.set(title="downtime per event, not waiting (modelled)", xlabel="s")


def _draw_swings(axes: Any, swings: Sequence[Swing]) -> None:
    for place, swing in enumerate(swings):
        all_three = (swing.at_low * 100, swing.at_high * 100, swing.as_assumed * 100)
        axes.plot((min(all_three), max(all_three)), (place, place), linewidth=5, alpha=0.6, solid_capstyle="butt")
        axes.plot([swing.as_assumed * 100], [place], "k|")
    axes.set_yticks(range(len(swings)), [f"{s.policy}: {s.what} {s.low:g} ... {s.high:g}" for s in swings], fontsize=8)
    axes.invert_yaxis()
    axes.set(title="mean WAF, % of the ideal, as one assumption goes over its range (modelled)")


# ---------------------------------------------------------------- page


def page(simulated: Simulated, swings: Sequence[Swing], picture: bytes) -> str:
    scenario, history = simulated.scenario, simulated.history
    image = base64.b64encode(picture).decode()
    parts = [
        f"<h1>{html.escape(scenario.name)}</h1>",
        (
            f"<p>{history.num_nodes} nodes of {scenario.gpus_per_node} {html.escape(scenario.gpu)}, "
            f"{history.duration_s / DAY_S:.0f} days, {len(history)} failures ({html.escape(history.name)}), "
            f"seed {scenario.seed}, {scenario.standbys} standbys for the policies that keep any, "
            f"detection: {scenario.detection}.</p>"
        ),
        "<p class=m>Every number here is modelled, unless its row says that it was measured or published.</p>",
        _table(rows_of(simulated)),
        "<h2>Who is ahead, and why (modelled)</h2>",
        _list(summary(simulated)),
        f"<img alt='figures' src='data:image/png;base64,{image}'>",
        "<h2>Downtime per event (s, modelled)</h2>",
        _table(_downtimes(simulated)),
        "<h2>Sensitivity: mean WAF over the ideal (modelled)</h2>",
        _table(_swing_rows(swings)),
        "<h2>Models</h2>",
        _table(_models(simulated)),
        "<h2>What they assume</h2>",
        _table(_assumptions(simulated)),
        "<h2>unicron's own times, measured on two GPUs</h2>",
        _table(_measured()),
    ]
    head = f"<!doctype html><meta charset=utf-8><title>unicron simulate</title><style>{STYLE}</style>"
    return head + "\n".join(parts)


def rows_of(simulated: Simulated) -> list[dict[str, object]]:
    """A policy a row: what people read first."""
    return [
        {
            "policy": name,
            "WAF, share of ideal": outcome.account.waf_mean / simulated.ideal,
            "ETTR": outcome.ettr,
            "GPU-hours wasted": f"{outcome.account.gpu_hours_wasted:,.0f}",
            "failures and returns": outcome.account.num_events,
            "downtime, median s": _median(down.total_s for down in outcome.account.downtimes),
        }
        for name, outcome in simulated.outcomes.items()
    ]


def _downtimes(simulated: Simulated) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, outcome in simulated.outcomes.items():
        kinds = sorted({down.kind for down in outcome.account.downtimes})
        for kind in kinds:
            seconds = sorted(down.total_s for down in outcome.account.downtimes if down.kind == kind)
            rows.append({
                "policy": name, "event": kind, "count": len(seconds), "median": statistics.median(seconds),
                "p99": seconds[min(len(seconds) - 1, int(len(seconds) * 0.99))], "most": seconds[-1],
            })  # fmt: skip
    return rows


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0


def _swing_rows(swings: Sequence[Swing]) -> list[dict[str, object]]:
    return [
        {"assumption": s.what, "policy": s.policy, "low": s.low, "high": s.high, "WAF at low": s.at_low,
         "as assumed": s.as_assumed, "at high": s.at_high, "source": s.source}
        for s in swings
    ]  # fmt: skip


def _models(simulated: Simulated) -> list[dict[str, object]]:
    return [
        {"policy": name, "model": POLICIES[name].says, "what it leaves out": POLICIES[name].lacks}
        for name in simulated.outcomes
    ]


def _assumptions(simulated: Simulated) -> list[dict[str, object]]:
    values = values_of(simulated.scenario.assume)
    used = frozenset[str]().union(*(outcome.read for outcome in simulated.outcomes.values()))
    return [
        {"parameter": row.name, "value": values[row.name], "low": row.low, "high": row.high,
         "provenance": "scenario" if row.name in simulated.scenario.assume else row.provenance, "source": row.source}
        for row in PARAMETERS.values()
        if row.name in used
    ]  # fmt: skip


def _measured() -> list[dict[str, object]]:
    measured = stored()
    return [{"time": name, "s": getattr(measured, name), "source": source} for name, source in measured.sources.items()]


def _table(rows: Sequence[dict[str, object]]) -> str:
    if not rows:
        return "<p>none</p>"
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell(v))}</td>" for v in row.values()) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def cell(value: object) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float) and abs(value) < 1e5
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )


def as_json(simulated: Simulated) -> dict[str, object]:
    """The fields that scripts rely on, with more beside."""
    policies = {}
    for name, outcome in simulated.outcomes.items():
        account = outcome.account
        policies[name] = {
            "waf_mean": account.waf_mean,
            "waf_share_of_ideal": account.waf_mean / simulated.ideal,
            "ettr": outcome.ettr,
            "gpu_hours_wasted": account.gpu_hours_wasted,
            "gpu_hours": account.gpu_hours,
            "incidents": len(account.downtimes),
            "downtime_s": {
                kind: _median(down.total_s for down in account.downtimes if down.kind == kind)
                for kind in sorted({down.kind for down in account.downtimes})
            },
        }
    return {
        "seed": simulated.scenario.seed,
        "modelled": True,
        "history": {
            "name": simulated.history.name,
            "nodes": simulated.history.num_nodes,
            "events": len(simulated.history),
        },
        "policies": policies,
        "notes": summary(simulated),
        "events_per_s": simulated.events_per_s,
        "scenario": msgspec.to_builtins(simulated.scenario),
    }
