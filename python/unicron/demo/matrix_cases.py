"""What the matrix breaks, and where: rows are layouts with all that a script may choose, cases are failure points.

A case is armed for the next time its rank passes the point, so it needs no iteration. What it may cost:
micro-batches computed again in shares of one replica, no iteration, the same bits where the role is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from unicron.demo.runner import layout_of
from unicron.demo.scenarios import EXTRA_S, Act, Expect, Fault, Scenario, from_copies, middle, share
from unicron.demo.variant import PLAIN, Variant
from unicron.faults.kinds import AFTER, BEFORE, INSIDE
from unicron.types import Layout, Rank

SHRINK_ITERATION = 4
SHRINK_ITERATIONS = 9
NEVER = 1 << 30
CHECKPOINT_EVERY = 7  # iterations; of rows whose cases include a save
EVALUATE_EVERY = 1  # so that whatever a recovery ends with, the script has something to do with others next


@dataclass(frozen=True)
class Row:
    name: str
    tp: int
    pp: int
    dp: int
    sharded: bool = False
    buddy: bool = False
    buddy_every: int = 0
    variant: Variant = PLAIN
    exact: bool = False
    ep: int = 1
    instances: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.tp, self.pp, self.dp

    def layout(self) -> Layout:
        return layout_of(
            *self.sizes, ep=self.ep, sharded=self.sharded, exact=self.exact, buddy=self.buddy,
            buddy_every=self.buddy_every, instances=self.instances,
        )  # fmt: skip

    def has(self, case: Case) -> bool:
        """Megatron makes several buckets only where it is asked to hide communication. (Then they come late, too.)"""
        return case.fits(self.layout()) and (self.variant.overlap or not (case.buckets_only or case.eager_only))

    @property
    def evaluate_every(self) -> int:
        """Parameters that are gathered late come before an evaluation, or in the next forward: now so, now so."""
        return EVALUATE_EVERY + (self.sharded and self.variant.overlap)

    def can_shrink(self) -> bool:
        """A lost node's shards of a distributed optimizer have no copy but a buddy's or another instance's, and the
        only replica has none at all."""
        is_copied = (self.buddy and self.ep == 1) or self.instances > 1
        return self.layout().num_replicas > 1 and (not self.sharded or is_copied)


ROWS = (
    Row("1,1,4", 1, 1, 4),
    Row("2,1,2", 2, 1, 2),
    Row("1,2,2", 1, 2, 2),
    Row("2,2,1", 2, 2, 1),
    Row("2,2,2", 2, 2, 2),
    Row("1,1,4-distributed", 1, 1, 4, sharded=True),
    Row("1,2,2-distributed-overlap", 1, 2, 2, sharded=True, variant=Variant(overlap=True)),
    Row("1,1,4-distributed-overlap", 1, 1, 4, sharded=True, variant=Variant(overlap=True)),
    Row("1,1,4-overlap", 1, 1, 4, variant=Variant(overlap=True)),
    Row("1,2,2-interleaved", 1, 2, 2, variant=Variant(virtual_pp=2)),
    Row("1,1,4-bf16", 1, 1, 4, variant=Variant(bf16=True)),
    Row("1,1,4-fp16", 1, 1, 4, variant=Variant(fp16=True)),
    Row("2,1,2-sequence-dropout", 2, 1, 2, variant=Variant(sequence_parallel=True, dropout=0.1)),
    Row("2,1,2-distributed-bf16", 2, 1, 2, sharded=True, variant=Variant(bf16=True)),
    Row("1,1,4-distributed-buddy", 1, 1, 4, sharded=True, buddy=True),
    Row("1,1,4-distributed-buddy-3", 1, 1, 4, sharded=True, buddy=True, buddy_every=3),
    Row("1,2,2-distributed-buddy-3", 1, 2, 2, sharded=True, buddy=True, buddy_every=3),
    Row("1,2,2-distributed-buddy-bf16", 1, 2, 2, sharded=True, buddy=True, variant=Variant(bf16=True)),
    Row("2,1,2-exact", 2, 1, 2, exact=True),
    Row("1,2,2-exact-bf16", 1, 2, 2, exact=True, variant=Variant(bf16=True)),
    Row("1,1,4-unclipped", 1, 1, 4, variant=Variant(unclipped=True)),
    Row("1,1,4-ep2", 1, 1, 4, ep=2, variant=Variant(experts=4)),
    Row("1,1,4-distributed-ep2", 1, 1, 4, ep=2, sharded=True, variant=Variant(experts=4)),
    Row("1,1,4-distributed-buddy-ep2", 1, 1, 4, ep=2, sharded=True, buddy=True, variant=Variant(experts=4)),
    Row("1,2,4-ep2", 1, 2, 4, ep=2, variant=Variant(experts=4)),
    Row("1,1,4-experts", 1, 1, 4, variant=Variant(experts=4)),
    Row("1,1,4-exact-ep2", 1, 1, 4, ep=2, exact=True, variant=Variant(experts=4)),
    Row("1,1,4-distributed-instances-2", 1, 1, 4, sharded=True, instances=2),
    Row("1,1,4-distributed-instances-4", 1, 1, 4, sharded=True, instances=4),
    Row("1,2,4-distributed-instances-2-bf16", 1, 2, 4, sharded=True, instances=2, variant=Variant(bf16=True)),
    Row("1,2,2-distributed-unclipped", 1, 2, 2, sharded=True, variant=Variant(unclipped=True)),
)


@dataclass(frozen=True)
class Case:
    name: str
    fault: str
    point: str
    # of the micro-batch: first, middle, or any (-1); in the reduction the segment's; of a passage see faults/kinds.py
    number: int | str = -1
    shares: float = 1.0  # of one replica, that may be computed again
    again: str = ""  # a second fault, in another replica, at this point
    again_fault: str = "kill"
    again_number: int = -1
    again_inside: bool = False  # not in another replica: in another rank of the same one
    times: int = 1  # so many faults come after the first, each in the recovery of the one before
    again_incidents: int = 1  # that come of each
    replicas_min: int = 1
    instances_min: int = 1  # of the optimizer: so many ranks have each shard
    sharded_only: bool = False
    inside_only: bool = False  # something is between the ranks of a replica
    tp_only: bool = False
    pp_only: bool = False
    ep_only: bool = False
    tied_only: bool = False  # there are collectives in the tie
    buckets_only: bool = False  # parameters are gathered in several
    buddy_only: bool = False  # shards are copied
    eager_only: bool = False  # segments are reduced under the backward

    def fits(self, layout: Layout) -> bool:
        if layout.num_replicas < max(self.replicas_min, 2 if self.again and not self.again_inside else 1):
            return False
        if (self.tp_only and layout.tp == 1) or (self.pp_only and layout.pp == 1):
            return False
        if (self.ep_only and layout.ep == 1) or (self.tied_only and layout.pp == layout.ep == 1):
            return False
        if layout.world_size <= self.times:
            return False
        if self.replicas_min > 1 and layout.sharded:
            return False  # what its arena has outlives it
        if layout.instances < self.instances_min or (self.buddy_only and not layout.buddy):
            return False
        is_inside = self.inside_only or self.again_inside
        return (layout.sharded or not self.sharded_only) and (layout.replica_size > 1 or not is_inside)

    def shares_of(self, layout: Layout) -> float:
        """With tp and pp a rank may be in the reduction while another of its replica, which it shares no group with, is
        not done with its sums: then these are computed again. The plan for a second failure in a recovery touches
        everybody: a whole replica that still computes then (on a machine with few cores) begins again, too.
        """
        if self.again and self.shares > 1:
            return float(layout.num_replicas)
        return max(self.shares, 1.0) if layout.tp * layout.ep > 1 and layout.pp > 1 else self.shares

    def incidents(self) -> int:
        return 1 + (self.again_incidents * self.times if self.again else 0)

    def faults(self, layout: Layout, turn: int) -> tuple[Fault, ...]:
        """turn: cases take turns over replicas and places in them."""
        replica = turn % layout.num_replicas
        if self.again in ("fetch",) or self.again_fault == "scribble":
            return self._with_a_source(layout, turn)
        first = _fault(self.fault, self.point, self.number, layout, replica, turn)
        return *self._later(layout, replica, turn), first

    def _later(self, layout: Layout, replica: int, turn: int) -> Iterator[Fault]:
        """Armed before the first one. Each is in another rank: the next replica's, or of one that had its turn the next
        rank.
        """
        for number in range(1, self.times + 1) if self.again else ():
            replicas_on, ranks_on = (0, number) if self.again_inside else (number, number // layout.num_replicas)
            at = self.again_number if number == 1 else number - 1
            place = (replica + replicas_on) % layout.num_replicas
            yield _fault("kill", self.again, at, layout, place, turn + ranks_on * layout.num_replicas)

    def _with_a_source(self, layout: Layout, turn: int) -> tuple[Fault, ...]:
        """The first one loses its state; the other holds the same state, and is where that is taken from first."""
        first = _fault(self.fault, self.point, self.number, layout, layout.num_replicas - 1, turn * layout.num_replicas)
        return Fault(layout.holders(first.rank)[0], self.again_fault, -1, self.again), first


def _fault(kind: str, point: str, number: int | str, layout: Layout, replica: int, turn: int) -> Fault:
    ranks = layout.replica_ranks(replica)
    rank = ranks[turn // layout.num_replicas % len(ranks)]
    if number == "first":
        number = replica * share(layout) * layout.ep + layout.lane_of(rank)
    elif number == "middle":
        number = middle(layout, rank)
    return Fault(rank, kind, -1, point, int(number))


REPLACE = (
    Case("first-forward", "kill", "compute", "first"),
    Case("compute", "kill", "compute", "middle"),
    Case("forward", "kill", "forward", "middle"),
    Case("backward", "kill", "backward", "middle"),
    Case("tensor-before", "kill", "tensor", BEFORE, tp_only=True),
    Case("tensor-inside", "kill", "tensor", INSIDE, tp_only=True),
    Case("expert-before", "kill", "expert", BEFORE, ep_only=True),
    Case("expert-inside", "kill", "expert", INSIDE, ep_only=True),
    Case("send-inside", "kill", "send", INSIDE, pp_only=True),
    Case("receive-before", "kill", "receive", BEFORE, pp_only=True),
    Case("receive-inside", "kill", "receive", INSIDE, pp_only=True),
    Case("eager-before", "kill", "eager", BEFORE, eager_only=True),
    Case("eager-inside", "kill", "eager", INSIDE, eager_only=True),
    Case("eager-seen-by-others", "kill", "eager", AFTER, eager_only=True),
    Case("tie", "kill", "tie"),
    Case("tie-inside", "kill", "tie", INSIDE, tied_only=True),
    Case("reduce-before", "kill", "reduce", 0, shares=0),
    Case("reduce-during", "kill", "reduce", 1, shares=0),
    Case("reduce-inside", "kill", "reducing", 1, shares=0),
    Case("reduce-seen-by-others", "kill", "reduced", 1, shares=0),
    Case("copy", "kill", "copy", 1, shares=0),
    Case("commit", "kill", "commit", shares=0),
    Case("commit-inside", "kill", "commit", INSIDE, shares=0),
    Case("commit-seen-by-others", "kill", "commit", AFTER, shares=0),
    Case("confirm-before", "kill", "confirm", BEFORE, shares=0, inside_only=True),
    # Its part may have gone out: then who has the result steps, and begins the next iteration with it, for nothing.
    Case("confirm-inside", "kill", "confirm", INSIDE, shares=0.5, inside_only=True),
    Case("step", "kill", "step"),
    Case("gather", "kill", "gather", sharded_only=True),
    Case("gather-inside", "kill", "gathering", 0, sharded_only=True),
    Case("gather-some", "kill", "gather", 1, sharded_only=True, buckets_only=True),
    Case("gather-late-first", "kill", "late", 1, sharded_only=True, buckets_only=True),
    Case("gather-late", "kill", "late", 0, sharded_only=True, buckets_only=True),
    Case("settle-before", "kill", "settle", BEFORE, sharded_only=True, inside_only=True),
    Case("settle-inside", "kill", "settle", INSIDE, sharded_only=True, inside_only=True),
    Case("log", "kill", "log"),
    Case("evaluate", "kill", "evaluate"),
    Case("idle", "kill", "idle"),
    Case("save", "kill", "save"),
    Case("again-while-healing", "kill", "compute", "middle", shares=2.0, again="heal"),
    Case("again-and-again", "kill", "compute", "middle", shares=2.0, again="heal", times=3),
    Case("again-while-inside-is-rebuilt", "kill", "compute", "middle", shares=2.0, again="rebuild_inside",
         again_inside=True),
    Case("again-while-rebuilding", "kill", "compute", "middle", shares=2.0, again="rebuild_cross"),
    Case("again-while-computing-again", "kill", "compute", "middle", shares=2.0, again="compute_again",
         again_inside=True),
    Case("again-while-reducing-again", "kill", "reduce", 1, shares=0, again="reduce_again", again_number=1),
    Case("corrupt-transfer", "kill", "step", again="fetch", again_fault="corrupt", again_incidents=0, replicas_min=3),
    Case("corrupt-copy", "corrupt", "buddy", buddy_only=True),
    Case("scribbled-source", "kill", "step", shares=2.0, again="heal", again_fault="scribble", replicas_min=3),
    Case("source-killed", "kill", "step", shares=2.0, again="fetch", replicas_min=3),
    Case("exception-reduce", "exception", "reduce", 1, shares=0),
    Case("exception-eager-inside", "exception", "eager", INSIDE, eager_only=True),
    Case("exception-step", "exception", "step"),
    Case("exception-log", "exception", "log"),
    Case("stop-commit", "stop", "commit", shares=0),
    Case("stop-gather", "stop", "gather", sharded_only=True),
    Case("reset-compute", "reset", "compute", "middle", inside_only=True),
    Case("reset-tie", "reset", "tie", inside_only=True),
    Case("reset-reduce", "reset", "reduce", 1),
    Case("reset-commit", "reset", "commit"),
    Case("reset-tensor-inside", "reset", "tensor", INSIDE, tp_only=True),
    Case("reset-expert-inside", "reset", "expert", INSIDE, ep_only=True),
    Case("reset-receive-inside", "reset", "receive", INSIDE, pp_only=True),
    Case("reset-reduce-inside", "reset", "reducing", 1),
    Case("reset-commit-inside", "reset", "commit", INSIDE),
    Case("reset-gather-inside", "reset", "gathering", 0, sharded_only=True),
    Case("reset-gather-late", "reset", "late", 1, sharded_only=True, buckets_only=True),
)  # fmt: skip

SHRINK = (
    Case("first-forward", "node", "compute", "first"),
    Case("forward", "node", "forward", "middle"),
    Case("backward", "node", "backward", "middle"),
    Case("tensor-inside", "node", "tensor", INSIDE, tp_only=True),
    Case("expert-inside", "node", "expert", INSIDE, ep_only=True),
    Case("receive-inside", "node", "receive", INSIDE, pp_only=True),
    Case("eager-inside", "node", "eager", INSIDE, eager_only=True),
    Case("eager-seen-by-others", "node", "eager", AFTER, eager_only=True),
    Case("tie", "node", "tie"),
    Case("reduce-before", "node", "reduce", 0),
    Case("reduce-during", "node", "reduce", 1),
    Case("reduce-inside", "node", "reducing", 1),
    Case("reduce-seen-by-others", "node", "reduced", 1),
    Case("copy", "node", "copy", 1),
    Case("commit", "node", "commit"),
    Case("commit-inside", "node", "commit", INSIDE),
    Case("commit-seen-by-others", "node", "commit", AFTER),
    Case("confirm-inside", "node", "confirm", INSIDE, inside_only=True),
    Case("step", "node", "step"),
    Case("gather", "node", "gather", sharded_only=True),
    Case("gather-inside", "node", "gathering", 0, sharded_only=True),
    Case("settle-inside", "node", "settle", INSIDE, sharded_only=True, inside_only=True),
    Case("buddy", "node", "buddy", buddy_only=True),
    Case("log", "node", "log"),
    Case("evaluate", "node", "evaluate"),
    Case("idle", "node", "idle"),
    Case("corrupt-transfer", "node", "compute", "middle", again="fetch", again_fault="corrupt", again_incidents=0,
         instances_min=3),
    Case("scribbled-source", "node", "compute", "middle", shares=2.0, again="heal", again_fault="scribble",
         instances_min=3),
    Case("source-killed", "node", "compute", "middle", shares=2.0, again="fetch", instances_min=3),
)  # fmt: skip

#: A node dies, and in the recovery of that a worker. Its sums were put aside in its own memory while it computed what
#: the node had left undone, so it computes all of its own again.
SHRINK_AGAIN = (
    Case("again-while-rebuilding", "node", "compute", "middle", shares=2.0, again="rebuild_cross"),
    Case("again-while-computing-again", "node", "compute", "middle", shares=2.0, again="compute_again"),
    Case("again-while-reducing-again", "node", "compute", "middle", again="reduce_again", again_number=1),
)


def shrink_scenario(case: Case, layout: Layout, turn: int) -> Scenario:
    """The node of one replica dies at the case's point of SHRINK_ITERATION, and stays away. Where buddies have its
    shards the layout changes to one replica less; then the node is back, and it changes again."""
    faults = case.faults(layout, turn)
    if layout.copies_shards:
        node, narrow = node_of(layout, faults[-1].rank), layout.dp - 1
        back = Act("start_agent", SHRINK_ITERATIONS, node, when_dp=narrow)
        scenario = _node_dies("the task goes on narrower until it is back", case, layout, faults, back)
        expect = replace(from_copies(scenario.expect, layout), outcome="resized", is_grown=True, narrowed_to=narrow)
        if case.again:  # the incident tells where the heirs of the newest plan had it from
            expect = replace(expect, state_sources=(*expect.state_sources, "own_arena"))
        return replace(scenario, expect=expect, extra_s=EXTRA_S)
    # Not before the task is over: then everything is put right for the next.
    back = Act("start_agent", NEVER, node_of(layout, faults[-1].rank))
    return _node_dies("is not replaced", case, layout, faults, back)


def _node_dies(then: str, case: Case, layout: Layout, faults: Sequence[Fault], back: Act) -> Scenario:
    return Scenario(
        f"shrink-{case.name}",
        f"a node dies at {case.point}, and {then}",
        Expect(
            "resized",
            severities=("SEV1", "SEV2") if case.again else ("SEV1",),
            replaced=None,
            incidents_max=layout.replica_size + case.incidents(),
            recomputed_replicas=case.shares_of(layout),
            # With lanes nobody else has computed the same micro-batches; and who is scribbled into ends itself.
            told_less=(layout.ep > 1 and case.again == "reduce_again") or case.again_fault == "scribble",
        ),
        tuple(replace(fault, iteration=SHRINK_ITERATION) for fault in faults),
        acts=(back,),
        iterations=SHRINK_ITERATIONS,
        evaluate_every=EVALUATE_EVERY,
        window=(SHRINK_ITERATION,),
    )


def node_of(layout: Layout, rank: Rank) -> int:
    """The demo's cluster has one replica a node."""
    return layout.replica_of(rank)
