"""Who keeps whose copy, and when a copy may stand for a lost shard."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from unicron.healing.buddies import Copy, distance, holder_of, ward_of
from unicron.healing.record import CommitResult, Record
from unicron.healing.resolve import Fetch, resolve_world
from unicron.types import EpochPlan, Layout, Member, PlanKind, Stage

LAYOUT = Layout(dp=4, num_micro_batches=8, sharded=True, buddy=True)
COMMIT = CommitResult(6, 64.0, 1.0, 0.0, 5.0)


def plan(layout: Layout = LAYOUT, nodes: tuple[str, ...] = ("n0", "n1", "n2", "n3")) -> EpochPlan:
    members = tuple(
        Member(rank, nodes[layout.replica_of(rank)], f"n{layout.replica_of(rank)}.w{rank}")
        for rank in range(layout.world_size)
    )
    return EpochPlan("t", 2, PlanKind.REPLACE, layout, tuple(range(layout.dp)), members, (3,), (3,))


def at(rank: int, iteration: int, *copies: tuple[int, int], begun: bool = False, gathered: bool = True) -> Record:
    return Record(
        rank, iteration, Stage.COMPUTE, begun=begun, dealt=(0, 1, 2, 3) if begun else (), num_segments=2,
        commit=COMMIT if iteration > 6 else None, gathered=gathered, copies=tuple(Copy(r, i) for r, i in copies),
    )  # fmt: skip


LOST = Record(3, 0, Stage.STARTING, has_state=False, num_segments=2)


@given(tp=st.integers(1, 2), pp=st.integers(1, 2), dp=st.integers(2, 6), width=st.integers(1, 3))
def test_every_shard_has_one_holder_and_another_node_where_one_is(tp: int, pp: int, dp: int, width: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp, num_micro_batches=dp, sharded=True, buddy=True)
    nodes = tuple(f"n{replica // width}" for replica in range(dp))
    members = tuple(Member(r, nodes[layout.replica_of(r)], f"w{r}") for r in range(layout.world_size))
    its = EpochPlan("t", 1, PlanKind.START, layout, tuple(range(dp)), members)
    ranks = range(layout.world_size)
    assert sorted(holder_of(its, rank) for rank in ranks) == list(ranks)
    for rank in ranks:
        assert ward_of(its, holder_of(its, rank)) == rank
        (tp_of, _, pp_of), (tp_held, _, pp_held) = layout.coords(rank), layout.coords(holder_of(its, rank))
        assert (tp_of, pp_of) == (tp_held, pp_held)
    if dp % width == 0 and dp > width:  # equal nodes, more than one: nobody's holder is on his own
        own = {member.rank: member.node for member in members}
        assert all(own[rank] != own[holder_of(its, rank)] for rank in ranks)


def test_the_nearest_replica_on_another_node() -> None:
    assert distance(plan()) == 1
    assert distance(plan(nodes=("n0", "n0", "n1", "n1"))) == 2


def test_a_copy_of_the_iteration_stands_for_the_shard() -> None:
    records = [at(0, 7, (3, 7), (3, 6), begun=True), at(1, 7), at(2, 7), LOST]
    verdict = resolve_world(plan(), records)
    assert verdict.lost_positions == () and verdict.iteration == 7
    assert verdict.fetches == (Fetch(0, 0, (3,), copy=True, iteration=7, steps=False),)
    assert verdict.gather, "the heir has no parameters yet"


def test_a_copy_one_step_behind_needs_its_holders_gradient() -> None:
    behind = [at(0, 7, (3, 6), gathered=False), at(1, 7), at(2, 7), LOST]
    assert resolve_world(plan(), behind).fetches == (Fetch(0, 0, (3,), copy=True, iteration=6, steps=True),)
    met = [at(0, 7, (3, 6), begun=True, gathered=False), at(1, 7), at(2, 7), LOST]  # and it broke again
    assert resolve_world(plan(), met).fetches == (Fetch(0, 0, (3,), copy=True, iteration=6, steps=True),)
    computes = [at(0, 7, (3, 6), begun=True), at(1, 7), at(2, 7), LOST]
    assert resolve_world(plan(), computes).lost_positions == (0,), "the gradient is overwritten"


def test_a_holder_that_has_not_stepped_yet_rolls_forward_first() -> None:
    records = [at(0, 6, (3, 6), begun=True), at(1, 7), at(2, 7), LOST]
    verdict = resolve_world(plan(), records)
    assert verdict.iteration == 7
    assert verdict.fetches == (Fetch(0, 0, (3,), copy=True, iteration=6, steps=True),)


def test_a_stale_copy_and_no_copy_are_none() -> None:
    assert resolve_world(plan(), [at(0, 7, (3, 5)), at(1, 7), at(2, 7), LOST]).lost_positions == (0,)
    assert resolve_world(plan(), [at(0, 7), at(1, 7), at(2, 7), LOST]).lost_positions == (0,)


def test_shard_and_buddy_lost_together() -> None:
    both = [msgspec.structs.replace(LOST, rank=0), at(1, 7, (0, 7)), at(2, 7), LOST]
    assert resolve_world(plan(), both).lost_positions == (0,)


def test_without_buddies_copies_are_not_looked_at() -> None:
    layout = msgspec.structs.replace(LAYOUT, buddy=False)
    assert resolve_world(plan(layout), [at(0, 7, (3, 7)), at(1, 7), at(2, 7), LOST]).lost_positions == (0,)


def test_shards_that_came_without_copies_are_copied_at_the_meeting() -> None:
    """From another layout, or from another node by a move: a node that is lost in the next iteration must take nothing
    with it. Else the gather waits for the step, as always."""
    bare = [at(rank, 7) for rank in range(4)]
    assert resolve_world(plan(), bare).gather
    copied = [at(rank, 7, ((rank - 1) % 4, 7)) for rank in range(4)]
    assert not resolve_world(plan(), copied).gather
    older = [at(rank, 7, ((rank - 1) % 4, 6)) for rank in range(4)]
    assert resolve_world(plan(), older).gather
    first = [at(rank, 0) for rank in range(4)]
    assert not resolve_world(plan(), first).gather, "before the first step there is nothing to lose"
    alone = plan(Layout(dp=4, num_micro_batches=8, sharded=True))
    assert not resolve_world(alone, bare).gather
