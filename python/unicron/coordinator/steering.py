"""When to decide, and what a decision sets in motion: the machine's side of deciding.py.

Level-triggered like everything else: whatever event changed the usable nodes, or the tasks that want slots, the next
step sees that the facts are no longer those of the present allocation. The tables for the next one-step event are made
a moment after a decision, so that they do not delay it.
"""

from __future__ import annotations

from unicron.coordinator.deciding import decide, facts_of, is_due, tables_for, wanting_slots
from unicron.coordinator.journal import AllocationDecided
from unicron.coordinator.state import TaskState
from unicron.coordinator.step import Step

CLUSTER = "cluster"  # subject of the timers that are no task's


def settle_allocation(step: Step) -> None:
    state = step.state
    if state.version == state.version_decided:
        return
    if not state.allocation.tasks and not wanting_slots(state):
        return  # a cluster of thousands that comes up is nobody's yet
    facts = facts_of(state)
    if not is_due(state, facts):
        state.version_decided = state.version
        return
    before = state.allocation
    allocation, state.planned = decide(state, facts, step.now_ms)
    step.write(AllocationDecided(allocation), f"{allocation.trigger}: {allocation.reason}")
    for task in state.tasks.values():
        if not task.is_over and before.targets.get(task.name) != allocation.targets.get(task.name):
            task.joins.clear()
            step.touch(task)
        if not task.is_over and before.standbys.get(task.name) != allocation.standbys.get(task.name):
            task.standby_tries.clear()
            step.touch(task)
    renew_tables(step, "the allocation changed")


def renew_tables(step: Step, reason: str) -> None:
    """What an event finds in the table must be a plan for the present allocation: the former tables are dropped now."""
    step.state.planner = None
    step.set_timer("tables", CLUSTER, step.config.tables_delay_ms, f"{reason}: plans for the next event are made")


def on_tables(step: Step) -> None:
    if not is_due(step.state, facts_of(step.state)):
        step.state.planner = tables_for(step.state)


def touch_all(step: Step) -> None:
    """Slots became free, or a node is back: whoever waits for them looks again."""
    for task in step.state.tasks.values():
        if not task.is_over:
            step.touch(task)


def why(step: Step, task: TaskState) -> str:
    """The present decision's words for this task."""
    allocation = step.state.allocation
    return f"{allocation.trigger}: {allocation.notes.get(task.name, 'it wants no slots now')}"
