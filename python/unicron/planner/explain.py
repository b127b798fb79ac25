"""A decision in words: what changes, what it earns, what it costs, and what else was weighed."""

from __future__ import annotations

from unicron.planner.cluster import Task
from unicron.planner.planner import Decision, Planner
from unicron.planner.situation import Situation, situation_of

HOW = {
    "reconfigure": "go on without the lost slots",
    "standby": "spend standbys",
    "wait": "keep the broken slots and wait for repair",
}


def explain(planner: Planner, decision: Decision) -> str:
    """Sentences for people; the numbers are those of the decision."""
    situation = situation_of(planner.cluster, decision.events)
    running_s = planner.running_s(situation.pool)
    sentences = [_what(planner, decision, situation)]
    if situation.wounded:
        sentences.append(f"Chosen: {HOW[decision.how]}.")
    if decision.how == "standby":
        cost = planner.standby_cost(situation)
        sentences.append(f"Until they are back that may cost {cost:.3g} FLOP in the next failures, which is counted.")
    sentences += _changes(planner, decision, situation)
    sentences.append(
        f"In all {flops(decision.waf)} weighted; the next failure is expected in {duration(running_s)}, "
        f"until then the plan is worth {decision.reward:.3g} FLOP."
    )
    for how, reward in decision.other_rewards.items():
        sentences.append(f"To {HOW[how]} would be worth {decision.reward - reward:.3g} FLOP less.")
    for task, slots in decision.unplaced.items():
        sentences.append(f"{slots} slots of {task} find no node with room for its groups: free a node or repair slots.")
    return " ".join(sentences)


def _what(planner: Planner, decision: Decision, situation: Situation) -> str:
    if not decision.events:
        return f"{situation.pool} slots for {len(planner.cluster.tasks)} tasks."
    slots = f"{planner.cluster.pool} slots" + (
        f" become {situation.pool}" if situation.pool != planner.cluster.pool else " remain"
    )
    return f"After {' and '.join(decision.events)} {slots}."


def _changes(planner: Planner, decision: Decision, situation: Situation) -> list[str]:
    sentences = []
    kept = []
    for task in planner.cluster.tasks:
        before, after = task.current, decision.allocation[task.name]
        if task.name in situation.finished:
            sentences.append(f"{task.name} is done and leaves {before} slots.")
        elif before != after:
            gain = flops(task.waf(after) - task.waf(before), sign=True)
            sentences.append(f"{task.name} {_way(task, after) or _verb(before, after)} (from {before}, {gain}).")
        elif task.name in situation.wounded | situation.restarted:
            sentences.append(f"{task.name} keeps {after} slots after a restart.")
        else:
            kept.append(f"{task.name} ({after})")
    if kept:
        sentences.append(f"Undisturbed, because a change would cost more than it earns: {', '.join(kept)}.")
    return sentences


def _way(task: Task, after: int) -> str:
    if not task.current or after not in task.relayout_s:
        return ""
    return f"goes over to another layout, on {after} slots, in about {duration(task.relayout_s[after])}"


def _verb(before: int, after: int) -> str:
    if after == 0:
        return "stops"
    if before == 0:
        return f"starts on {after} slots"
    return f"{'shrinks' if after < before else 'grows'} to {after} slots"


def flops(value: float, sign: bool = False, like: float = 0.0) -> str:
    """like: it stands beside this one, in whose unit it is; the unit is said there."""
    mark = "+" if sign else ""
    scales = ((1e18, "EFLOP/s"), (1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"))
    scale, unit = next((known for known in scales if abs(like or value) >= known[0]), (1.0, "FLOP/s"))
    return f"{value / scale:{mark}.3g}{'' if like else f' {unit}'}"


def duration(seconds: float) -> str:
    """The greatest unit that gives at least 2."""
    for scale, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds:.3g} s"
