"""A sharded task whose shards have buddies goes on with fewer replicas when a node is lost for good, and grows again.

A plain optimizer's replica simply leaves (SHRINK). Shards may not: the state is whole only with all of them. But the
copies of the lost ones are in other nodes' memory, so

1. the lost roles become *guests* where the task lives: an heir adopts each beside the slots, for the moment, and takes
   its shard from the buddy. The interrupted iteration ends with everybody, so nothing that was done is lost;
2. the planner decides for the slots that are left, and the layout changes in memory to that width (reshaping.py): the
   same global tensors, cut for fewer replicas. The guests leave;
3. when slots are there again the planner decides once more, and the layout changes back. A node that comes back before
   2 is done gets its roles by a move instead (moves.py).

A guest costs memory, not a slot: as much as a worker of its role, until 2 is done.

Rejected: to cut the lost shards out of the copies straight into the narrower layout, without guests. The interrupted
iteration has sums in the old layout, and would be lost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import msgspec

from unicron.coordinator.state import State, TaskState, node_order
from unicron.coordinator.transitions import NodePhase
from unicron.types import EpochPlan, Layout, Rank


def narrows(task: TaskState) -> bool:
    """Can it go on with fewer replicas, or with more again, by a change of its layout?"""
    layout = task.asked.layout
    return (
        task.job.managed
        and task.plan is not None
        and not task.on_gpu
        and layout.copies_shards
        and layout.dp > layout.ep == 1
    )


def widths(task: TaskState, held: int) -> list[int]:
    """Numbers of replicas that one that narrows may have next, ascending. held: whole replicas that it keeps. It is not
    made narrower than these for others, because the way there and back costs it time; and without any there is nobody
    to go over from."""
    job = task.asked
    grid = range(job.replicas_min, job.layout.dp + 1, job.replicas_unit) if job.replicas_min else ()
    if held == 0:
        return [task.job.layout.dp]
    return sorted({held, *(count for count in grid or range(held, job.layout.dp + 1) if count >= held)})


def layout_of(task: TaskState, replicas: int) -> Layout:
    """Its layout in this width."""
    return with_copies(msgspec.structs.replace(task.asked.layout, dp=replicas), task.asked.layout)


def with_copies(layout: Layout, asked: Layout) -> Layout:
    """A layout with those copies of its shards that were asked for, as far as it can have them: a single replica has
    nobody who could keep one, and a width may divide into fewer instances of the optimizer, or not at all."""
    if not layout.sharded or layout.dp == 1:
        return msgspec.structs.replace(layout, buddy=False, buddy_every=0, instances=1)
    instances = math.gcd(asked.instances, layout.dp)
    return msgspec.structs.replace(layout, buddy=asked.buddy, buddy_every=asked.buddy_every, instances=instances)


def is_width(task: TaskState, layout: Layout) -> bool:
    return narrows(task) and layout == layout_of(task, layout.dp)


# ------------------------------------------------------------ guests


def gone_with_their_node(state: State, task: TaskState) -> list[Rank]:
    return [rank for rank in sorted(task.lost) if state.nodes[task.placement[rank]].phase is NodePhase.LOST]


def refusal_to_host(state: State, task: TaskState, gone: Collection[Rank]) -> str:
    """Why these roles wait for a node, instead of going on as guests; '' when they need not."""
    plan, layout = task.plan, task.job.layout
    if plan is None:
        return "nothing of the task runs"
    ranks = f"ranks {sorted(gone)} wait for a node"
    if task.on_gpu:
        return f"{ranks}: to go on with fewer replicas the layout must change, in memory on CPUs only in this version"
    broken = {layout.replica_of(rank) for rank in (*gone, *task.guests)}
    if not set(plan.replicas) - broken:
        return f"{ranks}: no replica is whole without it"
    if bare := _bare(state, task, gone):
        return f"{ranks}: who keeps the copies of the shards of ranks {bare} is gone, too"
    if not _hosts(state, task):
        return f"{ranks}: no other node of the task is up"
    return ""


def may_be_there_still(state: State, task: TaskState, gone: Collection[Rank]) -> bool:
    """Of a shard that no node has which is up: was one that has it given up for its silence only? Its memory may be
    whole, and its return brings the state back."""
    plan = task.plan
    assert plan is not None

    def is_silent(rank: Rank) -> bool:
        member = plan.member(rank)
        return member is not None and state.nodes[member.node].probe_answer != "gone"

    bare = _bare(state, task, gone)
    return bool(bare) and all(any(map(is_silent, (rank, *_keepers(plan, rank)))) for rank in bare)


def _bare(state: State, task: TaskState, gone: Collection[Rank]) -> list[Rank]:
    """Those of which who keeps the copy is gone, too."""
    assert task.plan is not None
    plan = task.plan
    return [rank for rank in sorted(gone) if all(_is_gone(state, task, each) for each in _keepers(plan, rank))]


def _keepers(plan: EpochPlan, rank: Rank) -> tuple[Rank, ...]:
    """Who else has this rank's shard: its buddy, or those that step it in the other instances."""
    if plan.layout.buddy:
        return (plan.holder_of(rank),)
    return tuple(other for other in plan.layout.holders(rank) if other != rank)


def _is_gone(state: State, task: TaskState, rank: Rank) -> bool:
    """Its memory, not only its process."""
    assert task.plan is not None
    member = task.plan.member(rank)
    return member is None or state.nodes[member.node].phase is NodePhase.LOST


def still_guests(task: TaskState, moved: Collection[Rank]) -> tuple[Rank, ...]:
    """When these get homes with a slot."""
    return tuple(rank for rank in sorted(task.guests) if rank not in moved)


def hosts_of(state: State, task: TaskState, gone: Collection[Rank]) -> dict[Rank, str]:
    """Where each becomes a guest: not beside who else has its shard, if there is another node; spread over the nodes
    that the task lives on, for the memory's sake."""
    assert task.plan is not None
    count = Counter(task.guests.values())
    homes: dict[Rank, str] = {}
    for rank in sorted(gone):
        same = () if task.plan.layout.buddy else _keepers(task.plan, rank)  # a buddy is another with every plan
        others = {(task.placement | homes)[other] for other in same}
        by_memory = sorted(_hosts(state, task), key=lambda name: (count[name], node_order(name)))
        homes[rank] = next((name for name in by_memory if name not in others), by_memory[0])
        count[homes[rank]] += 1
    return homes


def _hosts(state: State, task: TaskState) -> list[str]:
    nodes = [state.nodes[name] for name in sorted(set(task.placement.values()), key=node_order)]
    return [node.name for node in nodes if node.phase is NodePhase.UP and not node.is_drained]
