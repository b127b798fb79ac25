"""Planted mistakes inside the healing machine; plants.py lists them."""

from __future__ import annotations

from unicron.healing import actions as do
from unicron.healing.machine import HealingMachine, Phase
from unicron.healing.record import CommitResult
from unicron.types import Stage


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


HEALING_PLANTS: dict[str, type[HealingMachine]] = {"tie-after-reduce": TieAfterReduce, "no-confirm": NoConfirm}
