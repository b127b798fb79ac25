"""Several tasks on one cluster: WAF of the planner's allocation, and of equal, weighted and sized shares.

The five cases of Unicron's evaluation (arXiv 2401.00134, multi-task WAF): six GPT-3 tasks on 128 A800 in 16 nodes of 8.

    case 1   six 7B, weight 1                    case 4   mixed sizes, weights rising with the size
    case 2   three 1.3B, two 7B, one 13B, weight 1   case 5   mixed sizes, weights falling
    case 3   six 7B, weights 0.5 ... 2.0

Everything is planned with the model's T(t, x) and scored with another one: in every run each task's T is off by its own
smooth curve of at most 15 % either way, as a model may be. So the planner can be wrong, and by how much is the regret:
1 - WAF / WAF of the best allocation in hindsight, which knows the T that scores. Every policy runs all six tasks.

Shares are whole GPUs by largest remainder (equal fractions: the first tasks); a task below its least feasible number is
raised to it at the expense of the greatest share. Replicas may compute different numbers of micro-batches, as unicron
deals them, so odd shares lose little; what a task cannot use stays idle: T(t, x) is the best of all layouts on at most
x GPUs, for every policy.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import common
from unicron.performance.calibration import calibration_of
from unicron.performance.machine import machine_of
from unicron.performance.search import TaskModel, throughput
from unicron.performance.shape import ModelShape, parameters
from unicron.planner import Cluster, Planner
from unicron.planner.cluster import Failures, Node, Task, Workers

Floats = npt.NDArray[np.float64]

GPU = "A800-80GB"
GPUS, PER_NODE = 128, 8
ERROR = 0.15
SEQ, VOCAB = 2048, 51200
# GPT-3's own sizes and batches (arXiv 2005.14165, table 2.1): layers, hidden, heads, samples of 2,048 tokens
SIZES = {"1.3B": (24, 2048, 16, 512), "7B": (32, 4096, 32, 1024), "13B": (40, 5120, 40, 1024)}
MIXED = ("1.3B", "1.3B", "1.3B", "7B", "7B", "13B")
RISING = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
CASES = {
    "1: equal": (("7B",) * 6, (1.0,) * 6),
    "2: sizes": (MIXED, (1.0,) * 6),
    "3: weights": (("7B",) * 6, RISING),
    "4: sizes, weights rise": (MIXED, RISING),
    "5: sizes, weights fall": (MIXED, RISING[::-1]),
}
REPAIR_FREE = Failures(prior=1.0, prior_slot_s=1e8)


@dataclass(frozen=True)
class Kind:
    """A model size: T(t, x) for x = 0 ... GPUS, and what it takes at least."""

    name: str
    flops: Floats
    size: float  # parameters

    @property
    def least(self) -> int:
        return int(np.argmax(self.flops > 0))


def kind_of(name: str) -> Kind:
    layers, hidden, heads, batch = SIZES[name]
    shape = ModelShape(layers, hidden, heads, SEQ, VOCAB)
    table = throughput(TaskModel(shape, batch, uneven=True), machine_of(GPU), calibration_of(GPU), GPUS)
    return Kind(name, table.flops, float(parameters(shape)))


def perturbed(flops: Floats, chance: np.random.Generator) -> Floats:
    """Off by a smooth curve over log x, at most ERROR either way; more GPUs are never worse, as some may stay idle."""
    knots = np.arange(0, math.ceil(math.log2(GPUS)) + 1)
    errors = chance.uniform(-ERROR, ERROR, knots.size)
    x = np.log2(np.maximum(np.arange(flops.size), 1))
    return np.asarray(np.maximum.accumulate(flops * (1 + np.interp(x, knots, errors))), np.float64)


# ---------------------------------------------------------------- policies


def planned(kinds: list[Kind], weights: tuple[float, ...], curves: list[Floats]) -> list[int]:
    """The planner's own decision for an empty cluster: every task admitted, counts by the exact dynamic program."""
    nodes = tuple(Node(f"n{index}", PER_NODE) for index in range(GPUS // PER_NODE))
    tasks = tuple(
        Task(
            f"t{index}",
            Workers(kind.least, GPUS),
            {x: float(curve[x]) for x in range(kind.least, GPUS + 1)},
            weight,
            required=True,
        )
        for index, (kind, weight, curve) in enumerate(zip(kinds, weights, curves, strict=True))
    )
    plan = Planner(Cluster(nodes, tasks, failures=REPAIR_FREE), table=False).solve(())
    return list(plan.allocation)


def shares(kinds: list[Kind], parts: list[float]) -> list[int]:
    """GPUS in proportion to `parts`: whole numbers by largest remainder, nobody below its least."""
    exact = [GPUS * part / sum(parts) for part in parts]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for index in by_remainder[: GPUS - sum(counts)]:
        counts[index] += 1
    for index, kind in enumerate(kinds):
        while counts[index] < kind.least:
            counts[max(range(len(counts)), key=lambda i: counts[i] - kinds[i].least)] -= 1
            counts[index] += 1
    return counts


def policies(kinds: list[Kind], weights: tuple[float, ...]) -> dict[str, list[int]]:
    return {
        "unicron": planned(kinds, weights, [kind.flops for kind in kinds]),
        "equally": shares(kinds, [1.0] * len(kinds)),
        "weighted": shares(kinds, list(weights)),
        "sized": shares(kinds, [kind.size for kind in kinds]),
    }


# ---------------------------------------------------------------- scores


def waf(counts: list[int], weights: tuple[float, ...], curves: list[Floats]) -> float:
    return sum(w * float(curve[count]) for count, w, curve in zip(counts, weights, curves, strict=True))


def score(bench: common.Bench, name: str, kinds: list[Kind], weights: tuple[float, ...], runs: int) -> None:
    given = policies(kinds, weights)
    earned: dict[str, list[float]] = {policy: [] for policy in (*given, "hindsight")}
    regret: dict[str, list[float]] = {policy: [] for policy in given}
    for run in range(runs):
        chance = np.random.default_rng(run)
        curves = [perturbed(kind.flops, chance) for kind in kinds]
        best = waf(planned(kinds, weights, curves), weights, curves)
        earned["hindsight"].append(best / 1e15)
        for policy, counts in given.items():
            value = waf(counts, weights, curves)
            earned[policy].append(value / 1e15)
            regret[policy].append(100 * (1 - value / best))
    for policy, samples in earned.items():
        facts: dict[str, object] = {"GPUs": "each run its own"}
        if policy in given:
            losses = regret[policy]
            facts = {
                "GPUs": " ".join(map(str, given[policy])),
                "regret % median": float(np.median(losses)),
                "regret % max": max(losses),
            }
        bench.add(f"{name}: {policy}", samples, **facts)


def main() -> None:
    parser = common.parser(__doc__.splitlines()[0], runs=50)
    arguments: argparse.Namespace = parser.parse_args()
    known = {name: kind_of(name) for name in SIZES}
    bench = common.Bench(
        "allocation",
        "WAF in PFLOP/s",
        configuration={
            "GPUs": f"{GPUS} {GPU} in nodes of {PER_NODE}",
            "scored": f"the model's T off by up to {ERROR:.0%}, another curve for each task and run",
            "least GPUs": {name: kind.least for name, kind in known.items()},
            "T(128)/T(16)": {name: float(kind.flops[128] / kind.flops[16]) for name, kind in known.items()},
        },
    )
    for name, (sizes, weights) in CASES.items():
        score(bench, name, [known[size] for size in sizes], weights, arguments.runs)
    bench.finish(arguments)


if __name__ == "__main__":
    main()
