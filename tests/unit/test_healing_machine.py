"""The worker-side machine, fed by hand: what each kind of hang or miscount looked like when it was found."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from unicron.healing import actions as do
from unicron.healing import events as on
from unicron.healing.dealing import assigned, deal
from unicron.healing.machine import HealingMachine
from unicron.healing.record import CommitResult, Record, hold_vote
from unicron.healing.resolve import resolve_replica, resolve_world
from unicron.sim.plants import machine_for
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

LAYOUT = Layout(tp=1, pp=2, dp=2, micro_batch=1, num_micro_batches=8)
COMMIT = CommitResult(0, 64.0, 1.0, 0.0, 5.0)


def plan(epoch: int, kind: PlanKind, *, touched: tuple[int, ...] = (), heirs: tuple[int, ...] = ()) -> EpochPlan:
    members = tuple(Member(r, "n0", f"n0.w{r + 10 * epoch if r in heirs else r}") for r in range(LAYOUT.world_size))
    return EpochPlan("t", epoch, kind, LAYOUT, (0, 1), members, touched, heirs)


def started(machines: list[HealingMachine]) -> None:
    """All ranks through the start and into the commit of iteration 0."""
    start = plan(1, PlanKind.START)
    for machine in machines:
        (action,) = machine.step(on.Joined(start, Record(machine.rank, 0, Stage.STARTING, num_segments=2)))
        assert isinstance(action, do.ExchangeInside), "no inside groups would be built at the start"
    gathered = [m.record for m in machines]
    for machine in machines:
        inside = [r for r in gathered if LAYOUT.replica_of(r.rank) == machine.replica]
        (action,) = machine.step(on.RecordsGathered(inside))
        assert isinstance(action, do.RebuildInside) and action.touched is None
        (action,) = machine.step(on.Done())
        assert isinstance(action, do.ExchangeWorld)
    world = [m.record for m in machines]
    for machine in machines:
        machine.step(on.RecordsGathered(world))
        (action,) = machine.step(on.Done())
        assert isinstance(action, do.Ready) and action.iteration == 0
        (action,) = machine.step(on.IterationBegun(0))
        assert isinstance(action, do.Compute)
        for expected in (do.Tie, do.Reduce, do.Commit):
            (action,) = machine.step(on.Done())
            assert isinstance(action, expected)


def test_the_start_builds_inside_groups_whatever_is_touched() -> None:
    started([HealingMachine(rank, LAYOUT, 2) for rank in range(4)])


def interrupted_commit(machines: list[HealingMachine]) -> tuple[do.AnyAction, do.AnyAction]:
    """Rank 3 dies; rank 0 of the whole replica {0, 2} saw the commit's result, rank 2 did not."""
    started(machines)
    lost = plan(2, PlanKind.REPLACE, touched=(3,), heirs=(3,))
    (saw,) = machines[0].step(on.CommitDone(COMMIT))
    machines[0].step(on.PlanArrived(lost))
    machines[2].step(on.PlanArrived(lost))
    (missed,) = machines[2].step(on.Broken(inside=False, text="Connection closed by peer"))
    return saw, missed


def test_a_whole_replica_acts_as_one_on_an_interrupted_commit() -> None:
    machines = [HealingMachine(rank, LAYOUT, 2) for rank in range(4)]
    saw, missed = interrupted_commit(machines)
    assert saw == do.Confirm(result=COMMIT, reason=saw.reason)
    assert missed == do.Confirm(result=None, reason=missed.reason)
    for rank in (0, 2):  # the collective's answer is the same for both
        (action,) = machines[rank].step(on.Confirmed(COMMIT))
        assert isinstance(action, do.Step)


def test_without_confirm_it_does_not() -> None:
    """The plant: one steps and will wait inside the replica for the other, who sits in the meeting."""
    saw, missed = interrupted_commit([machine_for("no-confirm", rank, LAYOUT) for rank in range(4)])
    assert isinstance(saw, do.Step) and isinstance(missed, do.ExchangeWorld)


def test_a_whole_replica_that_broke_in_the_reduction_confirms_too() -> None:
    """Found at 1,2,2 with a kill in the reduction: its peer had entered the commit and waited in confirm."""
    machines = [HealingMachine(rank, LAYOUT, 2) for rank in range(4)]
    started(machines)
    lost = plan(2, PlanKind.REPLACE, touched=(3,), heirs=(3,))
    machines[0].step(on.PlanArrived(lost))
    (action,) = machines[0].step(on.Broken(inside=False, text="Connection closed by peer"))
    assert isinstance(action, do.Confirm) and action.result is None
    (action,) = machines[0].step(on.Confirmed(None))
    assert isinstance(action, do.ExchangeWorld)


def test_a_mended_rank_goes_to_its_meeting_without_another_plan() -> None:
    """Found in the demo: an heir computed its share, then asked for a plan that it already had."""
    layout = Layout(dp=2, micro_batch=1, num_micro_batches=4)
    members = (Member(0, "n0", "n0.w0"), Member(1, "n1", "n1.w9"))
    lost = EpochPlan("t", 2, PlanKind.REPLACE, layout, (0, 1), members, (1,), (1,))
    heir = HealingMachine(1, layout, 2)
    predecessor = Record(1, 5, Stage.COMPUTE, begun=True, dealt=(0, 1), num_segments=2)
    (action,) = heir.step(on.Joined(lost, predecessor))
    assert isinstance(action, do.Ready) and action.iteration == 5
    (action,) = heir.step(on.IterationBegun(5))
    assert isinstance(action, do.Compute) and action.micro_batches == (2, 3)
    heir.step(on.Done())
    (action,) = heir.step(on.Done())
    assert isinstance(action, do.ExchangeWorld)


@given(st.data())
def test_every_micro_batch_is_dealt_exactly_once(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 8))
    number = data.draw(st.integers(width, 64))
    replicas = tuple(range(width))
    live = tuple(sorted(data.draw(st.sets(st.sampled_from(replicas), min_size=1))))
    whole = data.draw(st.sets(st.sampled_from(live)))
    have = {r: assigned(r, replicas, number) for r in whole}
    todo = deal(number, replicas, live, have)
    counted = [m for done in have.values() for m in done] + [m for work in todo.values() for m in work]
    assert sorted(counted) == list(range(number))


def test_a_missed_commit_is_told_before_it_is_confirmed() -> None:
    """Found by the simulator: the group of one position broke with all ends alive; its ranks waited in confirm for
    members that waited in the commit for them, and nobody knew."""
    machines = [HealingMachine(rank, LAYOUT, 2) for rank in range(4)]
    started(machines)
    (action,) = machines[2].step(on.Broken(inside=False, text="Connection closed by peer"))
    assert isinstance(action, do.Confirm) and "Connection closed" in action.report
    machines[0].step(on.PlanArrived(plan(2, PlanKind.RECONNECT)))
    (action,) = machines[0].step(on.Broken(inside=False, text="Connection closed by peer"))
    assert isinstance(action, do.Confirm) and not action.report, "a plan explains it"


SHARDED = msgspec.structs.replace(LAYOUT, sharded=True)


def stepped(machine: HealingMachine) -> None:
    machine.step(on.CommitDone(COMMIT))
    (action,) = machine.step(on.Confirmed(COMMIT))
    assert isinstance(action, do.Step)
    (action,) = machine.step(on.Done())
    assert isinstance(action, do.Gather) and machine.record.iteration == 1 and not machine.record.gathered


def test_a_sharded_replica_goes_on_as_one_after_the_gather() -> None:
    """One member's gather broke: the other, whose own is whole, must not begin the next iteration without it."""
    machines = [HealingMachine(rank, SHARDED, 2) for rank in range(4)]
    started(machines)
    for machine in machines:
        stepped(machine)
    (whole,) = machines[0].step(on.Done())
    (broken,) = machines[2].step(on.Broken(inside=False, text="Connection closed by peer"))
    assert (whole, broken) == (do.Settle(ok=True, reason=whole.reason), do.Settle(ok=False, reason=broken.reason))
    for rank in (0, 2):
        (action,) = machines[rank].step(on.Settled(ok=False))
        assert isinstance(action, do.AwaitPlan)
    (action,) = machines[1].step(on.Done())
    (action,) = machines[1].step(on.Settled(ok=True))
    assert isinstance(action, do.EndIteration)


def test_a_wounded_sharded_replica_gathers_before_it_computes() -> None:
    """Its heir has the shard of the newest step, and parameters of the one before."""
    record = Record(3, 1, Stage.IDLE, num_segments=2, commit=COMMIT, gathered=False)
    others = [Record(r, 1, Stage.COMPUTE, begun=True, dealt=(0, 1), num_segments=2, commit=COMMIT) for r in (0, 1, 2)]
    verdict = resolve_replica([others[1], record], sharded=True)
    assert not verdict.compute
    lost = msgspec.structs.replace(plan(2, PlanKind.REPLACE, touched=(3,), heirs=(3,)), layout=SHARDED)
    assert resolve_world(lost, [*others, record]).gather
    assert not resolve_world(lost, [*others, msgspec.structs.replace(record, gathered=True)]).gather


def test_a_shard_that_nobody_holds_is_lost() -> None:
    records = [Record(r, 1, Stage.IDLE, has_state=r != 3, num_segments=2) for r in range(4)]
    replaced = plan(2, PlanKind.REPLACE, touched=(3,), heirs=(3,))
    assert not resolve_world(replaced, records).lost_positions, "another replica holds a copy"
    assert resolve_world(msgspec.structs.replace(replaced, layout=SHARDED), records).lost_positions == (1,)


def test_nobody_computes_while_a_member_lacks_its_state() -> None:
    """A fetch between replicas broke for one member only: the meeting is left as one, or not at all."""
    machines = [HealingMachine(rank, LAYOUT, 2) for rank in range(4)]
    started(machines)
    lost = plan(2, PlanKind.REPLACE, touched=(1, 3), heirs=(1, 3))
    records = [m.record for m in machines]
    records = [msgspec.structs.replace(r, has_state=r.rank in (0, 2)) for r in records]
    for rank in (0, 2):
        machines[rank].step(on.PlanArrived(lost))
        machines[rank].step(on.Broken(inside=False))
        (action,) = machines[rank].step(on.Confirmed(None))
        assert isinstance(action, do.ExchangeWorld)
        machines[rank].step(on.RecordsGathered(records))
        (action,) = machines[rank].step(on.Done())
        assert isinstance(action, do.FetchState)
    (action,) = machines[0].step(on.Done())
    assert action == do.Settle(ok=True, reason=action.reason)
    (action,) = machines[2].step(on.Broken(inside=False))
    assert action == do.Settle(ok=False, reason=action.reason)
    (action,) = machines[0].step(on.Settled(ok=False))
    assert isinstance(action, do.AwaitPlan)


def test_nobody_votes_to_hold_where_control_does_not_return_everywhere() -> None:
    """Found by the simulator: after a checkpoint was loaded an heir held, while a survivor did iterations again inside
    one train_step and waited for it."""
    machine = HealingMachine(0, LAYOUT, 2)
    assert machine.may_hold and hold_vote(told=True, may_hold=True) == 1.0
    machine.loop_iteration = 9
    machine.record = Record(0, 7, Stage.COMMIT)
    assert not machine.may_hold
    machine.record = Record(0, 9, Stage.COMMIT)
    assert machine.may_hold
    machine.healing = True
    assert not machine.may_hold
    assert 4 * hold_vote(told=True, may_hold=True) + hold_vote(told=True, may_hold=False) < 0


def test_what_stages_share_is_given_to_them_with_any_plan_before_the_first_step() -> None:
    """Who dies in the first meeting has an heir by another plan than the first."""
    machine = HealingMachine(0, LAYOUT, 2)
    machine.step(on.Joined(plan(1, PlanKind.START), Record(0, 0, Stage.STARTING, num_segments=2)))
    machine.step(on.PlanArrived(plan(2, PlanKind.REPLACE, touched=(2,), heirs=(2,))))
    machine.step(on.Broken(inside=True, text="a newer plan"))
    mates = [Record(rank, 0, Stage.STARTING, num_segments=2) for rank in LAYOUT.replica_ranks(0)]
    (rebuild,) = machine.step(on.RecordsGathered(mates))
    assert isinstance(rebuild, do.RebuildInside) and rebuild.is_first
    later = [msgspec.structs.replace(record, iteration=3, begun=True, dealt=(0, 1)) for record in mates]
    assert not resolve_replica(later).is_first


def test_what_a_lost_replica_had_is_known_as_its_own_also_to_who_had_not_begun() -> None:
    """Who had not begun the iteration computes its own share and part of the lost one's at once. It counted neither as
    begun before, and incidents told 1 of 3 micro-batches that had been computed again."""
    layout = Layout(dp=3, num_micro_batches=6)
    machines = [HealingMachine(rank, layout, 2) for rank in range(3)]
    members = tuple(Member(rank, f"n{rank}", f"n{rank}.w0") for rank in range(3))
    start = EpochPlan("t", 1, PlanKind.START, layout, (0, 1, 2), members)
    gathered = [Record(rank, 0, Stage.STARTING, num_segments=2) for rank in range(3)]
    for machine in machines:
        (action,) = machine.step(on.Joined(start, gathered[machine.rank]))
        assert isinstance(behind_meeting(machine, action, gathered), do.Ready)
        for event in (on.IterationBegun(0), on.Done(), on.Done(), on.Done(), on.CommitDone(COMMIT), on.Done()):
            (action,) = machine.step(event)
        assert isinstance(action, do.EndIteration)
    (action,) = machines[0].step(on.IterationBegun(1))
    assert isinstance(action, do.Compute) and action.micro_batches == (0, 1)
    machines[0].step(on.Done())
    (action,) = machines[0].step(on.Done())
    assert isinstance(action, do.Reduce)
    lost = EpochPlan("t", 2, PlanKind.SHRINK, layout, (0, 1), members[:2], (2,), ())
    for machine in machines[:2]:
        machine.step(on.PlanArrived(lost))
    (broke,) = machines[0].step(on.Broken(inside=False, text="gone"))
    (begins,) = machines[1].step(on.IterationBegun(1))
    records = [machine.record for machine in machines[:2]]
    actions = [behind_meeting(m, a, records) for m, a in zip(machines, (broke, begins), strict=False)]
    computed = [action.micro_batches for action in actions if isinstance(action, do.Compute)]
    assert sorted(n for c in computed for n in c) == [2, 3, 4, 5] and len(computed) == 2
    others = {n for m, c in zip(machines, computed, strict=False) for n in c if m.is_others(n) or m.is_extra}
    assert others == {4, 5}


def behind_meeting(machine: HealingMachine, action: do.AnyAction, records: list[Record]) -> do.AnyAction:
    """What it does after its meeting, which begins with this action."""
    while isinstance(action, (do.RebuildInside, do.RebuildCross, do.ExchangeInside, do.ExchangeWorld)):
        event = on.RecordsGathered(records) if isinstance(action, (do.ExchangeInside, do.ExchangeWorld)) else on.Done()
        (action,) = machine.step(event)
    return action
