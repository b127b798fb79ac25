"""Where unicron is not ahead, and why: the difference to a better policy, in GPU-hours by use and in what they earn."""

from __future__ import annotations

from unicron.simulate.account import USES
from unicron.simulate.policies import POLICIES
from unicron.simulate.policies.elastic import Proportional, TorchFT
from unicron.simulate.scenario import Outcome, Simulated

OURS = ("unicron", "unicron-standby")
TELLING = 0.0005  # of all GPU-hours: smaller differences explain nothing


def summary(simulated: Simulated) -> list[str]:
    """One line per policy that earns more than the better of ours; one line when none does."""
    ours = [simulated.outcomes[name] for name in OURS if name in simulated.outcomes]
    if not ours:
        return []
    best = max(ours, key=lambda outcome: outcome.account.flop)
    lines = [
        f"{other.policy} earns {gain(other, best):.2f} % more than {best.policy}: {reason(best, other)}"
        for other in simulated.outcomes.values()
        if other.policy not in OURS and other.account.flop > best.account.flop
    ]
    if len(ours) == 2:
        worse = ours[1 - ours.index(best)]
        lines.append(f"{worse.policy} earns {-gain(worse, best):.2f} % less than {best.policy}: {reason(worse, best)}")
    if not any(other.policy not in OURS for other in simulated.outcomes.values()):
        return lines
    return lines if any(" more than " in line for line in lines) else [f"{best.policy} is ahead of all others", *lines]


def gain(one: Outcome, other: Outcome) -> float:
    """Per cent."""
    return (one.account.flop / other.account.flop - 1) * 100


def reason(ours: Outcome, other: Outcome) -> str:
    """What `other` spends less of, and what its productive hours earn more."""
    total = ours.account.num_gpus * ours.account.duration_s
    parts = []
    for use in USES:
        less = (ours.account.gpu_s[use] - other.account.gpu_s[use]) / total
        if use != "productive" and less > TELLING:
            parts.append(f"{less * 100:.2f} % of all GPU-hours less {use}")
    each = [outcome.account.flop / max(outcome.account.gpu_s["productive"], 1.0) for outcome in (ours, other)]
    if each[1] > each[0] * 1.0005:
        parts.append(f"its productive GPU-hours earn {(each[1] / each[0] - 1) * 100:.2f} % more" + _why_more(other))
    return "; ".join(parts) or "differences too small to name"


def _why_more(other: Outcome) -> str:
    kind = POLICIES[other.policy]
    if issubclass(kind, Proportional):
        return " (counted in proportion to its nodes; unicron's by the best layout on what is left)"
    if issubclass(kind, TorchFT):
        return " (a smaller batch on fewer nodes, which is not what the others learn)"
    return " (its nodes earn more where they are)"
