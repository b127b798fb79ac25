"""What a simulated worker does when roles move: prepare beside training, hold at the boundary, hand its state over.

The counterpart of training/moving.py. The pairs between leavers and joiners are made in the preparation.
"""

from __future__ import annotations

from unicron.healing.record import Record
from unicron.messages import ArenaRequest, MoveReady, MoveRoles, WorkerReady
from unicron.sim.worker_healing import WorkerHealing
from unicron.types import EpochPlan, Member


class WorkerMoving(WorkerHealing):
    is_joining = False  # its arena is on its way
    _moved: EpochPlan | None = None  # the announced plan whose role's state it has

    def on_move(self, message: MoveRoles) -> None:
        if self.newest is not None and message.plan.epoch <= self.newest.epoch:
            return
        again = self.move is not None and self.move.plan == message.plan
        self.move = message
        if not again:  # told twice (its node was away meanwhile) it prepares once; its agent keeps what it said
            self.prepare()

    def prepare(self) -> None:
        """Phase 1, in the background: it says so when it has its part."""
        move = self.move
        assert move is not None
        seat = self._seat(move.plan)
        if self.machine is not None:
            self._later(self.rng.uniform(20.0, 120.0), lambda: self._prepared(move))
        elif self.is_waiting_role and seat is not None and not self.is_joining:
            if self.rank != seat.rank:  # built again
                self.rank = seat.rank
                self.say(WorkerReady(self.name, self.rank, True))
            self.is_joining = True
            request = ArenaRequest(self.task, self.name, self.rank, 1, "digest", False)
            self._later(self.rng.uniform(20.0, 60.0), lambda: self.host.ask_arena(self, request))

    def arena_came(self) -> None:
        if self.move is not None and self.machine is None:
            self._prepared(self.move)

    def _prepared(self, move: MoveRoles) -> None:
        if self.move is not None and self.move.plan == move.plan:
            self.say_ready(move, "prepared")

    def say_ready(self, move: MoveRoles, phase: str, iteration: int = -1) -> None:
        plan = move.plan
        joiners = tuple(m.worker for m in plan.members if m.rank in plan.heirs)
        self.say(MoveReady(self.name, self.rank, plan.epoch, phase, iteration, joiners))

    def _seat(self, plan: EpochPlan) -> Member | None:
        return next((m for m in plan.members if m.worker == self.name), None)

    def hand_over(self, move: MoveRoles, iteration: int) -> None:
        """At the boundary, where all hold. Who stays waits for the decision, and says so when it hears nothing."""
        plan = move.plan
        self._later(500.0, lambda: self._held(iteration, move))
        if self._seat(plan) is not None:
            return
        member = plan.member(self.rank)
        joiner = None if member is None else self.world.worker(member.worker)
        if joiner is None:
            return
        account = self.memory.read(self.rank)

        def arrive() -> None:
            if self.alive and self._holds_for(iteration, move):  # its process is the other end
                joiner.gate(lambda: joiner.take_over(move, iteration, account))

        self._later(self.rng.uniform(2.0, 20.0), arrive)

    def _holds_for(self, iteration: int, move: MoveRoles) -> bool:
        return self.holds == iteration and self.move is not None and self.move.plan == move.plan

    def _held(self, iteration: int, move: MoveRoles) -> None:
        if self._holds_for(iteration, move):
            self.say_ready(move, "held", iteration)
            self._later(500.0, lambda: self._held(iteration, move))

    def take_over(self, move: MoveRoles, iteration: int, account: Record) -> None:
        if self.move is None or self.move.plan != move.plan or not self.is_waiting_role or self.is_joining:
            return
        self.memory.end_step(iteration, gathered=account.gathered)
        self.memory.commit, self.memory.branch = account.commit, account.branch
        self._moved = move.plan
        self.say_ready(move, "moved", iteration)

    def has_moved_in(self, plan: EpochPlan) -> bool:
        """Is the state that it took over that of a role which the plan gives it? Not when the move was called off."""
        moved = self._moved
        if moved is None or self._seat(plan) is None or plan.epoch < moved.epoch:
            return False
        return plan == moved or self.rank not in plan.heirs
