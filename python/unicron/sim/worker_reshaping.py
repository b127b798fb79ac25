"""What a simulated worker does when the layout changes: hold, meet everybody, take its part over, wait for the plan.

The counterpart of training/reshard/change.py and session.py. What is moved is not modelled, only who has it when: a
staged arena is whole when all participants met, and counts from the plan that decides on.
"""

from __future__ import annotations

from dataclasses import dataclass

from unicron.healing import events as on
from unicron.messages import ArenaRequest, ChangeLayout, LayoutReady, announced_name
from unicron.sim.memory import Memory
from unicron.sim.worker_moving import WorkerMoving
from unicron.types import EpochPlan, Member, Stage

LOOK_MS = 20.0


@dataclass
class GoesOver:
    """One participant's way into another layout."""

    order: ChangeLayout
    iteration: int  # -1: it holds nothing, a joiner
    staged: Memory | None = None


class WorkerReshaping(WorkerMoving):
    goes_over: GoesOver | None = None

    def on_change(self, message: ChangeLayout) -> None:
        if self.newest is not None and message.plan.epoch <= self.newest.epoch:
            return
        again = self.change is not None and self.change.plan == message.plan
        self.change = message
        if again:
            return
        if self.holds is not None and self.goes_over is None:  # the others heard of it before
            self.change_layout(message, self.holds)
        self.maybe_join_layout()

    def maybe_join_layout(self) -> None:
        order = self.change
        if order is None or not self.is_waiting_role or self.goes_over is not None or _seat(order.plan, self) is None:
            return
        self.change_layout(order, -1)

    def change_layout(self, order: ChangeLayout, iteration: int) -> None:
        self._advance(Stage.SAVE)
        mine = self.goes_over = GoesOver(order, iteration)
        if iteration >= 0:
            plan = order.plan
            self.say(LayoutReady(self.name, self.rank, plan.epoch, -1, digest=announced_name(plan)))
        plan = order.plan  # and as training/reshard/change.py: the same may be announced twice, from another epoch
        here = self.world.layouts.setdefault((plan.task, order.former.epoch, plan.epoch, plan.members), {})
        here[self.name] = iteration
        wanted = {m.worker for m in (*order.former.members, *order.plan.members)}

        def look() -> None:
            if self.goes_over is not mine:
                return
            if here.keys() >= wanted:
                self._later(self.rng.uniform(20.0, 150.0), lambda: self._fetch_slices(mine, here))
            else:
                self._later(LOOK_MS, look)

        self._later(self.rng.uniform(20.0, 100.0), look)  # it builds its model meanwhile

    def _fetch_slices(self, mine: GoesOver, everybody: dict[str, int]) -> None:
        if self.goes_over is not mine:
            return
        iterations = set(everybody.values()) - {-1}
        if len(iterations) != 1:
            self.world.violate(f"{self.name}: a layout is left at iterations {sorted(iterations)}")
        mine.iteration = iterations.pop()
        seat, plan = _seat(mine.order.plan, self), mine.order.plan
        if seat is None:
            self.say(LayoutReady(self.name, -1, plan.epoch, mine.iteration, digest="whole"))
            return
        request = ArenaRequest(self.task, self.name, seat.rank, 1, "digest", False, (), plan.epoch)
        self.host.ask_arena(self, request)

    def arena_staged(self, memory: Memory, request: ArenaRequest) -> None:
        mine = self.goes_over
        if mine is None or mine.order.plan.epoch != request.epoch or mine.iteration < 0:
            return  # what it asked for is over
        seat = _seat(mine.order.plan, self)
        if seat is None or seat.rank != request.rank:
            return  # an order of another coordinator with the same number
        memory.end_step(mine.iteration)
        mine.staged = memory
        self.say(LayoutReady(self.name, seat.rank, mine.order.plan.epoch, mine.iteration, digest="whole"))

    # ------------------------------------------------------------ the decision

    def decided(self) -> None:
        """A member that holds: into the new layout, out of the task, or back to what it left."""
        mine, plan = self.goes_over, self.newest
        if mine is None or plan is None or plan.epoch <= mine.order.former.epoch:
            return
        if self.enter_layout(plan):
            return
        self.goes_over, self.holds, self.change = None, None, None
        if _seat(plan, self) is None:
            self._later(1.0, lambda: self.die("exited", 0))
            return
        self.world.count("layout called off")
        self._leave_groups()
        self._begin_anew(plan)

    def enter_layout(self, plan: EpochPlan) -> bool:
        """With what it took over, where the plan says so. True when that was all."""
        mine, seat = self.goes_over, _seat(plan, self)
        if mine is None:
            return False
        is_layout = plan.layout == mine.order.plan.layout
        if not is_layout or seat is None or mine.staged is None:
            if self.is_waiting_role:
                self.goes_over = None
            return False
        self.goes_over, self.holds, self.change = None, None, None
        self.is_waiting_role = False
        self._leave_groups()
        self.rank, self.layout, self.memory = seat.rank, plan.layout, mine.staged
        self.world.count("layout entered")
        self._begin_anew(plan)
        return True

    def _leave_groups(self) -> None:
        for group, _ in self.groups:
            group.died(self.rank)
        self.groups, self.inside, self.data, self.everybody = [], None, None, None

    def _begin_anew(self, plan: EpochPlan) -> None:
        """The script runs again from its top, over an arena that is there."""
        self.unread = []
        self._advance(Stage.HEAL)
        self.machine = self.new_machine()
        self.run(on.Joined(plan, self.memory.read(self.rank)))


def _seat(plan: EpochPlan, worker: WorkerReshaping) -> Member | None:
    return next((m for m in plan.members if m.worker == worker.name), None)
