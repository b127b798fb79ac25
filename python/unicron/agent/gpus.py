"""Which GPU of this node belongs to which role: the role's for as long as it lives here.

A role's state lies in the memory of its GPU, and whoever takes the role over must come to it, whatever became of the
other roles of the node meanwhile. So a GPU is given to (task, rank), the lowest free one, not counted off a plan: a
plan without one of the node's ranks would move all that follow it. Tasks that share a node get GPUs of their own.
"""

from __future__ import annotations

from unicron.agent.actions import GrantGpu
from unicron.agent.events import GpuRequested
from unicron.agent.state import State
from unicron.agent.step import Step
from unicron.agent.transitions import Phase
from unicron.types import Rank

Role = tuple[str, Rank]


def on_requested(step: Step, event: GpuRequested) -> None:
    request = event.request
    worker = step.find(request.worker, "said")
    if worker is None:
        return
    if request.task != worker.task:
        step.refuse("not_holder", f"{worker.name} is of {worker.task}, not of {request.task}")
        return
    role = (request.task, request.rank)
    index = index_of(step.state, *role, asks=worker.name)
    step.actions.append(GrantGpu(event.request_id, index, f"rank {request.rank} of {request.task} lives there"))


def index_of(state: State, task: str, rank: Rank, asks: str = "") -> int:
    """The role's GPU; its one until now, or the lowest that no role of this node has. asks: a worker that gives up the
    role it was built for."""
    held = state.gpus.get((task, rank))
    if held is not None:
        return held
    in_use = _roles_here(state, asks)
    for role in [role for role in state.gpus if role not in in_use]:
        del state.gpus[role]
    taken = set(state.gpus.values())
    index = next(i for i in range(len(taken) + 1) if i not in taken)
    state.gpus[task, rank] = index
    return index


def local_rank(state: State, task: str, rank: Rank) -> int:
    """Of the roles of this task: torchrun's LOCAL_RANK, which begins with 0 in every task."""
    index = index_of(state, task, rank)
    return index - min(i for (its, _), i in state.gpus.items() if its == task)


def _roles_here(state: State, asks: str) -> set[Role]:
    """Those that a process of this node has or is meant for, and those whose state is kept here."""
    workers = [w for w in state.workers.values() if w.phase is not Phase.GONE]
    held = {(w.task, w.rank) for w in workers if not (w.name == asks and w.waiting)}
    return held | set(state.roles)
