"""Copies made beside the training: what everybody goes back to when a shard is lost. Pure."""

from __future__ import annotations

import msgspec

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.buddies import Copy, common_version
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record
from unicron.healing.resolve import Fetch, resolve_replica, resolve_world
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

LAYOUT = Layout(dp=4, num_micro_batches=8, sharded=True, buddy=True, buddy_every=3)
EPOCH = 7


def plan(layout: Layout = LAYOUT, epoch: int = EPOCH) -> EpochPlan:
    ranks = range(layout.world_size)
    members = tuple(Member(r, f"n{layout.replica_of(r)}", f"w{r}") for r in ranks)
    return EpochPlan("t", epoch, PlanKind.REPLACE, layout, tuple(range(layout.dp)), members, (3,), (3,))


def at(rank: int, iteration: int, kept: tuple[int, ...], ward: int, copied: tuple[int, ...]) -> Record:
    commit = CommitResult(iteration - 1, 64.0, 1.0, 0.0, 5.0)
    copies = tuple(Copy(ward, i) for i in copied)
    return Record(
        rank, iteration, Stage.COMPUTE, begun=True, dealt=(0, 1, 2, 3), num_segments=2, commit=commit, copies=copies,
        kept=kept,
    )  # fmt: skip


def lost(rank: int) -> Record:
    return Record(rank, 0, Stage.STARTING, has_state=False, num_segments=2)


#: Rank r keeps the copies of rank r - 1. Rank 3 is lost, and rank 0 keeps its copies.
WOUNDED = [at(0, 8, (3, 6), 3, (3, 6)), at(1, 8, (3, 6), 0, (3, 6)), at(2, 8, (3, 6), 1, (3, 6)), lost(3)]


def changed(records: list[Record], rank: int, **changes: object) -> list[Record]:
    return [msgspec.structs.replace(r, **changes) if r.rank == rank else r for r in records]


def test_everybody_goes_back_to_the_newest_common_iteration() -> None:
    verdict = resolve_world(plan(), WOUNDED)
    assert verdict.goes_back and verdict.iteration == 6 and verdict.branch == EPOCH
    assert verdict.fetches == (Fetch(3, 0, (3,), True, 6),) or verdict.fetches == (Fetch(0, 0, (3,), True, 6),)
    assert verdict.commit is None and verdict.gather and not verdict.lost_positions
    assert sorted(m for share in verdict.compute.values() for m in share) == list(range(8))


def test_a_copy_on_its_way_is_none() -> None:
    """Rank 0 has only the older one whole: all go to that, though everybody else has the newer."""
    assert resolve_world(plan(), changed(WOUNDED, 0, copies=(Copy(3, 3),))).iteration == 3


def test_what_one_rank_does_not_keep_is_not_common() -> None:
    assert resolve_world(plan(), changed(WOUNDED, 2, kept=(3,))).iteration == 3
    # ... unless somebody has a copy of that rank's, too.
    records = changed(changed(WOUNDED, 2, kept=(3,)), 1, copies=(Copy(2, 6),))
    found = common_version(records)
    assert found == (6, {2: 1, 3: 0})


def test_stale_copies_are_no_way_back() -> None:
    """Version skew: no iteration is there of everybody; the checkpoint is next."""
    verdict = resolve_world(plan(), changed(WOUNDED, 0, copies=(Copy(3, 0),)))
    assert verdict.lost_positions == (0,) and not verdict.goes_back


def test_nobody_sends_two_shards_or_one_he_lacks_himself() -> None:
    both = [at(0, 8, (6,), 3, (6,)), at(1, 8, (6,), 0, (6,)), lost(2), lost(3)]
    assert common_version(both) is None
    assert common_version(changed(both, 0, copies=(Copy(3, 6), Copy(2, 6)))) is None
    assert common_version(changed(both, 1, copies=(Copy(0, 6), Copy(2, 6)))) == (6, {2: 1, 3: 0})


def test_a_copy_as_new_as_all_are_costs_nothing() -> None:
    verdict = resolve_world(plan(), changed(WOUNDED, 0, copies=(Copy(3, 6), Copy(3, 8))))
    assert not verdict.goes_back and verdict.iteration == 8


def test_nobody_goes_back_when_nothing_is_lost() -> None:
    heir = msgspec.structs.replace(WOUNDED[0], rank=3)
    verdict = resolve_world(plan(), [*WOUNDED[:3], heir])
    assert not verdict.goes_back and verdict.iteration == 8
    assert verdict.gather  # copies are renewed: who keeps whose may have changed


def test_who_went_back_and_who_did_not_go_back_together() -> None:
    """A second failure in the middle: rank 0 is at 6 already, with no sums; rank 1 knows a commit of 6: nobody must
    step with."""
    commit = CommitResult(6, 64.0, 1.0, 0.0, 5.0)
    records = changed(changed(WOUNDED, 0, iteration=6, branch=EPOCH, commit=None), 1, iteration=7, commit=commit)
    verdict = resolve_world(plan(epoch=EPOCH + 1), records)
    assert verdict.goes_back and verdict.iteration == 6 and verdict.branch == EPOCH + 1
    inside = resolve_replica([records[0], records[1]], sharded=True)
    assert inside.commit is None and not inside.compute


def test_what_was_committed_before_going_back_does_not_count() -> None:
    torn = msgspec.structs.replace(lost(3), iteration=6, commit=CommitResult(6, 64.0, 1.0, 0.0, 5.0))
    back = [msgspec.structs.replace(r, iteration=6, branch=EPOCH, commit=None) for r in WOUNDED[:3]]
    verdict = resolve_world(plan(epoch=EPOCH + 1), [*back, torn])
    assert verdict.iteration == 6 and verdict.commit is None


# ---------------------------------------------------------------- the machine


def machine_at(rank: int, iteration: int) -> HealingMachine:
    """In an iteration, with the plan that replaces rank 3 met as far as the rebuilding."""
    machine = HealingMachine(rank, LAYOUT, 2)
    start = EpochPlan("t", 1, PlanKind.START, LAYOUT, (0, 1, 2, 3), plan().members)
    (ready,) = _until(machine, on.Joined(start, WOUNDED[rank]), do.Ready)
    (compute,) = machine.step(on.IterationBegun(iteration))
    assert isinstance(compute, do.Compute)
    machine.step(on.PlanArrived(plan()))
    (meet,) = machine.step(on.Broken(False, "a peer died"))
    assert isinstance(meet, do.ExchangeWorld), meet
    assert ready.iteration == iteration
    return machine


def _until(machine: HealingMachine, event: on.AnyEvent, wanted: type) -> tuple[do.AnyAction]:
    for _ in range(10):
        (action,) = machine.step(event)
        if isinstance(action, wanted):
            return (action,)
        event = on.RecordsGathered(tuple(_start_records())) if isinstance(action, do.ExchangeWorld) else on.Done()
    raise AssertionError(f"{wanted.__name__} did not come")


def _start_records() -> list[Record]:
    return [msgspec.structs.replace(WOUNDED[0], rank=rank, begun=False, dealt=(), copies=()) for rank in range(4)]


def test_a_survivor_goes_back_gathers_and_computes_what_it_had() -> None:
    machine = machine_at(1, 8)
    (rebuild,) = machine.step(on.RecordsGathered(tuple(WOUNDED)))
    assert isinstance(rebuild, do.RebuildCross)
    (back,) = machine.step(on.Done())
    assert back == do.GoBack(iteration=6, branch=EPOCH, reason=rebuild.reason)
    assert not machine.record.has_state and machine.record.commit is None
    (gather,) = machine.step(on.Done())
    assert isinstance(gather, do.Gather) and machine.record.iteration == 6
    (compute,) = machine.step(on.Done())
    assert isinstance(compute, do.Compute) and compute.iteration == 6 and compute.micro_batches == (2, 3)


def test_the_holder_goes_back_and_serves() -> None:
    machine = machine_at(0, 8)
    machine.step(on.RecordsGathered(tuple(WOUNDED)))
    machine.step(on.Done())
    (fetch,) = machine.step(on.Done())
    assert isinstance(fetch, do.FetchState) and fetch.fetch.targets == (3,) and fetch.branch == EPOCH


def test_what_cannot_be_gone_back_to_leaves_no_state() -> None:
    machine = machine_at(1, 8)
    machine.step(on.RecordsGathered(tuple(WOUNDED)))
    machine.step(on.Done())
    (wait,) = machine.step(on.Broken(False, "something wrote into it"))
    assert isinstance(wait, do.AwaitPlan) and not machine.record.has_state
