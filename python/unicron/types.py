"""The vocabulary: ids, severities, layouts and membership plans.

Plain frozen values without behaviour beyond arithmetic on themselves. Everything above (machines, runtime,
training) speaks in these; nothing here imports anything of unicron.

Ranks are stable: a role keeps its number for the life of the task, whatever leaves or joins. A task's full
width is ``Layout.dp`` replicas; ``EpochPlan.replicas`` says which of them are alive.
"""

from __future__ import annotations

import bisect
import enum
import operator
from collections.abc import Sequence

import msgspec

Rank = int


# The line of an incident's text about a SIGKILL's witnesses begins so (runtime/oom.py), and what it says in the clear.
OF_MEMORY = "memory: "
KILLED_NOTHING = f"{OF_MEMORY}the kernel killed nothing for memory"


class Severity(enum.StrEnum):
    """How bad a failure is (Unicron, table of error severities; FATAL and INFO are ours)."""

    SEV1 = "SEV1"  # node or hardware is bad: isolate, reconfigure
    SEV2 = "SEV2"  # restart the process
    SEV3 = "SEV3"  # retry in place
    FATAL = "FATAL"  # code, data or configuration is wrong: stop the task
    INFO = "INFO"  # count only


class Method(enum.StrEnum):
    """Which of the in-band ways saw the failure first."""

    PROCESS = "process"
    EXCEPTION = "exception"
    CONNECTION = "connection"
    STATISTICS = "statistics"
    HARDWARE = "hardware"
    NCCL = "nccl"
    NOTICE = "notice"


class Outcome(enum.StrEnum):
    HEALED = "healed"
    RESIZED = "resized"
    UNAFFECTED = "unaffected"
    STOPPED = "stopped"


class StateSource(enum.StrEnum):
    OWN_ARENA = "own_arena"  # arena of the role's last holder on this node
    NODE_ARENA = "node_arena"  # another process's arena on this node
    REPLICA = "replica"
    BUDDY = "buddy"
    CHECKPOINT = "checkpoint"
    NONE_NEEDED = "none_needed"


class Stage(enum.IntEnum):
    """Where a worker's training loop is. The same numbers stand in the pulse page and in the arena's header.

    The order is the order inside one iteration (MECHANICS 1.2): collectives inside a replica first (TIE), those
    between replicas after them (REDUCE, COMMIT), none inside a replica again before the commit.
    """

    STARTING = 0  # imports, model being built
    IDLE = 1  # between iterations: data, logging, the script's own code
    COMPUTE = 2
    TIE = 3  # tied embeddings and other in-replica gradient collectives
    REDUCE = 4
    COMMIT = 5
    STEP = 6  # parameters are being written; state is torn if the process dies here
    HEAL = 7  # regrouping, exchanging records, fetching state
    EVALUATE = 8  # declared with session.expect()
    SAVE = 9
    WAITING = 10  # understudy waiting for a role
    DONE = 11
    GATHER = 12  # after STEP, with a sharded optimizer: every replica's shard of the new parameters goes to the others


class WaitKind(enum.IntEnum):
    """What a group that is waited in is for; the numbers stand in the pulse page."""

    TP = 0
    PP = 1
    DP = 2
    WORLD = 3  # all of the task, or any other mixture


class Cpu(enum.StrEnum):
    """What a process did while its loop stood still: a signal that does not come from the loop."""

    UNKNOWN = "unknown"
    IDLE = "idle"  # all its threads slept
    BUSY = "busy"  # it computed
    STARVED = "starved"  # it wanted to, and others had the processor


class PlanKind(enum.StrEnum):
    START = "start"
    REPLACE = "replace"  # lost roles got heirs; width unchanged
    SHRINK = "shrink"  # a replica left
    GROW = "grow"  # a replica joined
    RECONNECT = "reconnect"  # connections broke with all ends alive
    RESHAPE = "reshape"  # everybody has the state in another layout (tp, pp, dp, sharding), and goes on in it
    MOVE = "move"  # roles went to other nodes between two iterations: leavers gave their state to joiners
    RESTORE = "restore"  # last holder of a state lost: everybody returns to a checkpoint


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a task is spread. dp is the full width (replica indices run 0..dp-1, some may be absent).

    Every plan has one, and the version before refuses what it does not know: a field that has its default is not sent.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1  # experts are spread over so many neighbouring dp indices, the lanes of one replica
    micro_batch: int = 1  # samples in one micro-batch
    num_micro_batches: int = 1  # M: micro-batches of one iteration, for the whole task
    exact: bool = False  # gradients are summed as integers: the result does not depend on widths and failures
    sharded: bool = False  # each replica holds and steps its own shard of the optimizer's state (no copy elsewhere)
    buddy: bool = False  # of a sharded state: a rank on another node keeps a copy of each shard, renewed by every step
    buddy_every: int = 0  # iterations; > 0: copies are made beside the training, and a lost node takes all back to one
    instances: int = 1  # of the distributed optimizer: each shard is held and stepped by so many ranks of its position

    @property
    def replica_size(self) -> int:
        return self.tp * self.pp * self.cp * self.ep

    @property
    def num_replicas(self) -> int:
        """At full width. One a dp index, where experts are not spread."""
        return self.dp // self.ep

    @property
    def num_sets(self) -> int:
        """Of micro-batches, one for each lane of a replica: they pass through it together, and are dealt together."""
        return self.num_micro_batches // self.ep

    @property
    def world_size(self) -> int:
        return self.replica_size * self.num_replicas

    @property
    def num_shards(self) -> int:
        """Of a position's optimizer state outside of experts: one of each instance's replicas has the same."""
        return self.num_replicas // self.instances if self.sharded else 1

    @property
    def steps_undoably(self) -> bool:
        """Whether the step is one that an heir can finish. Where a state has one holder it must be. With several
        instances of the optimizer it is as well: the shard's other holder is further away than its own arena."""
        return self.sharded or self.num_replicas == 1

    @property
    def copies_shards(self) -> bool:
        """Whether what a lost node takes of a sharded state is in the memory of another one, too."""
        return self.sharded and (self.buddy or self.instances > 1)

    def rank_of(self, tp: int, dp: int, pp: int) -> Rank:
        """Megatron's order tp-cp-ep-dp-pp."""
        return tp + self.tp * (dp + self.dp * pp)

    def coords(self, rank: Rank) -> tuple[int, int, int]:
        """(tp, dp, pp) of a rank."""
        return rank % self.tp, rank // self.tp % self.dp, rank // (self.tp * self.dp)

    def further(self, rank: Rank, step: int) -> Rank:
        """The same place so many replicas further, around."""
        peers = self.peers(rank)
        return peers[(self.replica_of(rank) + step) % len(peers)]

    def replica_of(self, rank: Rank) -> int:
        return self.coords(rank)[1] // self.ep

    def lane_of(self, rank: Rank) -> int:
        """Which micro-batch of each set it computes, and which of the experts it holds."""
        return self.coords(rank)[1] % self.ep

    def position_of(self, rank: Rank) -> int:
        """A role's place inside its replica."""
        tp, dp, pp = self.coords(rank)
        return tp + self.tp * (dp % self.ep + self.ep * pp)

    def peers(self, rank: Rank) -> tuple[Rank, ...]:
        """The ranks of its position, one a replica: copies of each other."""
        tp, dp, pp = self.coords(rank)
        return tuple(self.rank_of(tp, d, pp) for d in range(dp % self.ep, self.dp, self.ep))

    def shard_of(self, rank: Rank) -> int:
        """Which shard of its position's state it has."""
        return self.replica_of(rank) % self.num_shards

    def holders(self, rank: Rank) -> tuple[Rank, ...]:
        """The ranks of its position with the same optimizer state, itself among them, one an instance: copies of each
        other. Of a plain optimizer all peers."""
        if self.sharded and self.instances == 1:
            return (rank,)
        return self.peers(rank)[self.shard_of(rank) :: self.num_shards]

    def shard_mates(self, rank: Rank) -> tuple[Rank, ...]:
        """Those with the shards of its instance of the optimizer outside of experts, in the order of their shards: all
        lanes of its replicas."""
        size = self.dp // self.instances
        first = self.coords(rank)[1] // size * size
        return self.dense_peers(rank)[first : first + size]

    def dense_peers(self, rank: Rank) -> tuple[Rank, ...]:
        """Those with the same parameters outside of experts: all lanes of all replicas."""
        tp, _, pp = self.coords(rank)
        return tuple(self.rank_of(tp, d, pp) for d in range(self.dp))

    def wait_kind(self, ranks: Sequence[Rank]) -> WaitKind:
        """What a group of these ranks is for: the one coordinate in which they differ. Lanes exchange tokens."""
        if self.ep > 1 and len({self.replica_of(rank) for rank in ranks}) == 1:
            if len({self.lane_of(rank) for rank in ranks}) > 1:
                return WaitKind.WORLD
        differ = [len(set(values)) > 1 for values in zip(*map(self.coords, ranks), strict=True)]
        only = [kind for kind, does in zip((WaitKind.TP, WaitKind.DP, WaitKind.PP), differ, strict=True) if does]
        return only[0] if len(only) == 1 else WaitKind.WORLD

    def replica_ranks(self, replica: int) -> tuple[Rank, ...]:
        """In the order of their positions."""
        lanes = range(replica * self.ep, (replica + 1) * self.ep)
        return tuple(self.rank_of(t, d, p) for p in range(self.pp) for d in lanes for t in range(self.tp))


def refusal_of_instances(layout: Layout) -> str:
    """Why a task cannot have so many instances of its optimizer; '' when it can."""
    instances = layout.instances
    if instances == 1:
        return ""
    if not layout.sharded:
        return f"{instances} optimizer instances: only a distributed optimizer has several"
    if layout.ep > 1:
        return f"{instances} optimizer instances with ep {layout.ep}: in this version one of both must be 1"
    if instances < 1 or layout.dp % instances:
        return f"{instances} optimizer instances: dp {layout.dp} does not divide by that"
    if layout.buddy:
        return f"{instances} optimizer instances: these are copies of each shard already, leave the buddies out"
    return ""


class Budgets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a loop may stand still, in ms, where that is not learned."""

    iteration_ms: float = 0.0  # any stage inside an iteration; 0: learned, 1.5 and 3 times the usual of each stage
    first_iteration_ms: float = 1_800_000.0  # compiles, allocates, connects
    evaluation_ms: float = 3_600_000.0  # unless the script says (session.expect)
    save_ms: float = 1_800_000.0


class Network(msgspec.Struct, frozen=True):
    """The interface that a node uses for one purpose, and why that one."""

    interface: str  # "": the address is on none that is known
    address: str
    why: str
    rated_mbit: int = 0  # Mbit/s; 0: the kernel does not know it


class Transfer(msgspec.Struct, frozen=True):
    """State that went from one process to another, as one of them measured it."""

    rank: Rank  # of the role that got it
    source: str  # node
    target: str
    nbytes: int
    ms: float
    interface: str = ""  # on the node that measured


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who holds a role in an epoch."""

    rank: Rank
    node: str
    worker: str  # unique for the task's life, e.g. "n0.w3"
    incarnation: int = 0  # grows with every worker started on the node


_rank_of = operator.attrgetter("rank")


class EpochPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a task's membership, as decided by the coordinator and journaled before it is sent."""

    task: str
    epoch: int
    kind: PlanKind
    layout: Layout
    replicas: tuple[int, ...]  # live replica indices, sorted
    members: tuple[Member, ...]  # sorted by rank; exactly the ranks of the live replicas
    # Lost, replaced or disconnected since the previous epoch; everybody, when that one was not healed by all yet
    # (a failure during a recovery: members of one replica may have got to different places in it).
    touched: tuple[Rank, ...] = ()
    heirs: tuple[Rank, ...] = ()  # ranks whose worker is new in this epoch
    store: str = ""  # tcp://host:port of the epoch's rendezvous store (agent of the lowest surviving node)
    store_key: str = ""  # its CURVE public key (Z85)
    restore: str = ""  # RESTORE: checkpoint directory to load, for everybody
    incidents: tuple[str, ...] = ()  # incident ids this plan answers
    reason: str = ""

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(m.rank for m in self.members)

    def member(self, rank: Rank) -> Member | None:
        at = bisect.bisect_left(self.members, rank, key=_rank_of)  # of thousands; they come in the order of ranks
        if at < len(self.members) and self.members[at].rank == rank:
            return self.members[at]
        return next((m for m in self.members if m.rank == rank), None)

    def buddy_distance(self) -> int:
        """How many replicas further the holder of a shard's copy is (healing/buddies.py): the least number that puts
        most copies on another node; 0: there is nobody else."""
        nodes = {member.rank: member.node for member in self.members}

        def apart(step: int) -> int:
            return sum(nodes[rank] != nodes[self.layout.further(rank, step)] for rank in nodes)

        return max(range(1, self.layout.num_replicas), key=lambda step: (apart(step), -step), default=0)

    def holder_of(self, rank: Rank) -> Rank:
        """Who keeps the copy of this rank's shard."""
        return self.layout.further(rank, self.buddy_distance())

    def wounded(self) -> tuple[int, ...]:
        """Live replicas in which a rank was touched."""
        hit = {self.layout.replica_of(r) for r in self.touched}
        return tuple(r for r in self.replicas if r in hit)

    @property
    def ended(self) -> tuple[Rank, ...]:
        """Ranks whose groups inside their replica end: everybody's of a replica in which somebody was touched.

        Not only the touched rank's: with tp and pp a rank may wait for one that shares no group with the lost one, but
        waits for it, or has gone to meet its heir.
        """
        hit = {self.layout.replica_of(r) for r in (*self.touched, *self.heirs)}
        return tuple(sorted(rank for replica in hit for rank in self.layout.replica_ranks(replica)))
