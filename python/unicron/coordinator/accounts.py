"""The members' accounts of a recovery (Healed), folded into the incidents that their epoch answers."""

from __future__ import annotations

from typing import Any

from unicron.coordinator.accounting import note_transition
from unicron.coordinator.bandwidth import judged_all, slow_words
from unicron.coordinator.journal import CheckpointSaved, HealingClosed
from unicron.coordinator.leaving import is_last_word
from unicron.coordinator.starting import wait_for_slots
from unicron.coordinator.state import TaskState
from unicron.coordinator.step import Step
from unicron.coordinator.symptoms import member_speaks, speaker
from unicron.coordinator.transitions import NodePhase
from unicron.messages import Healed, Saved
from unicron.types import Outcome, PlanKind, StateSource

_FARTHEST = (  # of several sources the farthest is the incident's
    StateSource.NONE_NEEDED,
    StateSource.OWN_ARENA,
    StateSource.NODE_ARENA,
    StateSource.REPLICA,
    StateSource.BUDDY,
    StateSource.CHECKPOINT,
)


TRANSITION_OF = {
    PlanKind.SHRINK: "shrink", PlanKind.GROW: "grow", PlanKind.REPLACE: "restart", PlanKind.RESTORE: "start",
    PlanKind.RESHAPE: "reshape", PlanKind.MOVE: "move",
}  # fmt: skip


def on_healed(step: Step, task: TaskState, body: Healed) -> None:
    if member_speaks(step, task, body) is None:
        return
    if body.epoch < task.epoch:
        step.refuse("stale_epoch", f"healed in epoch {body.epoch}, now {task.epoch}")
        return
    if body.rank not in task.awaiting:
        step.refuse("duplicate", f"rank {body.rank} already gave its account of {task.epoch}")
        return
    task.healed[body.rank] = body
    task.awaiting.discard(body.rank)
    task.iteration = max(task.iteration, body.iteration)
    if not task.awaiting:
        step.touch(task)


def on_saved(step: Step, task: TaskState, body: Saved) -> None:
    """Sent when the checkpoint is complete for everybody: the newest one is what RESTORE loads."""
    if speaker(step, task, body.worker) is None:
        return
    if body.final and task.leaving and body.epoch == task.epoch:
        task.last_word = body  # it is said once, perhaps before a coordinator that came back knows that all healed
        step.touch(task)
    if task.checkpoint is not None and body.iteration <= task.checkpoint[0]:
        step.refuse("stale_checkpoint", f"iteration {body.iteration}, have {task.checkpoint[0]}")
        return
    step.write(CheckpointSaved(task.name, body.iteration, body.path), "a checkpoint is complete")


def settle_leaving(step: Step, task: TaskState) -> bool:
    """Its members saved and hold, and nothing else is the matter: it gives its slots up. True when it did."""
    word = task.last_word
    if word is None or not is_last_word(task, word.epoch):
        return False
    task.last_word = None
    if task.checkpoint is None or word.iteration < task.checkpoint[0]:
        return False
    wait_for_slots(step, task, f"{task.leaving} (saved at iteration {word.iteration})")
    return True


def close_healing(step: Step, task: TaskState, reason: str) -> None:
    """HEALING is over: every incident that the present epoch answers gets what the members measured."""
    step.cancel_timer("heal", task.name, reason)
    accounts = _accounts(step, task)
    slow = slow_words(accounts.get("transfers", ()))
    closing = f"{reason}; {slow}" if slow else reason
    lost = accounts.pop("iterations_lost", 0)
    for incident in step.state.open_incidents(task.name):
        if not incident.epoch:
            continue
        node = step.state.nodes.get(incident.node)
        lends = bool(task.guests) and node is not None and node.phase is NodePhase.LOST
        resized = incident.kind is PlanKind.SHRINK or lends
        missing = max(incident.slots - len(task.slotted), 0) if resized else 0
        step.change_incident(
            incident,
            closing,
            outcome=Outcome.RESIZED if resized else Outcome.HEALED,
            missing_slots=missing,
            resume_ms=(incident.detect_ms or 0.0) + step.now_ms - incident.opened_ms,
            iterations_lost=max(incident.iterations_lost or 0, lost),
            **accounts,
        )
    kind = TRANSITION_OF.get(task.plan.kind) if task.plan else None
    if kind == "restart" and task.is_adopted:
        kind = "standby"
    task.is_adopted, task.standby_why = False, ""
    if kind is not None:
        note_transition(step, task, kind)
    step.move_task(task, "healed")
    if not task.awaiting:  # else somebody may be anywhere: the next plan wounds everybody
        step.write(HealingClosed(task.name, task.epoch), reason)
    task.awaiting = set()
    task.healed = {}
    task.heal_tries = 0
    delay_ms = step.config.understudy_delay_ms
    step.set_timer("understudy", task.name, delay_ms, "understudies are replaced after the healing")


def _accounts(step: Step, task: TaskState) -> dict[str, Any]:
    if not task.healed:
        return {}
    healed = task.healed.values()
    heirs = task.plan.heirs if task.plan else ()
    sources = [h.state_source for h in healed if h.rank in heirs or not heirs]
    known = [StateSource(s) for s in sources if s in set(StateSource)]
    pairs = {pair for h in healed for pair in h.micro_batches_recomputed}
    # an heir has committed nothing before; and an iteration interrupted at its end may be shorter than the usual one
    lost = [max(h.iteration_ms - h.median_ms, 0.0) for h in healed if h.iteration_ms and h.median_ms]
    return {
        "lost_ms": max(lost, default=None),
        "state_source": max(known, key=_FARTHEST.index, default=StateSource.NONE_NEEDED),
        "transfers": judged_all((each for h in healed for each in h.transfers), step.state.nodes, step.config),
        "iterations_lost": max(h.iterations_lost for h in healed),
        "micro_batches_recomputed": len(pairs),
        # every member of a group counts it, so the sum would count groups several times
        "groups_kept": max(h.groups_kept for h in healed),
        "groups_rebuilt": max(h.groups_rebuilt for h in healed),
        "recompute_ms": max(h.recompute_ms for h in healed),
        "phases_ms": {
            phase: max(h.phases_ms.get(phase, 0.0) for h in healed)
            for phase in sorted({phase for h in healed for phase in h.phases_ms})
        },
    }
