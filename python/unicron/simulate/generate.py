"""Histories drawn from published rates: kinds of failure, bursts, nodes that fail again and again, repair times.

* How often what fails: Llama 3 405B, table 5 (16,384 H100 for 54 days), scaled to a rate per 1,000 node-days; Meta's
  RSC clusters and a 400-node pretraining cluster give rates of the same order (2.3 to 6.5).
* Bursts: gamma intervals with the coefficient of variation of the 400-node cluster (1.76; 1 would be Poisson).
* Nodes that fail again: each node's own rate is drawn from a gamma distribution whose shape gives that cluster's share
  of incidents on the worst tenth of the nodes that were hit (27.6 %).
* Repair: lognormal by what broke, median and mean of the same cluster.

Rejected: Poisson arrivals over equal nodes, which need fewer standbys than real clusters do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from unicron.simulate.history import EVENTS_MAX, History, HistoryProblem, Kind

DAY_S = 86_400.0
NODE_DAYS = 16_384 / 8 * 54 / 1000  # thousands, of the counts below
INTERVAL_CV = 1.76
OFFENDER_SHAPE = 1.4  # of the gamma distribution over nodes; tests/unit/test_simulate_histories.py holds it to 27.6 %


class Cause(NamedTuple):
    """number: of Llama 3's table; median_h, mean_h: until the node is back (0: it never left)."""

    name: str
    kind: Kind
    number: int
    median_h: float = 0.0
    mean_h: float = 0.0


CAUSES = (
    Cause("faulty GPU", Kind.NODE, 148, 3.21, 146.7),
    Cause("HBM3", Kind.NODE, 72, 3.21, 146.7),
    Cause("GPU SRAM", Kind.NODE, 19, 3.21, 146.7),
    Cause("GPU system processor", Kind.NODE, 17, 3.21, 146.7),
    Cause("GPU thermal", Kind.NODE, 6, 3.21, 146.7),
    Cause("silent data corruption", Kind.NODE, 6, 20.4, 132.8),
    Cause("NIC", Kind.NODE, 7, 20.4, 132.8),
    Cause("host maintenance", Kind.NODE, 32, 14.41, 34.38),
    Cause("host, power, disk, board", Kind.NODE, 14, 20.4, 132.8),
    Cause("software", Kind.PROCESS, 56),
    Cause("switch or cable", Kind.LINK, 35),
    Cause("NCCL watchdog", Kind.HANG, 7),
)
RATE = sum(cause.number for cause in CAUSES) / NODE_DAYS  # per 1,000 node-days


class Rates(NamedTuple):
    """What can be varied of a drawn history."""

    per_1000_node_days: float = RATE
    interval_cv: float = INTERVAL_CV
    offender_shape: float = OFFENDER_SHAPE
    repair_scale: float = 1.0
    preempt_per_1000_node_days: float = 0.0  # spot: a node is taken away, with notice
    preempt_h: float = 6.0  # until there is capacity again, mean
    moves_every_s: float = 0.0  # planned moves of one node, at fixed intervals


def generate(num_nodes: int, days: float, seed: int, rates: Rates) -> History:
    """Raises HistoryProblem for what cannot be drawn."""
    expected = (rates.per_1000_node_days + rates.preempt_per_1000_node_days) * num_nodes * days / 1000
    if expected > EVENTS_MAX / 2 or num_nodes < 1 or days <= 0:
        raise HistoryProblem(f"{expected:.0f} events on {num_nodes} nodes in {days:g} days: too many, or none")
    rng = np.random.default_rng(seed)
    offence = rng.gamma(rates.offender_shape, size=num_nodes)
    offence /= offence.sum()
    parts = [_failures(rng, num_nodes, days, rates, offence), _preemptions(rng, num_nodes, days, rates)]
    parts.append(_moves(rng, num_nodes, days, rates))
    at_s, node, kind, lasts_s, cause = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.lexsort((node, at_s))
    causes = (*(one.name for one in CAUSES), "pre-emption", "planned move")
    return History(
        f"generated, seed {seed}", num_nodes, days * DAY_S, at_s[order], node[order].astype(np.int32),
        kind[order].astype(np.int8), lasts_s[order], cause[order].astype(np.int16), causes,
    )  # fmt: skip


Columns = tuple[npt.NDArray[np.float64], ...]


def _failures(
    rng: np.random.Generator, num_nodes: int, days: float, rates: Rates, offence: npt.NDArray[np.float64]
) -> Columns:
    at_s = arrivals(rng, rates.per_1000_node_days * num_nodes / 1000 / DAY_S, days * DAY_S, rates.interval_cv)
    share = np.array([cause.number for cause in CAUSES], np.float64)
    cause = rng.choice(len(CAUSES), size=len(at_s), p=share / share.sum())
    kind = np.array([one.kind for one in CAUSES], np.float64)[cause]
    median = np.array([one.median_h for one in CAUSES])[cause]
    ratio = np.array([one.mean_h / one.median_h if one.median_h else 1.0 for one in CAUSES])[cause]
    sigma = np.sqrt(2 * np.log(ratio))  # of the lognormal with this mean over median
    lasts_s = median * 3600 * np.exp(sigma * rng.standard_normal(len(at_s))) * rates.repair_scale
    node = rng.choice(num_nodes, size=len(at_s), p=offence)
    return at_s, node.astype(np.float64), kind, lasts_s, cause.astype(np.float64)


def arrivals(rng: np.random.Generator, rate: float, duration_s: float, interval_cv: float) -> npt.NDArray[np.float64]:
    """Times with gamma intervals of mean 1 / rate and this coefficient of variation."""
    if rate <= 0:
        return np.zeros(0)
    shape = 1 / interval_cv**2
    expected = rate * duration_s
    count = int(expected + 8 * interval_cv * math.sqrt(expected) + 32)
    times = np.cumsum(rng.gamma(shape, 1 / (rate * shape), size=count))
    return times[times < duration_s]


def _preemptions(rng: np.random.Generator, num_nodes: int, days: float, rates: Rates) -> Columns:
    """Spot capacity goes in groups: intervals as bursty as failures, lengths exponential."""
    rate = rates.preempt_per_1000_node_days * num_nodes / 1000 / DAY_S
    at_s = arrivals(rng, rate, days * DAY_S, max(rates.interval_cv, 1.0))
    node = rng.integers(num_nodes, size=len(at_s)).astype(np.float64)
    lasts_s = rng.exponential(rates.preempt_h * 3600, size=len(at_s))
    return at_s, node, np.full(len(at_s), float(Kind.PREEMPT)), lasts_s, np.full(len(at_s), float(len(CAUSES)))


def _moves(rng: np.random.Generator, num_nodes: int, days: float, rates: Rates) -> Columns:
    if rates.moves_every_s <= 0:
        empty = np.zeros(0)
        return empty, empty, empty, empty, empty
    at_s = np.arange(rates.moves_every_s, days * DAY_S, rates.moves_every_s)
    node = rng.integers(num_nodes, size=len(at_s)).astype(np.float64)
    return at_s, node, np.full(len(at_s), float(Kind.MOVE)), np.zeros(len(at_s)), np.full(len(at_s), len(CAUSES) + 1.0)
