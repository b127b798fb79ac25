"""How far a result moves when an assumption does: every parameter at both ends of its range, one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from unicron.simulate.parameters import PARAMETERS, Parameter
from unicron.simulate.policies import POLICIES
from unicron.simulate.scenario import Outcome, Simulated, play, silent


class Swing(NamedTuple):
    """Mean WAF over the ideal at the low end, as assumed, at the high end. what: a parameter, or the scenario's own."""

    what: str
    policy: str
    low: float
    high: float
    at_low: float
    as_assumed: float
    at_high: float
    source: str

    @property
    def width(self) -> float:
        return max(self.at_low, self.as_assumed, self.at_high) - min(self.at_low, self.as_assumed, self.at_high)


def swings(simulated: Simulated, tell: Callable[[str], None] = silent) -> list[Swing]:
    """Of every parameter of every policy that was simulated, the widest first; ``tell`` hears which policy begins."""
    found: list[Swing] = []
    for policy, outcome in simulated.outcomes.items():
        tell(f"what {policy} rests on")
        found += _of_policy(simulated, policy, outcome)
    found += [swing for policy in simulated.outcomes if (swing := _standbys(simulated, policy))]
    found = [swing for swing in found if swing.width > 1e-9]
    return sorted(found, key=lambda swing: -swing.width)


def _of_policy(simulated: Simulated, policy: str, outcome: Outcome) -> list[Swing]:
    rows = (row for row in PARAMETERS.values() if row.name in outcome.read)  # what was never asked for moves nothing
    return [_swing(simulated, policy, row) for row in rows]


def _swing(simulated: Simulated, policy: str, row: Parameter) -> Swing:
    scenario = simulated.scenario
    ends = []
    for value in (row.low, row.high):
        outcome = play(scenario, simulated.history, simulated.tasks, policy, {row.name: value})
        ends.append(outcome.account.waf_mean / simulated.ideal)
    source = f"{row.provenance}: {row.source}"
    return Swing(row.name, policy, row.low, row.high, ends[0], _now(simulated, policy), ends[1], source)


def _standbys(simulated: Simulated, policy: str) -> Swing | None:
    """Half and twice as many nodes standing by."""
    scenario = simulated.scenario
    if not POLICIES[policy].uses_standbys:
        return None
    low, high = scenario.standbys // 2, min(max(2 * scenario.standbys, 1), simulated.history.num_nodes // 2)
    ends = []
    for standbys in (low, high):
        other = msgspec.structs.replace(scenario, standbys=standbys)
        outcome = play(other, simulated.history, simulated.tasks, policy, {})
        ends.append(outcome.account.waf_mean / simulated.ideal)
    now = _now(simulated, policy)
    return Swing("standbys", policy, low, high, ends[0], now, ends[1], "the scenario's own")


def _now(simulated: Simulated, policy: str) -> float:
    return simulated.outcomes[policy].account.waf_mean / simulated.ideal
