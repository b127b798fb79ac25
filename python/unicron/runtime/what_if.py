"""`unicron plan` against a running coordinator: what it would do if something happened now. Changes nothing."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from unicron.coordinator.deciding import tables_for
from unicron.coordinator.state import State
from unicron.planner import Planner, PlannerProblem
from unicron.planner.explain import explain

ALL = "all"


class RequestProblem(ValueError):
    """A request that cannot be answered; the text says what to do."""


def what_if(state: State, events: tuple[str, ...]) -> dict[str, Any]:
    """What `unicron plan --json` prints, or with the event `all` one answer for each foreseen event.

    Raises RequestProblem for an event that cannot happen here, and when no task runs.
    """
    planner = state.planner or tables_for(state)
    if planner is None:
        raise RequestProblem("no task has slots, so there is nothing to plan: unicron submit gives the cluster one")
    try:
        if events == (ALL,):
            return {event: answer(planner, (event,)) for event in planner.events}
        return answer(planner, events)
    except PlannerProblem as problem:
        raise RequestProblem(str(problem)) from None


def answer(planner: Planner, events: tuple[str, ...]) -> dict[str, Any]:
    began = time.perf_counter_ns()
    planner.find(events)
    planned_in_us = (time.perf_counter_ns() - began) / 1000
    decision = planner.decision(events)
    return {
        "allocation": decision.allocation,
        "waf": decision.waf,
        "reward": decision.reward,
        "moves": msgspec.to_builtins(decision.moves),
        "reason": explain(planner, decision),
        "planned_in_us": planned_in_us,
        "from_table": decision.from_table,
        "how": decision.how,
        "unplaced": decision.unplaced,
    }
