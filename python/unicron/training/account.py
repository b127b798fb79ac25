"""What a recovery cost, as one rank saw it: reported to the coordinator when the healed iteration is committed."""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Iterator

from unicron.healing.machine import HealingMachine
from unicron.messages import Healed
from unicron.training.gloo_device import interface_name
from unicron.training.groups import Groups
from unicron.training.link import WorkerLink, now_ms
from unicron.types import EpochPlan, PlanKind, Rank, StateSource, Transfer

ITERATIONS_REMEMBERED = 64
TRANSFERS_MAX = 256  # of one recovery that began again and again


class Account:
    def __init__(self, link: WorkerLink, machine: HealingMachine, groups: Groups) -> None:
        self._link, self._machine, self._groups = link, machine, groups
        self._durations: deque[float] = deque(maxlen=ITERATIONS_REMEMBERED)
        self._last_commit_ms: float | None = None
        self._committed_ns = 0  # an heir's, that has committed nothing
        self.state_source: str = StateSource.NONE_NEEDED
        self._reset()

    def _reset(self) -> None:
        self._interrupted: int | None = None
        self._interrupted_ms = 0.0
        self._again: set[tuple[int, int]] = set()
        self._recompute_ms = 0.0
        self._rebuilt = 0
        self._lost = 0
        self.is_far_heir = False  # of a role whose arena is lost with its node: what had begun is not known
        self._phases: dict[str, float] = {}
        self._transfers: list[Transfer] = []
        self.state_source = StateSource.NONE_NEEDED

    # ---------------------------------------------------------- facts, as they happen

    def plan_arrived(self, plan: EpochPlan) -> None:
        if plan.kind is not PlanKind.START and self._interrupted is None:
            self._interrupted = self._machine.record.iteration

    def forward_begins(self, iteration: int, micro_batch: int, again: bool) -> None:
        """again: it had begun on this role before. One of a lost replica, dealt to this one, had begun elsewhere,
        whether this one had begun its own by then or not."""
        if again or (self._machine.healing and self._began_elsewhere(micro_batch)):
            self._again.add((iteration, micro_batch))

    def _began_elsewhere(self, micro_batch: int) -> bool:
        machine = self._machine
        if machine.is_extra or self.state_source == StateSource.BUDDY or self.is_far_heir:
            return True
        return machine.is_others(micro_batch // machine.layout.ep)

    def groups_made(self, number: int) -> None:
        self._rebuilt += number

    def restored(self, before: int, iteration: int) -> None:
        self.went_back(before, iteration)
        self.state_source = StateSource.CHECKPOINT

    def went_back(self, before: int, iteration: int) -> None:
        """before, iteration: committed steps in the state, then and now."""
        self._lost = max(self._lost, before - iteration)

    def transferred(
        self, before: EpochPlan, plan: EpochPlan, source: Rank, target: Rank, measured: tuple[int, float]
    ) -> None:
        """State went from a role's holder in the plan before to one in this plan. measured: bytes, ms."""
        giver, taker = before.member(source), plan.member(target)
        if giver is not None and taker is not None:
            interface = interface_name(on_gpu=self._groups.is_on_gpu)
            nbytes, ms = measured
            self._transfers.append(Transfer(target, giver.node, taker.node, nbytes, round(ms, 3), interface))

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        start = now_ms()
        try:
            yield
        finally:
            took = now_ms() - start
            if self._machine.healing or phase == "AwaitPlan":  # that one is over before the plan is acted on
                self._phases[phase] = self._phases.get(phase, 0.0) + took
                if phase == "Compute" and self._again:
                    self._recompute_ms += took

    def committed(self, iteration: int) -> None:
        """A step is in the parameters: the iteration's wall time is commit to commit."""
        now = now_ms()
        if self._last_commit_ms is not None:
            took = now - self._last_commit_ms
            if self._interrupted is not None and iteration >= self._interrupted:
                self._interrupted_ms = max(self._interrupted_ms, took)
            else:
                self._durations.append(took)
        self._last_commit_ms = now
        self._committed_ns = int(now * 1e6)

    def ended(self) -> None:
        """No iteration follows: what the recovery took is what went by since the last commit."""
        if self._interrupted is not None and self._last_commit_ms is not None and self._durations:
            since_ms = statistics.median(self._durations) + now_ms() - self._last_commit_ms
            self._interrupted_ms = max(self._interrupted_ms, since_ms)

    # ---------------------------------------------------------- the report

    def healed(self, iteration: int) -> None:
        plan = self._machine.plan
        assert plan is not None
        self._link.send(
            Healed(
                worker=self._link.worker,
                rank=self._machine.rank,
                epoch=plan.epoch,
                iteration=iteration,
                interrupted=iteration if self._interrupted is None else self._interrupted,
                iteration_ms=self._interrupted_ms,
                median_ms=statistics.median(self._durations) if self._durations else 0.0,
                committed_ns=self._committed_ns,
                micro_batches_recomputed=tuple(sorted(self._again)),
                recompute_ms=self._recompute_ms,
                groups_kept=self._groups.kept() if self._machine.replica not in plan.wounded() else 0,
                groups_rebuilt=self._rebuilt,
                state_source=str(self.state_source),
                iterations_lost=self._lost,
                phases_ms={k: round(v, 3) for k, v in self._phases.items()},
                transfers=tuple(self._transfers[-TRANSFERS_MAX:]),
            )
        )
        self._reset()
