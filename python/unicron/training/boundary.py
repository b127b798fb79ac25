"""What a worker does at the boundary where the commit said that all hold: wait to be told why, save or hand its role
over, and wait for what is decided. Every wait here ends by a newer epoch, the agent's end, or its bound.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from unicron import _core
from unicron.messages import ChangeLayout, MoveRoles, Saved
from unicron.training.engine import Engine
from unicron.training.link import WorkerLink, now_ms
from unicron.training.moving import Preparation, Taken, say_late
from unicron.types import EpochPlan, Rank, Stage

HOLD_MS_MAX = 600_000  # above the coordinator's own bound for a checkpoint to become complete, or for a move
POLL_S = 0.02
POLL_MS = 100
LATE_MS = 2_000  # who holds for a move so long says so: perhaps nobody knows of it any more


class HeldTooLong(RuntimeError):
    """Told to hold, and then forgotten."""


def order_to_hold(link: WorkerLink, plan: EpochPlan, iteration: int) -> ChangeLayout | MoveRoles | None:
    """Others may have heard before us why all hold: another layout, roles that move, or (None) the task leaves its
    slots. Raises HeldTooLong."""
    deadline = now_ms() + HOLD_MS_MAX
    while not link.told_to_hold and link.monitor.newest_epoch() <= plan.epoch:
        if link.change is not None:
            return link.change
        if link.move is not None and link.move.switch:
            return link.move
        link.pulse.advance(int(Stage.SAVE), iteration, -1)
        link.take_orders()
        if now_ms() > deadline:
            raise HeldTooLong(f"all hold at iteration {iteration}, and nobody said why in {HOLD_MS_MAX} ms")
        time.sleep(POLL_S)
    return None


def is_given_up(known: MoveRoles, order: MoveRoles | None, newest: EpochPlan | None, entered: EpochPlan | None) -> bool:
    """Is what was prepared for a move of no use any more? order: what is announced now; newest: the newest plan heard
    of; entered: the one whose groups are in use. A rank may hear that its move is decided before it comes to the
    boundary: what it prepared is what all the others will use then."""
    if newest is not None and newest == known.plan and entered != newest:
        return False
    return order is None or order.plan != known.plan


def save_and_hold(link: WorkerLink, checkpoints: Any, plan: EpochPlan, rank: Rank, iteration: int) -> None:
    """Save, say when the checkpoint is complete, and wait: the agent ends this process, or a newer epoch frees it.
    Raises HeldTooLong."""
    checkpoints.save_last(iteration - 1, plan.epoch)
    deadline = now_ms() + HOLD_MS_MAX
    while link.monitor.newest_epoch() <= plan.epoch:
        link.pulse.advance(int(Stage.SAVE), iteration, -1)
        finished = checkpoints.poll()
        if finished is not None and finished[0] == iteration and rank == min(plan.ranks):
            link.send(Saved(link.worker, rank, finished[0], finished[1], plan.epoch, final=True))
        if now_ms() > deadline:
            raise HeldTooLong(f"saved at iteration {iteration} and neither ended nor freed in {HOLD_MS_MAX} ms")
        time.sleep(POLL_S)


def hand_over(link: WorkerLink, move: Preparation, engine: Engine, iteration: int) -> None:
    """A leaver sends its state, and all wait for the decision. Raises HeldTooLong."""
    if move.is_leaver:
        try:
            move.give_state(engine)
        except RuntimeError as error:  # the joiner, or a newer epoch, says what comes of it
            print(f"unicron: rank {move.rank}: its state did not go out: {error}", file=sys.stderr)
    is_late, begun = False, now_ms()
    while _is_undecided(link, move.order):
        link.pulse.advance(int(Stage.SAVE), iteration, -1)
        link.wait_for_orders(POLL_MS)
        if now_ms() - begun > LATE_MS and not is_late:
            is_late = True
            say_late(move, iteration)
        _bound(begun, f"holds at iteration {iteration} for a move")


def take_over_role(link: WorkerLink, engine: Engine, rank: Rank, order: MoveRoles) -> Taken | None:
    """A joiner's way in: its groups, the leaver's state into an arena of its own, then the decision. None when the
    state is not there. Raises HeldTooLong, and RuntimeError without an arena."""
    move = Preparation(link, order, rank, engine.groups)
    if _has_room(engine):  # before anything is connected: the switch, for which all wait, must not pay for it
        take_fresh_arena(link, engine, rank)
        move.run()
    else:
        move.refuse(f"the GPU of rank {rank} on its new node has no room for its state")
    taken, begun = None, now_ms()
    try:
        if not move.error:
            taken = move.take_state(engine)
            engine.account.transferred(order.former, order.plan, rank, rank, move.taken)
            nbytes, seconds = max(engine.memory.content_bytes, move.taken[0]), {"state": (now_ms() - begun) / 1000}
            move.say("moved", iteration=taken.iteration, state_bytes=nbytes, seconds=seconds)
    except RuntimeError as error:
        if not move.is_over():
            move.say("moved", error=f"{type(error).__name__}: {error}")
    begun = now_ms()
    while _is_undecided(link, order) and not link.finished:
        link.receive(POLL_MS)
        _bound(begun, f"has the state of rank {rank} and waits")
    move.close()
    return taken


def _has_room(engine: Engine) -> bool:
    """On a GPU who waited has built its model without memory (arena_pool.py); now it gets some of its own."""
    try:
        engine.memory.take_own_memory()
    except _core.UnicronError as error:
        print(f"unicron: no memory for the state that is to come: {error}", file=sys.stderr)
        return False
    return True


def take_fresh_arena(link: WorkerLink, engine: Engine, rank: Rank) -> None:
    """Go on in it, with the present content. Raises RuntimeError when the agent gives none."""
    memory = engine.memory
    slabs = memory.export()
    fd, grant, _ = link.request_arena(rank, memory.content_bytes, memory.digest, adopt=False, gpu=slabs)
    for ours in slabs[0]:
        os.close(ours)
    if fd < 0:
        raise RuntimeError(f"the agent gave no arena: {grant.refused}")
    type(engine.ledger).of_new_arena(fd, memory.digest, memory.content_bytes)
    memory.move_to(fd)
    engine.ledger = type(engine.ledger)(memory.fd)


def _is_undecided(link: WorkerLink, order: MoveRoles) -> bool:
    return link.plan is None or link.plan.epoch <= order.former.epoch


def _bound(begun: float, who: str) -> None:
    if now_ms() - begun > HOLD_MS_MAX:
        raise HeldTooLong(f"{who}, undecided in {HOLD_MS_MAX} ms")
