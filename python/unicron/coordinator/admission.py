"""Which tasks run at all: by priority, then by age. What they get beyond their least is the planner's business.

Every task in this order that finds its least number of slots among those left is admitted; one that does not is passed
over and blocks nobody. Inside a priority those that run come before those that wait, so a waiting task displaces only
lower priorities; who must give way is then the newest of the lowest priority. A task that was pre-empted keeps its age,
and so its place among those that wait. It is a function of what is there now: no history, hence no thrash.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from unicron.coordinator.demand import can_leave, kept_slots
from unicron.coordinator.state import TaskState


def admitted(
    tasks: Iterable[TaskState], surviving: dict[str, int], pool: int, without: Collection[str] = ()
) -> list[TaskState]:
    """In the order of admission. tasks: those that want slots, oldest first; surviving: task -> whole replicas it
    still has; pool: slots; without: tasks known to find no place."""
    aged = list(enumerate(tasks))
    order = sorted(aged, key=lambda item: (*_class(item[1], surviving), item[0]))
    chosen = []
    for _, task in order:
        least = kept_slots(task, surviving.get(task.name, 0))
        if task.name not in without and least <= pool:
            pool -= least
            chosen.append(task)
    return chosen


def _class(task: TaskState, surviving: dict[str, int]) -> tuple[bool, int, bool]:
    runs = surviving.get(task.name, 0) > 0
    return not (runs and not can_leave(task)), -task.job.priority, not runs
