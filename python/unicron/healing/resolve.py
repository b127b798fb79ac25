"""From the records of all to what each has to do: pure functions, the same answer on every rank.

`resolve_replica` looks at one wounded replica before its members compute again; `resolve_world` at everybody, at the
meeting. Two facts carry both: a commit's all-reduce completes only when every rank had entered it with all segments
reduced, so one rank that has the result is proof that all may step; and a segment that one rank holds reduced contains
every micro-batch, so it can be shared instead of reduced again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from unicron.healing.buddies import common_version
from unicron.healing.dealing import deal
from unicron.healing.record import CommitResult, Record
from unicron.types import EpochPlan, Layout, Rank


class SegmentsDiffer(RuntimeError):
    pass


class ReplicaVerdict(msgspec.Struct, frozen=True):
    commit: CommitResult | None  # members at commit.iteration roll forward with it
    compute: bool  # after that, all members drop their sums and compute their share again
    touched: tuple[Rank, ...] | None  # groups holding one of these are rebuilt; None: all inside groups
    reason: str
    dealt: tuple[int, ...] = ()  # replicas over which the iteration to compute is dealt
    is_first: bool = False  # nobody has stepped yet


class Fetch(msgspec.Struct, frozen=True):
    """Parameters and optimizer state of one position go from source to targets."""

    position: int
    source: Rank
    targets: tuple[Rank, ...]
    copy: bool = False  # the source's copy of the (one) target's shard, not its own state
    iteration: int = -1  # of the copy
    steps: bool = False  # the copy is one step behind: the gradient comes along, and the target does the step
    shard: int = 0  # of the position's state, where several ranks have each
    side_by_side: bool = False  # each target has a source of its own choice; else one serves all, one after the other


class WorldVerdict(msgspec.Struct, frozen=True):
    iteration: int  # the one everybody is at after rolling forward
    commit: CommitResult | None
    fetches: tuple[Fetch, ...]
    dealt: tuple[int, ...]
    compute: dict[int, tuple[int, ...]]  # replica -> micro-batches still to compute
    have: dict[int, tuple[int, ...]]  # replica -> micro-batches in its complete sums
    shared: dict[int, tuple[Rank, ...]]  # position -> for each already reduced segment, the rank that shares it
    lost_positions: tuple[int, ...]  # nobody holds their state
    all_reduced: bool  # every segment is reduced somewhere
    gather: bool  # somebody's parameters lack the others' shards of the newest step
    reason: str
    goes_back: bool = False  # everybody, to what is kept of `iteration`; who has nothing of it is a target of a fetch
    branch: int = 0  # of everybody's record from here on
    repeat: int = 0  # of everybody's record (Record)


def position_of(layout: Layout, rank: Rank) -> int:
    return layout.position_of(rank)


def newest_commit(records: Sequence[Record]) -> CommitResult | None:
    """Of those who went back last, if anybody did: what was committed before is to be done again."""
    branch = max((r.branch for r in records), default=0)
    known = [r.commit for r in records if r.commit is not None and r.branch == branch]
    return max(known, key=lambda c: (c.iteration, c.repeat), default=None)


def rolls_forward(record: Record, commit: CommitResult | None) -> bool:
    """By the commit's step; or, where it overflowed, to the next try of its iteration."""
    is_there = commit is not None and (record.iteration, record.repeat) == (commit.iteration, commit.repeat)
    return is_there and record.has_state


def version_after(record: Record, commit: CommitResult | None) -> tuple[int, int]:
    """(iteration, repeat) that it is at once it has rolled forward."""
    if commit is None or not rolls_forward(record, commit):
        return record.iteration, record.repeat
    return (record.iteration, record.repeat + 1) if commit.overflowed else (record.iteration + 1, 0)


def iteration_after(record: Record, commit: CommitResult | None) -> int:
    return version_after(record, commit)[0]


def is_gathered(record: Record, commit: CommitResult | None, *, sharded: bool) -> bool:
    """Whether its parameters are whole once it has rolled forward."""
    steps = commit is not None and rolls_forward(record, commit) and not commit.overflowed
    return not sharded or (record.gathered and not steps)


def resolve_replica(records: Sequence[Record], *, sharded: bool = False) -> ReplicaVerdict:
    """What the members of a wounded replica do before the meeting."""
    verdict = _resolve_replica(records, sharded=sharded)
    return msgspec.structs.replace(verdict, is_first=all(record.iteration == 0 for record in records))


def _resolve_replica(records: Sequence[Record], *, sharded: bool) -> ReplicaVerdict:
    commit = newest_commit(records)
    survivors = [r for r in records if r.inside_epoch > 0]
    same = {(r.inside_epoch, r.inside_touched) for r in survivors}
    touched = survivors[0].inside_touched if len(same) == 1 else None
    if _is_split(records):
        return ReplicaVerdict(None, False, touched, "not everybody has gone back: to the meeting first")
    if not all(r.has_state for r in records):
        lacking = [r.rank for r in records if not r.has_state]
        return ReplicaVerdict(commit, False, touched, f"ranks {lacking} have no whole state: to the meeting first")
    versions = {version_after(r, commit) for r in records}
    if len(versions) != 1:
        raise AssertionError(f"members of one replica at iterations (and repeats) {sorted(versions)}: {records}")
    fresh = [r for r in records if rolls_forward(r, commit) or not r.summed]
    if not fresh:
        return ReplicaVerdict(commit, False, touched, "all members hold whole sums: nothing is computed again")
    lacking = [r.rank for r in records if not is_gathered(r, commit, sharded=sharded)]
    if lacking:
        why = f"ranks {lacking} lack other replicas' shards: to the meeting first"
        return ReplicaVerdict(commit, False, touched, why)
    dealt = _dealt(records, commit)
    if not dealt:
        return ReplicaVerdict(commit, False, touched, "nobody here knows how the iteration is dealt")
    why = f"ranks {[r.rank for r in fresh]} have no whole sums: the replica computes again"
    return ReplicaVerdict(commit, True, touched, why, dealt)


def _is_split(records: Sequence[Record]) -> bool:
    """Going back was interrupted: some did, some did not."""
    return len({r.branch for r in records if r.has_state}) > 1


def reduces_eagerly(layout: Layout, rank: Rank, records: Sequence[Record]) -> bool:
    """Whether all of this rank's position can reduce the same segments under the backward, in the same order."""
    position = position_of(layout, rank)
    words = {record.eager for record in records if position_of(layout, record.rank) == position}
    return len(words) == 1 and "" not in words


def gathers_late(records: Sequence[Record]) -> bool:
    """Whether everybody can: buckets go in another order then, which must be everybody's."""
    return bool(records) and all(record.late for record in records)


def _dealt(records: Sequence[Record], commit: CommitResult | None) -> tuple[int, ...]:
    """As it was dealt to those who began it, else as the newest plan met by a survivor says."""
    begun = [r.dealt for r in records if r.begun and not rolls_forward(r, commit)]
    met = [r.met_replicas for r in records if r.met_replicas]
    return (begun + met + [()])[0]


def _lost_positions(layout: Layout, holders: Sequence[Record], kept: set[Rank]) -> tuple[int, ...]:
    """Positions whose state nobody holds: of replicated state the last copy, of sharded state any shard's last one.
    kept: ranks of whose shard somebody else has a usable copy."""
    have = {r.rank for r in holders} | kept
    if layout.sharded:
        lacking = [r for r in range(layout.world_size) if have.isdisjoint(layout.holders(r))]
        return tuple(sorted({position_of(layout, r) for r in lacking}))
    held = {position_of(layout, r) for r in have}
    return tuple(p for p in range(layout.replica_size) if p not in held)


def resolve_world(plan: EpochPlan, records: Sequence[Record]) -> WorldVerdict:
    """What everybody does at the meeting of plan.epoch; records are those of exactly plan.ranks."""
    layout, commit = plan.layout, newest_commit(records)
    holders = [r for r in records if r.has_state]
    positions = range(layout.replica_size)
    is_split = _is_split(records)
    copies = () if is_split else _copies(plan, records, commit)
    lost = tuple(positions) if is_split else _lost_positions(layout, holders, {fetch.targets[0] for fetch in copies})
    back = _go_back(plan, records) if lost and not plan.restore else None
    if back is not None:
        return back
    if lost or plan.restore:
        why = f"positions {list(lost)} have no holder" + " of every shard" * layout.sharded
        reached = max((iteration_after(r, commit) for r in holders), default=-1)  # -1: nobody knows
        return WorldVerdict(reached, None, (), plan.replicas, {}, {}, {}, lost, False, False, why)
    versions = {version_after(r, commit) for r in holders}
    if len(versions) != 1:
        raise AssertionError(f"epoch {plan.epoch}: ranks at iterations (and repeats) {sorted(versions)}: {records}")
    iteration, repeat = versions.pop()
    current = [r for r in holders if (r.iteration, r.repeat) == (iteration, repeat)]  # did not just roll forward
    begun = [r for r in current if r.begun]
    dealt = begun[0].dealt if begun else plan.replicas
    have = _complete_sums(plan, current)
    shared = _shared_segments(plan, current)
    reduced_everywhere = bool(current) and all(len(shared[p]) == _num_segments(plan, records, p) > 0 for p in positions)
    if reduced_everywhere:
        compute: dict[int, tuple[int, ...]] = dict.fromkeys(plan.replicas, ())
    else:
        compute = deal(layout.num_sets, dealt, plan.replicas, have)
        # Who computes its share from nothing overwrites what it holds reduced, so it cannot share it.
        shared = _shared_segments(plan, [r for r in current if layout.replica_of(r.rank) in have])
    # Copies made beside the training are renewed at every meeting, by the gathering: who keeps whose may be another.
    renews = layout.buddy_every > 0
    gathered = all(is_gathered(r, commit, sharded=layout.sharded) for r in holders)
    fetches = copies or _fetches(plan, records)
    # A shard comes without the others' parts of the parameters.
    gather = renews or (layout.sharded and bool(fetches)) or not gathered or _lacks_copies(plan, records, iteration)
    return WorldVerdict(
        iteration, commit, fetches, dealt, compute, have, shared, (),
        reduced_everywhere, gather, _why(compute, reduced_everywhere), branch=holders[0].branch,
        repeat=repeat,
    )  # fmt: skip


def _go_back(plan: EpochPlan, records: Sequence[Record]) -> WorldVerdict | None:
    """Shards are lost: everybody to the newest iteration of which every shard is kept somewhere, if there is one."""
    found = common_version(records)
    if found is None:
        return None
    iteration, sources = found
    layout, everybody = plan.layout, plan.replicas
    fetches = tuple(
        Fetch(position_of(layout, rank), source, (rank,), True, iteration) for rank, source in sorted(sources.items())
    )
    shared: dict[int, tuple[Rank, ...]] = dict.fromkeys(range(layout.replica_size), ())
    compute = deal(layout.num_sets, everybody, everybody, {})
    why = f"ranks {sorted(sources)} lost their shards: everybody goes back to iteration {iteration}"
    return WorldVerdict(
        iteration, None, fetches, everybody, compute, {}, shared, (), False, True, why,
        goes_back=True, branch=plan.epoch,
    )  # fmt: skip


def _copies(plan: EpochPlan, records: Sequence[Record], commit: CommitResult | None) -> tuple[Fetch, ...]:
    """For every shard that was lost and of which somebody has a copy: of the iteration all are at, or one step behind
    while its holder still has that step's gradient (who has not gathered does not compute, and who has has sent and
    taken the copies of this iteration)."""
    holders = [r for r in records if r.has_state]
    if not plan.layout.buddy or not holders:
        return ()
    at = iteration_after(holders[0], commit)
    found: dict[Rank, Fetch] = {}
    for holder in sorted(holders, key=lambda r: r.rank):
        for copy in sorted(holder.copies, key=lambda c: -c.iteration):
            is_lost = any(r.rank == copy.rank and not r.has_state for r in records)
            is_busy = any(fetch.source == holder.rank for fetch in found.values())
            if not is_lost or is_busy or copy.rank in found:
                continue
            is_behind = commit is not None and commit.iteration == copy.iteration == at - 1
            if copy.iteration == at or (is_behind and not is_gathered(holder, commit, sharded=True)):
                position = position_of(plan.layout, copy.rank)
                found[copy.rank] = Fetch(position, holder.rank, (copy.rank,), True, copy.iteration, is_behind)
    return tuple(found[rank] for rank in sorted(found))


def _lacks_copies(plan: EpochPlan, records: Sequence[Record], iteration: int) -> bool:
    """Shards came without their copies, from another layout or another node: a node that is lost before the next step
    would take the only ones with it. Before the first step there is nothing to lose."""
    if not plan.layout.buddy or iteration == 0:
        return False
    copied = {copy.rank for record in records for copy in record.copies if copy.iteration == iteration}
    return copied != set(plan.ranks)


def _complete_sums(plan: EpochPlan, current: Sequence[Record]) -> dict[int, tuple[int, ...]]:
    have: dict[int, tuple[int, ...]] = {}
    by_rank = {r.rank: r for r in current}
    for replica in plan.replicas:
        members = [by_rank.get(rank) for rank in plan.layout.replica_ranks(replica)]
        if all(m is not None and m.summed for m in members):
            sets = {m.done for m in members if m is not None}
            if len(sets) != 1:
                raise AssertionError(f"replica {replica}: members hold different micro-batches {sets}")
            have[replica] = sets.pop()
    return have


def _shared_segments(plan: EpochPlan, current: Sequence[Record]) -> dict[int, tuple[Rank, ...]]:
    shared: dict[int, tuple[Rank, ...]] = {}
    for position in range(plan.layout.replica_size):
        holders = [r for r in current if position_of(plan.layout, r.rank) == position]
        most = max((r.segments_reduced for r in holders), default=0)
        shared[position] = tuple(
            min(r.rank for r in holders if r.segments_reduced > segment) for segment in range(most)
        )
    return shared


def _num_segments(plan: EpochPlan, records: Sequence[Record], position: int) -> int:
    """Raises SegmentsDiffer: sums that are cut differently would be added up with what lies beside them."""
    counts = {r.rank: r.num_segments for r in records if position_of(plan.layout, r.rank) == position}
    if len(set(counts.values())) > 1:
        raise SegmentsDiffer(
            f"ranks have gradients in different numbers of segments: {counts}; workers of two versions with a small "
            "bucket_size (see OPERATION, Upgrades), or scripts that differ: suspend the task and resume it"
        )
    return max(counts.values())


def _fetches(plan: EpochPlan, records: Sequence[Record]) -> tuple[Fetch, ...]:
    fetches = []
    side_by_side = all(record.side_by_side for record in records)
    lacking = {plan.layout.holders(r.rank) for r in records if not r.has_state}
    have = {r.rank for r in records if r.has_state}
    for same in sorted(lacking, key=lambda ranks: (position_of(plan.layout, ranks[0]), ranks)):
        position, shard = position_of(plan.layout, same[0]), plan.layout.shard_of(same[0])
        targets = tuple(r.rank for r in records if r.rank in same and not r.has_state)
        source = min(have & set(same))
        fetches.append(Fetch(position, source, targets, shard=shard, side_by_side=side_by_side))
    return tuple(fetches)


def _why(compute: dict[int, tuple[int, ...]], reduced_everywhere: bool) -> str:
    if reduced_everywhere:
        return "every segment is reduced somewhere: nothing is computed again"
    work = {replica: list(todo) for replica, todo in compute.items() if todo}
    return f"replicas compute {work}" if work else "all sums are whole"
