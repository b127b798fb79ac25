"""Parameters that are gathered under the next forward: after which iterations, and what if they do not come."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record, decode_record, encode_record
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

PAIR = Layout(dp=2, micro_batch=1, num_micro_batches=4, sharded=True)
PIPES = Layout(pp=2, dp=2, micro_batch=1, num_micro_batches=4, sharded=True)


def plan(layout: Layout, epoch: int, kind: PlanKind, *lost: int, touched: tuple[int, ...] = ()) -> EpochPlan:
    members = tuple(Member(r, "n", f"w{r + 10 * epoch if r in lost else r}") for r in range(layout.world_size))
    return EpochPlan("t", epoch, kind, layout, tuple(range(layout.dp)), members, touched or lost, lost)


class Machines:
    """All of a task, each at its own place; what a machine does is in `actions`."""

    def __init__(self, layout: Layout, *, late: tuple[bool, ...] = ()) -> None:
        self.layout = layout
        self.late = late or (True,) * layout.world_size
        self.all = [HealingMachine(rank, layout, 2) for rank in range(layout.world_size)]
        self.actions: list[Any] = [None] * layout.world_size
        for rank in range(layout.world_size):
            self.feed(rank, on.Joined(plan(layout, 1, PlanKind.START), Record(rank, 0, Stage.STARTING, num_segments=2)))
        if layout.replica_size > 1:
            self.exchange_inside(*range(layout.world_size))
        self.meet()

    def feed(self, rank: int, *events: on.AnyEvent) -> Any:
        for event in events:
            found = self.all[rank].step(event)
            self.actions[rank] = found[0] if found else self.actions[rank]
        return self.actions[rank]

    def exchange_inside(self, *ranks: int) -> None:
        for rank in ranks:
            mine = self.layout.replica_ranks(self.layout.replica_of(rank))
            self.feed(rank, on.RecordsGathered([self.all[r].record for r in mine]), on.Done())

    def meet(self) -> None:
        """Everybody stands before the exchange of records."""
        assert {type(action) for action in self.actions} == {do.ExchangeWorld}
        records = [msgspec.structs.replace(m.record, late=self.late[m.rank]) for m in self.all]
        for rank in range(len(self.all)):
            self.feed(rank, on.RecordsGathered(records), on.Done())

    def commit(self, iteration: int, *, hold: float = 0.0) -> list[do.Gather]:
        """An iteration up to the gather that follows its step."""
        result = CommitResult(iteration, 64.0, 1.0, 0.0, 5.0, hold)
        for rank in range(len(self.all)):
            if not isinstance(self.actions[rank], do.Compute):
                self.feed(rank, on.IterationBegun(iteration))
            assert isinstance(self.actions[rank], do.Compute), self.actions[rank]
            self.feed(rank, on.Done(), on.Done(), on.Done(), on.CommitDone(result))
            if self.layout.replica_size > 1:
                self.feed(rank, on.Confirmed(result))
            self.feed(rank, on.Done())
        assert all(isinstance(action, do.Gather) for action in self.actions)
        return list(self.actions)

    def train(self, iteration: int, **how: float) -> bool:
        """Whether all gather late after it. Control is with the script again."""
        late = {gather.late for gather in self.commit(iteration, **how)}
        assert len(late) == 1
        for rank in range(len(self.all)):
            self.feed(rank, on.Done())
            if isinstance(self.actions[rank], do.Settle):
                self.feed(rank, on.Settled(True))
            assert isinstance(self.actions[rank], do.EndIteration)
            assert self.all[rank].record.gathered is not late.copy().pop()
        return late.pop()


@pytest.mark.parametrize("layout", [PAIR, PIPES])
def test_not_after_the_iteration_that_a_meeting_leads_to_and_not_before_a_hold_or_a_save(layout: Layout) -> None:
    machines = Machines(layout)
    for machine in machines.all:
        machine.whole_after = lambda iteration: iteration == 3
    assert [machines.train(iteration) for iteration in range(5)] == [False, True, True, False, True]
    assert not machines.train(5, hold=1.0)


def test_nobody_where_one_cannot() -> None:
    machines = Machines(PAIR, late=(True, False))
    assert [machines.train(iteration) for iteration in range(3)] == [False] * 3
    older = msgspec.msgpack.decode(encode_record(Record(0, 1, Stage.IDLE, late=True)))
    del older["late"]
    assert decode_record(msgspec.msgpack.encode(older)).late is False


def test_the_record_says_that_parameters_are_not_whole_until_the_forward_has_them() -> None:
    """An heir reads it in the arena of whoever died meanwhile."""
    machines = Machines(PAIR)
    machines.train(0)
    machines.train(1)
    assert isinstance(machines.feed(0, on.IterationBegun(2)), do.Compute) and not machines.all[0].record.gathered
    assert isinstance(machines.feed(0, on.Done()), do.Tie) and machines.all[0].record.gathered


def test_the_end_of_the_loop_waits_for_it() -> None:
    machines = Machines(PAIR)
    machines.train(0)
    machines.train(1)
    assert isinstance(machines.feed(0, on.LoopEnded()), do.FinishGather)
    assert isinstance(machines.feed(0, on.Done()), do.AwaitOthers) and machines.all[0].record.gathered
    assert isinstance(machines.feed(1, on.LoopEnded()), do.FinishGather)  # and its peer dies
    machines.feed(1, on.PlanArrived(plan(PAIR, 2, PlanKind.REPLACE, 0)))
    assert isinstance(machines.feed(1, on.Broken(inside=False, text="closed")), do.ExchangeWorld)
    assert not machines.all[1].record.gathered


def test_a_rank_alone_in_its_replica_meets_when_it_breaks_and_all_gather_there() -> None:
    machines = Machines(PAIR)
    machines.train(0)
    machines.train(1)
    machines.feed(0, on.IterationBegun(2))  # and rank 1 dies
    lost = plan(PAIR, 2, PlanKind.REPLACE, 1)
    machines.feed(0, on.PlanArrived(lost))
    broken = on.Broken(inside=False, text="closed", late=True)
    assert isinstance(machines.feed(0, broken), do.ExchangeWorld)
    found = machines.all[1].record
    machines.all[1] = HealingMachine(1, PAIR, 2)
    machines.feed(1, on.Joined(lost, found))
    machines.meet()
    for rank in range(2):
        assert machines.actions[rank] == do.Gather(reason=machines.actions[rank].reason), "at once, at a meeting"
        machines.feed(rank, on.Done())
    assert isinstance(machines.actions[0], do.Compute) and machines.actions[0].micro_batches == (0, 1)
    assert isinstance(machines.feed(1, on.IterationBegun(2)), do.Compute)
    assert all(machine.record.gathered for machine in machines.all)


def test_a_member_of_several_tells_and_a_plan_frees_those_who_compute_with_it() -> None:
    """The plan for another replica does not touch this one, and its members wait for one another."""
    machines = Machines(PIPES)
    machines.train(0)
    machines.train(1)
    first, second = PIPES.replica_ranks(0)
    for rank in (first, second):
        machines.feed(rank, on.IterationBegun(2), on.PlanArrived(plan(PIPES, 2, PlanKind.REPLACE, 1)))
    waits = machines.feed(first, on.Broken(inside=True, text="closed", late=True))
    assert isinstance(waits, do.AwaitPlan) and waits.inside and waits.late and waits.report == "closed"
    freed = plan(PIPES, 3, PlanKind.RECONNECT, touched=(first,))
    for rank in (first, second):
        machines.feed(rank, on.PlanArrived(freed))
    assert isinstance(machines.feed(first, on.Done()), do.ExchangeInside)
    assert isinstance(machines.feed(second, on.Broken(inside=True, text="closed")), do.ExchangeInside)
    machines.exchange_inside(first, second)
    assert all(isinstance(machines.actions[rank], do.ExchangeWorld) for rank in (first, second)), (
        "it cannot compute yet"
    )
