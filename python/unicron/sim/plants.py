"""Planted mistakes: what the liveness phase must find. Each was a real hang, or would have been one.

* keep-healthy-cross-group (MECHANICS 1.1): a group between replicas that lost nobody is kept: its members wait in
it for ranks that wait in the meeting. (In worker.py: what the monitor shuts and what a meeting rebuilds.)
* tie-after-reduce (MECHANICS 1.2): a collective inside the replica after those between replicas: the last stage of
a whole replica waits in it for the first one, which failed between replicas.
* no-confirm (docs/ARCHITECTURE.md): one rank of a whole replica steps and waits in the next iteration for another,
whose commit was interrupted and who sits in the meeting.
"""

from __future__ import annotations

from unicron.healing import actions as do
from unicron.healing.machine import HealingMachine, Phase
from unicron.healing.record import CommitResult
from unicron.sim.memory import NUM_SEGMENTS
from unicron.types import Layout, Rank, Stage

PLANTS = ("keep-healthy-cross-group", "tie-after-reduce", "no-confirm")


def machine_for(plant: str, rank: Rank, layout: Layout) -> HealingMachine:
    kinds = {"tie-after-reduce": TieAfterReduce, "no-confirm": NoConfirm}
    return kinds.get(plant, HealingMachine)(rank, layout, NUM_SEGMENTS)


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
