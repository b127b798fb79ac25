"""In which iterations the segments of a position are reduced under the backward: all its ranks say the same."""

from __future__ import annotations

import msgspec
import pytest

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record, decode_record, encode_record
from unicron.healing.resolve import reduces_eagerly
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

LAYOUT = Layout(dp=2, micro_batch=1, num_micro_batches=4)


def plan(epoch: int, kind: PlanKind, *lost: int, restore: str = "") -> EpochPlan:
    members = tuple(Member(r, f"n{r}", f"n{r}.w{r + 10 * epoch if r in lost else r}") for r in range(2))
    made = EpochPlan("t", epoch, kind, LAYOUT, (0, 1), members, lost, lost)
    return msgspec.structs.replace(made, restore=restore)


def meet(machines: list[HealingMachine], words: tuple[str, str] = ("w", "w")) -> list[do.AnyAction]:
    """All of them stand before the exchange of records, which say these words; what each does behind the meeting."""
    records = [msgspec.structs.replace(m.record, eager=word) for m, word in zip(machines, words, strict=True)]
    actions = []
    for machine in machines:
        machine.step(on.RecordsGathered(records))
        actions.extend(machine.step(on.Done()))
    return actions


def started(words: tuple[str, str] = ("w", "w")) -> list[HealingMachine]:
    machines = [HealingMachine(rank, LAYOUT, 2) for rank in range(2)]
    for machine in machines:
        machine.step(on.Joined(plan(1, PlanKind.START), Record(machine.rank, 0, Stage.STARTING, num_segments=2)))
    assert all(isinstance(action, do.Ready) for action in meet(machines, words))
    return machines


def begin(machine: HealingMachine, iteration: int) -> bool:
    """Whether it is to reduce eagerly in this iteration, which its script begins."""
    (action,) = machine.step(on.IterationBegun(iteration))
    assert isinstance(action, do.Compute)
    return action.eager


def finish(machine: HealingMachine, iteration: int) -> None:
    for _ in range(3):  # compute, tie, reduce
        machine.step(on.Done())
    machine.step(on.CommitDone(CommitResult(iteration, 64.0, 1.0, 0.0, 5.0)))
    (action,) = machine.step(on.Done())
    assert isinstance(action, do.EndIteration)


def train(machines: list[HealingMachine], iteration: int) -> list[bool]:
    eager = [begin(machine, iteration) for machine in machines]
    for machine in machines:
        finish(machine, iteration)
    return eager


def test_not_in_the_iteration_that_a_meeting_leads_to() -> None:
    machines = started()
    assert [train(machines, iteration) for iteration in range(3)] == [[False] * 2, [True] * 2, [True] * 2]


@pytest.mark.parametrize("words", [("w", ""), ("", ""), ("w", "v")])
def test_not_beside_one_that_cannot_or_does_it_otherwise(words: tuple[str, str]) -> None:
    machines = started(words)
    assert [train(machines, iteration) for iteration in range(2)] == [[False] * 2] * 2


def test_only_ranks_of_the_same_position_have_to_agree() -> None:
    layout = Layout(pp=2, dp=2, micro_batch=1, num_micro_batches=4)
    words = {(0, 0): "a", (1, 0): "a", (0, 1): "b", (1, 1): ""}  # of (replica, stage)
    records = [
        Record(rank, 0, Stage.STARTING, eager=words[layout.replica_of(rank), layout.coords(rank)[2]])
        for rank in range(4)
    ]  # fmt: skip
    first = [rank for rank in range(4) if layout.coords(rank)[2] == 0]
    assert [reduces_eagerly(layout, rank, records) for rank in range(4)] == [rank in first for rank in range(4)]


def test_nobody_after_a_death_until_the_iteration_is_over_and_then_the_heir_too() -> None:
    machines = started()
    train(machines, 0)
    assert begin(machines[0], 1)  # and rank 1 dies in it
    lost = plan(2, PlanKind.REPLACE, 1)
    machines[0].step(on.PlanArrived(lost))
    machines[0].step(on.Done())
    (action,) = machines[0].step(on.Done())
    assert isinstance(action, do.ExchangeWorld)
    heir = machines[1] = HealingMachine(1, LAYOUT, 2)
    (action,) = heir.step(on.Joined(lost, Record(1, 1, Stage.COMPUTE, begun=True, dealt=(0, 1), num_segments=2)))
    assert isinstance(action, do.Ready)
    assert not begin(heir, 1), "its peer met the epoch, and waits for it"
    heir.step(on.Done())
    heir.step(on.Done())
    meet(machines)  # both go on to the reduction
    for machine in machines:
        machine.step(on.Done())
        machine.step(on.CommitDone(CommitResult(1, 64.0, 1.0, 0.0, 5.0)))
        (action,) = machine.step(on.Done())
        assert isinstance(action, do.EndIteration)
    assert train(machines, 2) == [True, True]


def test_iterations_that_are_done_again_from_a_checkpoint_are_the_same_for_an_heir_s_script() -> None:
    """The survivor does them inside one train_step, and its recovery lasts until that is over; the heir's is over
    after the first. What both know is the epoch and where its meeting left them."""
    machines = started()
    for iteration in range(3):
        train(machines, iteration)
    begin(machines[0], 3)
    restore = plan(2, PlanKind.RESTORE, 1, restore="/checkpoint")
    machines[0].step(on.PlanArrived(restore))
    machines[0].step(on.Done())
    machines[0].step(on.Done())
    machines[1] = HealingMachine(1, LAYOUT, 2)
    machines[1].step(on.Joined(restore, Record(1, 0, Stage.STARTING, has_state=False, num_segments=2)))
    assert all(isinstance(action, do.LoadCheckpoint) for action in meet(machines))
    (first,) = machines[0].step(on.CheckpointLoaded(1))
    (ready,) = machines[1].step(on.CheckpointLoaded(1))
    assert isinstance(first, do.Compute) and not first.eager and isinstance(ready, do.Ready)
    assert not begin(machines[1], 1)
    finish(machines[1], 1)
    for _ in range(3):
        machines[0].step(on.Done())
    machines[0].step(on.CommitDone(CommitResult(1, 64.0, 1.0, 0.0, 5.0)))
    (second,) = machines[0].step(on.Done())
    assert isinstance(second, do.Compute) and second.iteration == 2 and machines[0].healing
    assert (second.eager, begin(machines[1], 2)) == (True, True)


def test_a_plan_that_is_known_already_keeps_a_rank_from_beginning_what_nobody_takes() -> None:
    layout = Layout(pp=2, dp=2, micro_batch=1, num_micro_batches=4)
    members = tuple(Member(r, f"n{layout.replica_of(r)}", f"w{r}") for r in range(4))
    machine = HealingMachine(0, layout, 2)
    start = EpochPlan("t", 1, PlanKind.START, layout, (0, 1), members)
    machine.step(on.Joined(start, Record(0, 0, Stage.STARTING, num_segments=2)))
    records = [Record(rank, 0, Stage.STARTING, num_segments=2, eager="w") for rank in range(4)]
    for event in (on.RecordsGathered([r for r in records if layout.replica_of(r.rank) == 0]), on.Done()):
        machine.step(event)
    machine.step(on.RecordsGathered(records))
    machine.step(on.Done())
    assert not begin(machine, 0)
    commit = CommitResult(0, 64.0, 1.0, 0.0, 5.0)
    for event in (on.Done(), on.Done(), on.Done(), on.CommitDone(commit), on.Confirmed(commit), on.Done()):
        machine.step(event)
    other = tuple(layout.replica_ranks(1))
    machine.step(on.PlanArrived(EpochPlan("t", 2, PlanKind.REPLACE, layout, (0, 1), members, other, other)))
    assert not begin(machine, 1), "a whole replica computes, and meets before it reduces"


def test_a_worker_of_before_says_nothing_and_hears_nothing() -> None:
    record = Record(0, 3, Stage.IDLE, eager="w")
    assert decode_record(encode_record(record)).eager == "w"
    older = msgspec.msgpack.decode(encode_record(record))
    del older["eager"]
    assert decode_record(msgspec.msgpack.encode(older)).eager == ""
