"""Two runs and what the coordinator says about one of them -> the JSON object of `unicron demo --json`, and a
verdict with reasons. Pure: nothing is measured, started or asked here.

The disturbed run is judged by its own records (losses, gradients, digests, processes, forwards
begun), and by the incidents only where they are the only source (times, severities, causes). The
reference is an undisturbed *managed* run: unicron's order of collectives differs from stock
megatron's in the last bit (docs/ARCHITECTURE.md)."""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unicron.demo.results import Run
from unicron.demo.scenarios import Expect, Scenario
from unicron.types import Layout, Rank

EPS = 2.0**-23
RESIZED_GRADIENT_MAX = 4 * EPS
RESIZED_LOSS_MAX = 1e-5
LOSS_FALL_MIN = 1.0
LEARNED_AFTER = 25  # iterations; a shorter run has not learned so much yet
EARLY = 5  # iterations
UNMANAGED_LOSS_MAX = 1e-4  # between a managed and an unmanaged run, in the early iterations
PAUSE_FACTOR = 4.0  # an iteration this many times the median, and this many ms longer, is a pause
PAUSE_MS = 500.0
MAGNITUDE_MIN = np.finfo(np.float32).tiny  # below, both are subnormal noise: 0/0 counts as 0

INCIDENT_FIELDS = (
    "fault",
    "severity",
    "root",
    "method",
    "detect_ms",
    "decide_ms",
    "resume_ms",
    "lost_ms",
    "state_source",
    "iterations_lost",
    "micro_batches_recomputed",
    "groups_kept",
    "groups_rebuilt",
)


@dataclass(frozen=True)
class Setting:
    """What does not depend on the scenario."""

    layout: Layout
    recovery: str = "in-order"
    managed_median_ms: float = 0.0
    unmanaged_median_ms: float | None = None


@dataclass(frozen=True)
class Observed:
    """What the cluster says after the run."""

    incidents: tuple[dict[str, Any], ...]  # as `unicron incidents --json` has them
    task: dict[str, Any]  # view of the task: phase, outcome, cause, replicas
    nodes_blamed: tuple[str, ...] = ()  # nodes isolated or drained at the end
    left_behind: dict[str, int] = field(default_factory=lambda: {"processes": 0, "shared_segments": 0})


def compare(run: Run, reference: Run, scenario: Scenario, setting: Setting, observed: Observed) -> dict[str, Any]:
    """The object of `unicron demo --json`, with `passed` and `reasons` beside it."""
    outcome = outcome_of(observed)
    end = scenario.iterations - 1
    found = first_interrupted(run, reference, scenario, observed)
    result: dict[str, Any] = {
        "scenario": scenario.name,
        "outcome": outcome,
        "layout": {"tp": setting.layout.tp, "pp": setting.layout.pp, "dp": setting.layout.dp}
        | ({"ep": setting.layout.ep} if setting.layout.ep > 1 else {}),
        "optimizer": "distributed" if setting.layout.sharded else "plain",
        "recovery": setting.recovery,
        "exact": setting.layout.exact,
        "iterations": scenario.iterations,
        "parameters": parameters(reference, setting.layout),
        "micro_batches": setting.layout.num_micro_batches,
        "loss": losses(run, reference, found, end),
        "gradient": {"healed_max_rel_diff": gradient_difference(run, reference, found, setting.layout)},
        "weights": weights(run, reference, setting.layout),
        "incidents": [{name: i.get(name) for name in INCIDENT_FIELDS} for i in observed.incidents],
        "iteration_ms": {
            "managed_median": setting.managed_median_ms,
            "unmanaged_median": setting.unmanaged_median_ms,
        },
        "left_behind": dict(observed.left_behind),
    }
    if outcome == "stopped":
        result.update(loss=None, gradient=None, weights=None)
    elif outcome == "unaffected":
        result["gradient"] = None
    reasons = list(dict.fromkeys(judge(result, run, reference, scenario, setting, observed)))
    return {**result, "passed": not reasons, "reasons": reasons}


# -------------------------------------------------------------------- measures


def outcome_of(observed: Observed) -> str:
    if observed.task.get("outcome") == "stopped":
        return "stopped"
    said = {i.get("outcome") for i in observed.incidents}
    for outcome in ("resized", "healed"):
        if outcome in said:
            return outcome
    return "unaffected"


def first_interrupted(run: Run, reference: Run, scenario: Scenario, observed: Observed) -> int | None:
    """The iteration that the (first) failure interrupted.

    Armed faults say it themselves. For acts on the cluster it is the first iteration whose reduced
    gradient is not bit for bit the reference's (up to the failure all are); where all are equal,
    the first one of the window of which something was computed again. An incident's own number is
    that of the last news before the failure, so it counts, like that of the act, only where nothing
    else tells."""
    armed = [fault.iteration for fault in scenario.faults if fault.iteration >= 0]
    if armed:
        return min(armed)
    for iteration, rank in sorted(set(run.gradients) & set(reference.gradients)):
        had, wanted = run.gradient(iteration, rank), reference.gradient(iteration, rank)
        if had.shape != wanted.shape:
            break  # in another layout by then, and healed with the same bits before
        if not np.array_equal(had, wanted):
            return iteration
    window = scenario.window
    again = [iteration for (_, iteration, _), count in run.forwards.items() if count > 1 and iteration in window]
    told = [i["iteration"] for i in observed.incidents if i.get("iteration", -1) >= 0]
    acted = [act.after + 1 for act in scenario.acts if act.after + 1 in window]
    return min(again or [i for i in told if i in window] or acted or told, default=None)


def losses(run: Run, reference: Run, interrupted: int | None, end: int) -> dict[str, Any] | None:
    if not run.losses or not reference.losses:
        return None
    common = [i for i in run.losses if i in reference.losses and i <= end]
    differences = {i: abs(run.losses[i] - reference.losses[i]) for i in common}
    after = [] if interrupted is None else range(interrupted + 1, interrupted + 4)
    next_3 = [differences[i] for i in after if i in differences]
    return {
        "first": run.losses[min(run.losses)],
        "last": run.losses.get(end),
        "reference_last": reference.losses.get(end),
        "next_3_max_abs_diff": max(next_3, default=0.0),
        "max_abs_diff": max(differences.values(), default=0.0),
    }


def gradient_difference(run: Run, reference: Run, iteration: int | None, layout: Layout) -> float | None:
    """max over elements and ranks of |Δ| / Σ|g_m|, 0/0 = 0; None when nothing can be compared."""
    if iteration is None:
        return None
    ranks = [r for i, r in run.gradients if i == iteration and (i, r) in reference.gradients]
    worst = [
        element_difference(
            run.gradient(iteration, rank),
            reference.gradient(iteration, rank),
            magnitude(reference, iteration, rank, layout),
        )
        for rank in sorted(ranks)
    ]
    return max(worst) if worst else None


def element_difference(values: np.ndarray, wanted: np.ndarray, magnitudes: np.ndarray | None) -> float:
    """Where every |g_m| is zero, any difference at all is infinitely large. What is no number in both is equal: in fp16
    a step whose gradient overflowed is left out by everybody."""
    if values.shape != wanted.shape:
        return float("inf")
    overflowed = ~np.isfinite(values) & ~np.isfinite(wanted)
    difference = np.abs(np.where(overflowed, 0.0, values).astype(np.float64) - np.where(overflowed, 0.0, wanted))
    if not np.all(np.isfinite(difference)):
        return float("inf")
    if not difference.any():
        return 0.0
    if magnitudes is None:
        return float("inf")
    scale = np.where(overflowed, 1.0, np.asarray(magnitudes, np.float64))
    if np.any((scale < MAGNITUDE_MIN) & (difference > MAGNITUDE_MIN)):
        return float("inf")
    ratio = np.divide(difference, scale, out=np.zeros_like(difference), where=scale >= MAGNITUDE_MIN)
    return float(ratio.max())


def magnitude(reference: Run, iteration: int, rank: Rank, layout: Layout) -> np.ndarray | None:
    """Σ|g_m| over the whole task: the shares of all replicas, and of both stages where tied."""
    tp, dp, pp = layout.coords(rank)
    own = _over_replicas(reference, iteration, layout, rank)
    if own is None or layout.pp == 1 or pp not in (0, layout.pp - 1):
        return own
    other_stage = layout.pp - 1 if pp == 0 else 0
    other = _over_replicas(reference, iteration, layout, layout.rank_of(tp, dp, other_stage))
    spans = _tied(reference, rank)
    others = _tied(reference, layout.rank_of(tp, 0, other_stage))
    if other is None or len(spans) != len(others):
        return own
    for (start, end), (other_start, other_end) in zip(spans, others, strict=True):
        own[start:end] += other[other_start:other_end]
    return own


def _over_replicas(reference: Run, iteration: int, layout: Layout, rank: Rank) -> np.ndarray | None:
    """Experts come last in the flat gradient, and are summed over their own lane only."""
    total: np.ndarray | None = None
    for peer in (*layout.peers(rank), *sorted({*layout.dense_peers(rank)} - {*layout.peers(rank)})):
        share = reference.magnitude(iteration, peer)
        if share is None:
            return None
        if total is None:
            total = np.zeros(len(share), np.float64)
        dense = len(share) if peer in layout.peers(rank) else reference.states[peer]["dense"]
        total[:dense] += share[:dense]
    return total


def _tied(reference: Run, rank: Rank) -> list[list[int]]:
    return reference.states.get(rank, {}).get("tied", [])


def weights(run: Run, reference: Run, layout: Layout) -> dict[str, Any] | None:
    if not run.states or not reference.states:
        return None
    differences = [
        float(np.max(np.abs(weights.astype(np.float64) - reference.weights[rank])))
        for place, found in sorted(ranks_at(run, layout).items())
        for rank in ranks_at(reference, layout).get(place, ())[:1]
        for weights in (run.weights[one] for one in found)
    ]
    return {
        "sha256": position_digest(run, layout),
        "reference_sha256": position_digest(reference, layout),
        "max_abs_diff": max(differences, default=None),
    }


def ranks_at(run: Run, layout: Layout) -> dict[tuple[int, int, int], list[Rank]]:
    """(tp, lane, pp) -> ranks that wrote their state from there, where they say so: in another layout others do."""
    found: dict[tuple[int, int, int], list[Rank]] = {}
    for rank, state in sorted(run.states.items()):
        tp, _, pp = layout.coords(rank)
        tp, pp = state.get("place") or (tp, pp)
        found.setdefault((tp, layout.lane_of(rank), pp), []).append(rank)
    return found


def position_digest(run: Run, layout: Layout) -> str:
    """One digest for parameters and optimizer state of the whole model, whatever the width.

    Replicas are copies (but for their shards of a distributed optimizer's state); where two differ, every differing
    digest goes in, so that the result equals no undisturbed run's."""
    sha = hashlib.sha256()
    ranks = ranks_at(run, layout)
    for one in layout.replica_ranks(0):
        tp, _, pp = layout.coords(one)
        lane = layout.lane_of(one)
        found = sorted({run.states[rank]["sha256"] for rank in ranks.get((tp, lane, pp), ())})
        place = f"{tp},{pp}" if layout.ep == 1 else f"{tp},{lane},{pp}"
        sha.update(f"{place}:{','.join(found)};".encode())
    return sha.hexdigest()


def parameters(run: Run, layout: Layout) -> int:
    replica = [r for r in layout.replica_ranks(0) if r in run.states]
    return sum(run.states[r]["parameters"] for r in replica)


def begun_again(run: Run, layout: Layout, first: int = 0, last: int = 1 << 30) -> int:
    """Distinct (iteration, micro-batch) whose forward began more than once at some position, in these iterations."""
    begun: Counter[tuple[tuple[int, int], int, int]] = Counter(run.begun)
    for (rank, iteration, micro_batch), count in run.forwards.items() if not run.begun else ():
        tp, _, pp = layout.coords(rank)
        begun[(tp, pp), iteration, micro_batch] += count
    again = {(iteration, number) for (_, iteration, number), count in begun.items() if count > 1}
    return sum(first <= iteration <= last for iteration, _ in again)


def other_digests(run: Run, reference: Run, first: int, last: int) -> Iterable[str]:
    """Where gradient or state are not the reference's, bit for bit. Some rank must say it for every iteration."""
    for iteration in range(first, last + 1):
        ours = {rank: found for (i, rank), found in run.digests.items() if i == iteration}
        if not ours:
            yield f"iteration {iteration}: nobody says what its gradient and state were"
        for rank, (gradient, state) in sorted(ours.items()):
            wanted = reference.digests.get((iteration, rank), ("", ""))
            if gradient and gradient != wanted[0]:
                yield f"iteration {iteration}, rank {rank}: another reduced gradient"
            if state and state != wanted[1]:
                yield f"iteration {iteration}, rank {rank}: another state"


def over_recoveries(observed: Observed, name: str) -> int:
    """Sum over recoveries: incidents that end together, one failure in the recovery of another say, each tell of all
    its work.
    """
    recoveries: dict[Any, int] = {}
    for number, incident in enumerate(observed.incidents):
        key = _ended(incident) or incident.get("epoch") or f"incident {number}"
        recoveries[key] = max(recoveries.get(key, 0), incident.get(name) or 0)
    return sum(recoveries.values())


def _ended(incident: dict[str, Any]) -> str:
    """When its recovery was over; nothing where that is not told."""
    if incident.get("resume_ms") is None or incident.get("opened_ms") is None:
        return ""
    return f"ended at {incident['opened_ms'] - (incident.get('detect_ms') or 0.0) + incident['resume_ms']:.1f} ms"


def early_loss_difference(run: Run, reference: Run) -> float:
    """Of the first iterations, before rounding has been amplified: other order of sums, same
    model.
    """
    common = [i for i in range(EARLY) if i in run.losses and i in reference.losses]
    return max((abs(run.losses[i] - reference.losses[i]) for i in common), default=0.0)


def median_ms(run: Run, skip: int = 3) -> float:
    """Of an undisturbed run, without its first iterations and without those that dump gradients."""
    dumped = {iteration for iteration, _ in run.gradients}
    times = [
        ms
        for iteration, ms in run.iteration_ms(first=skip).items()
        if iteration not in dumped and iteration - 1 not in dumped
    ]
    return statistics.median(times) if times else 0.0


# -------------------------------------------------------------------- verdict


def judge(
    result: dict[str, Any],
    run: Run,
    reference: Run,
    scenario: Scenario,
    setting: Setting,
    observed: Observed,
) -> Iterable[str]:
    """Everything that is not as it must be, one line each."""
    expect, layout = scenario.expect, setting.layout
    if result["outcome"] != expect.outcome:
        yield f"outcome is {result['outcome']}, must be {expect.outcome}"
    yield from _incidents(expect, observed)
    yield from _left_behind(observed)
    yield from run.disagreements
    if expect.outcome == "stopped":
        yield from _stopped(observed)
        return
    if result["loss"] is None or result["loss"]["last"] is None:
        yield f"iteration {scenario.iterations - 1} was not reached"
        return
    if scenario.iterations >= LEARNED_AFTER:
        yield from _loss(result["loss"])
    yield from _work(expect, run, layout, observed)
    if expect.outcome == "resized":
        yield from _resized(result, observed, expect, layout)
    if expect.outcome != "resized" or layout.exact:
        yield from _same_bits(result, expect.gradient)
    if not expect.gradient and not expect.at_end:
        late = [i["id"] for i in observed.incidents if i["iteration"] >= scenario.iterations]
        if late:
            yield f"incidents {late} came after the state that is compared"
    if expect.outcome == "unaffected":
        yield from _no_pause(run, reference, scenario)


def _incidents(expect: Expect, observed: Observed) -> Iterable[str]:
    incidents = observed.incidents
    if not expect.incidents_min <= len(incidents) <= expect.incidents_max:
        bounds = f"{expect.incidents_min} to {expect.incidents_max}"
        yield f"{len(incidents)} incidents, must be {bounds}"
    for incident in incidents:
        if incident["fault"] == "connection" and len(incidents) > 1:
            continue  # a survivor spoke before the death was known: a busy machine needs more than diagnose_ms for it
        if incident["severity"] not in expect.severities:
            yield f"severity is {incident['severity']}, must be {' or '.join(expect.severities)}"
        if expect.methods and incident["method"] not in expect.methods:
            yield f"seen by {incident['method']}, must be {' or '.join(expect.methods)}"
    if expect.state_sources and not any(incident["state_source"] in expect.state_sources for incident in incidents):
        found = sorted({str(i["state_source"]) for i in incidents})
        yield f"state came from {found}, must be {' or '.join(expect.state_sources)}"
    told = " ".join(f"{i.get('cause', '')} {i.get('text', '')}" for i in incidents)
    if expect.text and expect.text not in told:
        yield f"no incident says {expect.text!r}"
    still_open = [i.get("id") for i in incidents if i.get("outcome") is None]
    if still_open:
        yield f"incidents {still_open} are still open"


def _left_behind(observed: Observed) -> Iterable[str]:
    for what, count in observed.left_behind.items():
        if count:
            yield f"{count} {what.replace('_', ' ')} left behind"


def _stopped(observed: Observed) -> Iterable[str]:
    fatal = [i for i in observed.incidents if i["severity"] == "FATAL"]
    if not fatal:
        yield "no incident is FATAL"
    for incident in fatal:
        if not incident.get("cause"):
            yield "the fatal incident has no cause"
        if not incident.get("log"):
            yield "the fatal incident does not say where the log is"
    if observed.nodes_blamed:
        yield f"nodes {list(observed.nodes_blamed)} are blamed"


def _loss(loss: dict[str, Any]) -> Iterable[str]:
    fall = loss["first"] - loss["last"]
    if not fall >= LOSS_FALL_MIN:
        yield f"the loss fell by {fall:.3f} nats, must be at least {LOSS_FALL_MIN}"


def _work(expect: Expect, run: Run, layout: Layout, observed: Observed) -> Iterable[str]:
    share = layout.num_micro_batches / layout.num_replicas
    allowed = round(expect.recomputed_replicas * share)
    counted = begun_again(run, layout)
    if counted > allowed:
        yield f"{counted} micro-batches began again, at most {allowed} may"
    lost = max((i["iterations_lost"] or 0 for i in observed.incidents), default=0)
    if not lost:
        yield from _told_as_counted(expect, counted, allowed, observed)
    if not expect.iterations_lost_min <= lost <= expect.iterations_lost_max:
        bounds = f"{expect.iterations_lost_min} to {expect.iterations_lost_max}"
        yield f"{lost} iterations lost, must be {bounds}"
    replaced = sum(len(set(pids)) - 1 for pids in run.pids.values())
    if expect.replaced is not None and replaced != expect.replaced:
        yield f"{replaced} workers were replaced, must be {expect.replaced}"
    has_inner_groups = layout.replica_size > 1
    if expect.outcome == "healed" and expect.groups_kept and has_inner_groups:
        if not any(i["groups_kept"] for i in observed.incidents):
            yield "no group was kept"


def _told_as_counted(expect: Expect, counted: int, allowed: int, observed: Observed) -> Iterable[str]:
    """Nobody knows what a lost node had begun: there the incident may say more, up to its share, or nothing, where
    the others had not begun that iteration and dealt all of it anew."""
    told = over_recoveries(observed, "micro_batches_recomputed")
    is_wrong = told != counted
    if expect.told_less:
        is_wrong = told > allowed
    elif expect.outcome == "resized" or "buddy" in expect.state_sources or expect.told_more:
        is_wrong = not (counted <= told <= allowed or (expect.told_more and told == 0))
    if is_wrong and expect.outcome in ("healed", "resized"):
        yield f"incidents say {told} micro-batches were computed again, {counted} were"


def _same_bits(result: dict[str, Any], gradient: bool) -> Iterable[str]:
    state = result["weights"]
    if state is None:
        yield "no digest was written"
    elif state["sha256"] != state["reference_sha256"]:
        yield f"weights differ from the undisturbed run's, by at most {state['max_abs_diff']}"
    if result["outcome"] in ("healed", "resized") and result["iterations"] <= 100 and gradient:
        difference = result["gradient"]["healed_max_rel_diff"]
        if difference is None:
            yield "the healed iteration's gradient was not kept"
        elif difference != 0.0:
            yield f"the healed iteration's gradient differs by {difference:.3g} of its magnitude"


def _resized(result: dict[str, Any], observed: Observed, expect: Expect, layout: Layout) -> Iterable[str]:
    difference = result["gradient"]["healed_max_rel_diff"] if result["gradient"] else None
    if difference is None:
        yield "the interrupted iteration's gradient was not kept"
    elif difference > RESIZED_GRADIENT_MAX:
        yield f"the gradient differs by {difference / EPS:.2f} eps, at most 4 are allowed"
    if result["loss"]["next_3_max_abs_diff"] > RESIZED_LOSS_MAX:
        yield f"the next three losses differ by {result['loss']['next_3_max_abs_diff']:.2e}"
    replicas = observed.task.get("replicas", ())
    if expect.is_grown and len(replicas) != layout.num_replicas:
        yield f"{len(replicas)} of {layout.num_replicas} replicas at the end: it did not grow back"
    widths = [int(move["to"].split(",")[2]) for move in observed.task.get("layout_changes", ())]
    if expect.narrowed_to and widths != [expect.narrowed_to, layout.num_replicas]:
        wanted = [expect.narrowed_to, layout.num_replicas]
        yield f"its layout had {widths} replicas, one after the other, must be {wanted}"


def _no_pause(run: Run, reference: Run, scenario: Scenario) -> Iterable[str]:
    usual = median_ms(reference)
    first = min((act.after for act in scenario.acts), default=0)
    longest = max(run.iteration_ms(first=first).values(), default=0.0)
    if longest > max(PAUSE_FACTOR * usual, usual + PAUSE_MS):
        yield f"an iteration took {longest:.0f} ms, usual are {usual:.0f}: training paused"
