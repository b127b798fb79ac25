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
from unicron.messages import GpuRequest
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
    worker.built_for = request.rank
    index = gpu_of(step.state, step.config.node, request)
    reason = f"rank {request.rank} of {request.task} lives there"
    if index < 0:
        reason = (
            f"rank {request.rank} of {request.task} finds no GPU: this node's {request.num_gpus} all have roles; "
            f"give its agent as many slots as it has GPUs"
        )
    worker.has_gpu = index >= 0
    step.actions.append(GrantGpu(event.request_id, index, reason))


def gpu_of(state: State, node: str, request: GpuRequest) -> int:
    """The role's GPU: its one until now, or the lowest free one, or one on which nothing of the present plans is. -1:
    there is none. Who asks gives up the role that it was built for."""
    role = (request.task, request.rank)
    held, kept, waited_for = _roles_here(state, node, request.worker)
    for other in [other for other in state.gpus if other not in held | kept | waited_for]:
        del state.gpus[other]

    def taken(by: set[Role]) -> set[int]:
        return {index for other, index in state.gpus.items() if other in by and other != role}

    known = state.gpus.get(role)
    if known is not None and known < request.num_gpus and known not in taken(held):
        return known
    for in_use in (held | kept | waited_for, held | kept, held):
        free = next((index for index in range(request.num_gpus) if index not in taken(in_use)), None)
        if free is not None:
            state.gpus[role] = free
            return free
    return -1


def _roles_here(state: State, node: str, asks: str) -> tuple[set[Role], set[Role], set[Role]]:
    """(those of this node's processes, and those that a plan has here; others whose state is kept here: an heir may
    come to it, or nobody; those that somebody is built for, and waits, or joins before its plan is out)."""
    workers = [w for w in state.workers.values() if w.phase is not Phase.GONE and w.name != asks]
    held = {(w.task, w.rank) for w in workers if not w.waiting}
    held |= {(plan.task, m.rank) for plan in state.plans.values() for m in plan.members if m.node == node}
    return held, set(state.roles), {(w.task, w.built_for) for w in workers if w.waiting}
