"""Planted mistakes inside the healing machine; plants.py lists them."""

from __future__ import annotations

import msgspec

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine, Phase, Work
from unicron.healing.record import CommitResult
from unicron.types import PlanKind, Stage


class NoConfirm(HealingMachine):
    """Who has the commit's result steps, who has not goes to the meeting: each rank for itself."""

    def _committed(self, result: CommitResult) -> do.AnyAction:
        self._set(commit=result)
        return self._step_with(result, Phase.STEP, "committed")

    def _miss_commit(self, why: str, inside: bool) -> do.AnyAction:
        return self._repair_or_wait(why, inside)


class TieAfterReduce(HealingMachine):
    def _miss_commit(self, why: str, inside: bool) -> do.AnyAction:
        return self._repair_or_wait(why, inside)

    def _tie(self) -> do.AnyAction:
        self._set(summed=True)
        return self._enter_reduction("sums are whole")

    def _reduced(self) -> do.AnyAction:
        self._set(segments_reduced=self.num_segments, stage=Stage.TIE)
        return self._to(Phase.TIE, do.Tie(reason="planted: after the reduction"))

    def _tied(self) -> do.AnyAction:
        self._set(stage=Stage.COMMIT)
        return self._to(Phase.COMMIT, do.Commit(reason="planted"))

    _on_done = {
        **HealingMachine._on_done,
        Phase.COMPUTE: lambda self: self._tie(),
        Phase.REDUCE: lambda self: self._reduced(),
        Phase.TIE: lambda self: self._tied(),
    }


class EagerWithoutHeirs(HealingMachine):
    """An heir knows nothing of its model's backward, and leaves its segments for the reduction."""

    is_heir = False

    def step(self, event: on.AnyEvent) -> tuple[do.AnyAction, ...]:
        if isinstance(event, on.Joined):
            self.is_heir = event.plan.kind is not PlanKind.START
        return super().step(event)

    def _work(self, work: Work) -> do.AnyAction:
        action = super()._work(work)
        if isinstance(action, do.Compute) and self.is_heir:
            return msgspec.structs.replace(action, eager=False)
        return action


class LateAtHold(HealingMachine):
    """Parameters are still under way when everybody saves, or hands roles over."""

    def _gathers_late(self) -> bool:
        commit = self.record.commit
        assert commit is not None
        return self._is_late_agreed and commit.iteration > self._undisturbed_after


class LateUnawares(HealingMachine):
    """Who has heard of a plan gathers at once, and the others do not."""

    def _gathers_late(self) -> bool:
        return super()._gathers_late() and not self.pending


HEALING_PLANTS: dict[str, type[HealingMachine]] = {
    "tie-after-reduce": TieAfterReduce, "no-confirm": NoConfirm, "eager-without-heirs": EagerWithoutHeirs,
    "late-at-hold": LateAtHold, "late-unawares": LateUnawares,
}  # fmt: skip
