"""Arenas: memory that outlives its worker. Kept here, granted to an adopter only when the former owner is gone.

Gone means that nothing of the process can write any more (`owner_gone`: every thread exiting, 0.3-2.5 ms after the
kill), not that it is reaped (44-121 ms): MECHANICS 1.7. An adopter waits for that, bounded, and then gets a fresh
arena with the reason; its state comes from a replica then.
"""

from __future__ import annotations

from unicron.agent.actions import DropArena, GrantArena, LookAtOwner
from unicron.agent.events import ArenaRequested
from unicron.agent.state import Adoption, Arena, Worker
from unicron.agent.step import Step
from unicron.agent.transitions import Phase
from unicron.messages import ArenaRequest
from unicron.types import EpochPlan, PlanKind


def on_requested(step: Step, event: ArenaRequested) -> None:
    request = event.request
    worker = step.find(request.worker, "said")
    if worker is None:
        return
    if request.epoch:
        _stage(step, event.request_id, worker, request)
        return
    if request.task != worker.task or request.rank != worker.rank:
        held = f"{worker.task} {worker.rank}"
        step.refuse("not_holder", f"{worker.name} is {held}, not {request.task} {request.rank}")
        return
    if not request.adopt:
        _grant_fresh(step, event.request_id, worker, request.nbytes, request.digest, "")
        return
    arena_id = step.state.roles.get((worker.task, worker.rank))
    if arena_id is None:
        _refuse_last(step, event.request_id, worker, request, "no earlier arena on this node")
        return
    arena = step.state.arenas[arena_id]
    if (arena.nbytes, arena.digest) != (request.nbytes, request.digest):
        _refuse_last(step, event.request_id, worker, request, "the last arena has another layout")
        return
    owner = step.state.workers.get(arena.owner)
    if owner is None or owner.phase is Phase.GONE or owner.name == worker.name:
        _adopt(step, event.request_id, worker, arena)
        return
    step.state.adoptions.append(
        Adoption(event.request_id, worker.name, arena_id, request.nbytes, request.digest, step.now_ms)
    )
    look(step, owner)


def look(step: Step, owner: Worker) -> None:
    """Somebody may be waiting for this owner's end."""
    wanted = any(step.state.arenas[a.arena].owner == owner.name for a in step.state.adoptions)
    if wanted and owner.phase is not Phase.GONE:
        reason = "an adopter waits for its arena"
        step.actions.append(LookAtOwner(owner.name, owner.pid, reason))
        step.set_timer("look", owner.name, step.config.owner_gone_ms, reason)


def on_looked(step: Step, name: str, gone: bool) -> None:
    worker = step.state.workers.get(name)
    if worker is None:
        step.refuse("unknown_worker", f"OwnerLooked: {name}")
    elif gone:
        owner_gone(step, worker)


def owner_gone(step: Step, owner: Worker) -> None:
    step.cancel_timer("look", owner.name, "it is gone")
    for adoption in list(step.state.adoptions):
        arena = step.state.arenas[adoption.arena]
        if arena.owner == owner.name:
            step.state.adoptions.remove(adoption)
            adopter = step.state.workers.get(adoption.worker)
            if adopter is not None and not adopter.is_dead:
                _adopt(step, adoption.request_id, adopter, arena)


def on_look_timer(step: Step, owner: Worker) -> None:
    for adoption in list(step.state.adoptions):
        if step.state.arenas[adoption.arena].owner != owner.name:
            continue
        adopter = step.state.workers.get(adoption.worker)
        late = step.now_ms - adoption.asked_ms >= step.config.owner_gone_ms_max
        if adopter is None or adopter.is_dead:
            step.state.adoptions.remove(adoption)
        elif late:
            step.state.adoptions.remove(adoption)
            why = f"its owner {owner.name} is not gone after {step.config.owner_gone_ms_max:g} ms"
            _grant_fresh(step, adoption.request_id, adopter, adoption.nbytes, adoption.digest, why)
    look(step, owner)


def _adopt(step: Step, request_id: str, worker: Worker, arena: Arena) -> None:
    scratch = [a.id for a in step.state.arenas.values() if a.owner == worker.name and a.id != arena.id]
    former, arena.owner = arena.owner, worker.name
    reason = f"{worker.name} takes over from {former}"
    step.actions.append(
        GrantArena(
            request_id, arena.id, arena.task, arena.rank, worker.name, arena.nbytes, False, "",
            reason,
        )
    )  # fmt: skip
    for other in scratch:
        _drop(step, other, reason)


def _refuse_last(step: Step, request_id: str, worker: Worker, request: ArenaRequest, why: str) -> None:
    _grant_fresh(step, request_id, worker, request.nbytes, request.digest, why)


def _grant_fresh(step: Step, request_id: str, worker: Worker, nbytes: int, digest: str, why: str) -> None:
    """A new arena. A member's becomes its role's; a waiting worker's is scratch until it holds the role."""
    state = step.state
    if len(state.arenas) >= step.config.arenas_max:
        step.refuse("too_many_arenas", f"{worker.name}: {len(state.arenas)} are kept")
        return
    for stale in [a.id for a in state.arenas.values() if a.owner == worker.name]:
        _drop(step, stale, f"{worker.name} gets another")
    state.arena_count += 1
    arena = Arena(f"{worker.name}#{state.arena_count}", worker.task, worker.rank, worker.name, nbytes, digest)
    state.arenas[arena.id] = arena
    reason = why or "a fresh one was asked for"
    step.actions.append(
        GrantArena(request_id, arena.id, arena.task, arena.rank, worker.name, nbytes, True, why, reason)
    )
    if not worker.waiting:
        former = state.roles.get((worker.task, worker.rank))
        state.roles[(worker.task, worker.rank)] = arena.id
        if former is not None and former in state.arenas:
            _drop(step, former, "its role has a newer arena")


def _stage(step: Step, request_id: str, worker: Worker, request: ArenaRequest) -> None:
    """One for a role of a layout that is announced. The present arenas stay: what is in them may be gone back to."""
    state = step.state
    change = state.changes.get(worker.task)
    if change is None or change.epoch != request.epoch or request.task != worker.task:
        step.refuse("stale_epoch", f"{worker.name} asks for an arena of epoch {request.epoch}")
        return
    if len(state.arenas) >= step.config.arenas_max:
        step.refuse("too_many_arenas", f"{worker.name}: {len(state.arenas)} are kept")
        return
    key = (worker.task, request.rank)
    if key in state.staged:
        _drop(step, state.staged.pop(key), f"{worker.name} gets another")
    state.arena_count += 1
    arena = Arena(
        f"{worker.name}#{state.arena_count}", worker.task, request.rank, worker.name, request.nbytes, request.digest
    )
    state.arenas[arena.id] = arena
    state.staged[key] = arena.id
    reason = f"rank {request.rank} in the layout of epoch {request.epoch}"
    step.actions.append(
        GrantArena(request_id, arena.id, arena.task, arena.rank, worker.name, arena.nbytes, True, "", reason)
    )


def settle_staged(step: Step, plan: EpochPlan) -> None:
    """A plan is out: the announced layout is the task's, and the former one's arenas go; or it was called off."""
    state = step.state
    change = state.changes.pop(plan.task, None)
    if change is None:
        return
    staged = {key: arena for key, arena in state.staged.items() if key[0] == plan.task}
    for key in staged:
        del state.staged[key]
    if plan.layout != change.layout:
        for arena in staged.values():
            _drop(step, arena, f"epoch {plan.epoch}: the change of layout was called off")
        return
    for arena in [a.id for a in state.arenas.values() if a.task == plan.task and a.id not in staged.values()]:
        _drop(step, arena, f"of the layout before epoch {plan.epoch}")
    state.roles.update(staged)
    for role in [role for role in state.times if role[0] == plan.task]:
        del state.times[role]  # what is usual for a role is another thing now,
    for worker in state.of_task(plan.task):
        worker.first_iteration = None  # and a first iteration is none by which others are judged


def settle_moved(step: Step, plan: EpochPlan) -> None:
    """A role that has a home elsewhere leaves its arena here: whoever comes back to it must not find it. A joiner of a
    move has filled its own."""
    state = step.state
    here = {member.rank: member for member in plan.members if member.node == step.config.node}
    elsewhere = {member.rank for member in plan.members} - here.keys()
    for (task, rank), arena in list(state.roles.items()):
        if task == plan.task and rank in elsewhere:
            _drop(step, arena, f"rank {rank} lives elsewhere since epoch {plan.epoch}")
    if plan.kind is not PlanKind.MOVE:
        return
    for rank in plan.heirs:
        own = next((a.id for a in state.arenas.values() if rank in here and a.owner == here[rank].worker), None)
        former = state.roles.get((plan.task, rank))
        if own is None or former == own:
            continue
        if former is not None:
            _drop(step, former, f"{here[rank].worker} brought another")
        state.arenas[own].rank = rank
        state.roles[plan.task, rank] = own


def role_taken(step: Step, worker: Worker) -> None:
    """A plan names this worker: a role without any arena on this node gets the one it has."""
    key = (worker.task, worker.rank)
    own = next((a.id for a in step.state.arenas.values() if a.owner == worker.name), None)
    if own is not None and key not in step.state.roles:
        step.state.arenas[own].rank = worker.rank
        step.state.roles[key] = own


def drop_of_ended(step: Step, task: str) -> None:
    """Arenas of a dead scratch owner, and all of a task that is over here."""
    state = step.state
    over = task in state.ended and all(w.phase is Phase.GONE for w in state.of_task(task))
    named = {*state.roles.values(), *state.staged.values(), *(a.arena for a in state.adoptions)}
    for arena in [a for a in state.arenas.values() if a.task == task]:
        owner = state.workers.get(arena.owner)
        orphan = arena.id not in named and (owner is None or owner.phase is Phase.GONE)
        if over or orphan:
            _drop(step, arena.id, "nobody will adopt it")


def _drop(step: Step, arena_id: str, reason: str) -> None:
    arena = step.state.arenas.pop(arena_id)
    key = (arena.task, arena.rank)
    if step.state.roles.get(key) == arena_id:
        del step.state.roles[key]
    if step.state.staged.get(key) == arena_id:
        del step.state.staged[key]
    step.state.adoptions = [a for a in step.state.adoptions if a.arena != arena_id]
    step.actions.append(DropArena(arena_id, reason))
