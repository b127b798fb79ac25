"""The demo's scenarios: one per row of the fault table, with the outcome each must have.

A scenario is data: faults armed in workers (they happen exactly at an iteration and a point), acts
on the cluster (they happen when training has reached an iteration), and what must then be true.
`compare.py` judges; `runner.py` carries out. Ranks are chosen from the layout, so that every
scenario runs at every layout."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from unicron.types import Layout, Rank

ITERATIONS = 28
FAULT_ITERATION = 12
# Iterations whose reduced gradient both runs keep: faults fall into it also when an act comes late.
GRADIENT_WINDOW = tuple(range(FAULT_ITERATION, FAULT_ITERATION + 8))
CHECKPOINT_EVERY = 5
EXTRA_S = 90.0
OUTAGE_S = 10.0  # how long the coordinator is away
MOVE_ITERATIONS = 60  # a joiner gets ready meanwhile
RANDOM_KILLS = 30
RANDOM_ITERATIONS = 300


@dataclass(frozen=True)
class Fault:
    """Armed in the pulse page of the worker that holds `rank`; iteration -1: the next time."""

    rank: Rank
    fault: str
    iteration: int
    point: str
    micro_batch: int = -1


@dataclass(frozen=True)
class Act:
    """Done to the cluster when iteration `after` is committed, then after a further `delay_s`."""

    # drain | undrain | kill_agent | kill_agent_alone | start_agent | kill_coordinator | start_coordinator | reshape
    do: str
    after: int
    node: int = -1
    delay_s: float = 0.0
    replica: int = -1  # the node is this replica's present home
    dp: int = 0  # of a reshape: asked for until the task is so wide
    fault: Fault | None = None  # armed with it: a pulse page holds one at a time
    when_dp: int = 0  # not before the task has so many replicas; 0: however many


@dataclass(frozen=True)
class Expect:
    """What must be true of the run. Counts of micro-batches are in shares of one replica."""

    outcome: str  # healed | resized | unaffected | stopped
    severities: tuple[str, ...] = ("SEV2",)  # of its incidents
    incidents_min: int = 1
    incidents_max: int = 1
    methods: tuple[str, ...] = ()  # () any
    recomputed_replicas: float = 1.0  # at most this many replicas' micro-batches begin again
    iterations_lost_max: int = 0
    iterations_lost_min: int = 0
    replaced: int | None = 1  # workers that were replaced; None: not looked at
    state_sources: tuple[str, ...] = ()
    text: str = ""  # what an incident's text or cause must contain
    is_grown: bool = False  # dp is whole again at the end
    narrowed_to: int = 0  # replicas to which the layout changed meanwhile; 0: it is not looked at
    gradient: bool = True  # of the healed iteration; False: none is interrupted, and the state is compared after it
    at_end: bool = False  # it fails after the last step, before the state is written that is compared
    told_more: bool = False  # nobody knows what a lost node had begun: incidents may say more, up to its share
    told_less: bool = False  # who computed for a lost node died of its own failure, and what it had counted with it
    groups_kept: bool = True  # > 0 where replicas have several ranks


@dataclass(frozen=True)
class Scenario:
    name: str
    says: str  # one line for people: what is done
    expect: Expect
    faults: tuple[Fault, ...] = ()
    acts: tuple[Act, ...] = ()
    iterations: int = ITERATIONS  # compared after so many
    extra_s: float = 0.0  # goes on for at most so long, until its acts are done and dp is whole again
    checkpoint_every: int = 0
    evaluate_every: int = 0  # iterations; the script does it between them
    spares: int = 0  # nodes beside those that the layout needs
    standbys: int = 0  # of them, those that may stand by
    poison: tuple[int, ...] = ()  # (rank, iteration, micro-batch) at which the script itself fails
    window: tuple[int, ...] = GRADIENT_WINDOW  # iterations whose reduced gradient is kept
    digests: bool = False  # of gradient and state, of every iteration
    layouts: tuple[Layout, ...] = ()  # that the task may be brought into
    spread: bool = False  # faults are armed one after the other, each when the one before is healed
    tags: frozenset[str] = field(default=frozenset())


Maker = Callable[[Layout, int], Scenario]
MAKERS: dict[str, Maker] = {}


def scenario(maker: Maker) -> Maker:
    MAKERS[maker.__name__.strip("_").replace("_", "-")] = maker
    return maker


def names() -> tuple[str, ...]:
    return tuple(MAKERS)


def in_all(*, sharded: bool = False) -> tuple[str, ...]:
    """What `--scenario all` runs: one per row of the table. Asked for by name: random-kills and drain (long). Last
    comes what needs a cluster of its own."""
    left_out = {"random-kills", "drain", "node-standby", "kill-gather"}
    last = "kill-gather" if sharded else "node-standby"
    return (*(name for name in MAKERS if name not in left_out), last)


def make(name: str, layout: Layout, seed: int = 0) -> Scenario:
    return MAKERS[name](layout, seed)


# -------------------------------------------------------------------- places


def victim(layout: Layout, replica: int = -1) -> Rank:
    """The last rank of a replica (the last replica): loss and tied embedding are there under pp."""
    return layout.replica_ranks(replica % layout.num_replicas)[-1]


def share(layout: Layout) -> int:
    """Sets of micro-batches of one replica (in each of which it has one a lane)."""
    return layout.num_sets // layout.num_replicas


def middle(layout: Layout, rank: Rank) -> int:
    """A micro-batch of that rank, when half of its share is summed."""
    number = layout.replica_of(rank) * share(layout) + share(layout) // 2
    return number * layout.ep + layout.lane_of(rank)


def at_compute(layout: Layout, fault: str) -> tuple[Fault, ...]:
    return (Fault(victim(layout), fault, FAULT_ITERATION, "compute", middle(layout, victim(layout))),)


def at_point(layout: Layout, fault: str, point: str, replica: int = -1, number: int = -1) -> tuple[Fault, ...]:
    """number: of a micro-batch or, in the reduction, of a segment."""
    return (Fault(victim(layout, replica), fault, FAULT_ITERATION, point, number),)


# -------------------------------------------------------------------- a worker dies


@scenario
def kill_compute(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "kill-compute",
        "SIGKILL to a worker with half of its micro-batches summed",
        Expect("healed", methods=("process",)),
        at_compute(layout, "kill"),
    )


@scenario
def kill_pipeline(layout: Layout, _seed: int) -> Scenario:
    rank = layout.replica_ranks(layout.num_replicas - 1)[0]  # the first stage: the others wait for its send
    return Scenario(
        "kill-pipeline",
        "SIGKILL between a forward and what follows it: the send to the next stage, or backward",
        Expect("healed", methods=("process",)),
        (Fault(rank, "kill", FAULT_ITERATION, "pipeline", middle(layout, rank)),),
    )


@scenario
def kill_reduce(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "kill-reduce",
        "SIGKILL in the gradient reduction between replicas: nothing is computed again",
        Expect("healed", recomputed_replicas=0, methods=("process",), state_sources=("own_arena",)),
        at_point(layout, "kill", "reduce", number=1),
    )


@scenario
def kill_commit(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "kill-commit",
        "SIGKILL on entering the commit, in replica 0",
        Expect("healed", recomputed_replicas=0, methods=("process",)),
        at_point(layout, "kill", "commit", replica=0),
    )


@scenario
def kill_end(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "kill-end",
        "SIGKILL after the last iteration's step: nobody has left yet, and an heir ends the script in its place",
        Expect("healed", recomputed_replicas=0, methods=("process",), gradient=False, at_end=True),
        (Fault(victim(layout), "kill", ITERATIONS, "log"),),
    )


@scenario
def kill_rest(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "kill-rest",
        "SIGKILL behind the loop, when the others have left: an heir does alone what is left of its script",
        Expect(
            "healed",
            recomputed_replicas=0,
            methods=("process",),
            state_sources=("own_arena",),
            gradient=False,
            at_end=True,
            groups_kept=False,
        ),
        (Fault(victim(layout), "kill", ITERATIONS, "rest"),),
    )


@scenario
def kill_step(layout: Layout, _seed: int) -> Scenario:
    says, source = "the torn state is not used", "replica"
    if layout.steps_undoably:
        says, source = "the heir undoes what is open and finishes the step", "own_arena"
    return Scenario(
        "kill-step",
        f"SIGKILL with half of the parameters written: {says}",
        Expect("healed", recomputed_replicas=1.0, methods=("process",), state_sources=(source,)),
        at_point(layout, "kill", "step"),
    )


@scenario
def kill_gather(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "kill-gather",
        "SIGKILL after the step, before the others have its shard of the new parameters (distributed optimizer)",
        Expect("healed", recomputed_replicas=1.0, methods=("process",), state_sources=("own_arena",)),
        at_point(layout, "kill", "gather"),
    )


@scenario
def segv(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "segv",
        "a worker crashes: SIGSEGV",
        Expect("healed", methods=("process",), text="signal 11"),
        at_compute(layout, "segv"),
    )


@scenario
def abort(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "abort",
        "a worker aborts, in the reduction",
        Expect("healed", recomputed_replicas=0, methods=("process",), text="signal 6"),
        at_point(layout, "abort", "reduce", number=1),
    )


@scenario
def exit(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "exit",
        "a worker leaves by os._exit(3) without a word",
        Expect("healed", methods=("process",), text="exit code 3"),
        at_compute(layout, "exit"),
    )


# -------------------------------------------------------------------- a worker says or shows it


@scenario
def exception(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "exception",
        "an exception in the training loop",
        Expect("healed", methods=("exception",), text="InjectedFault"),
        at_compute(layout, "exception"),
    )


@scenario
def out_of_memory(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "out-of-memory",
        "MemoryError in the training loop",
        Expect("healed", methods=("exception",), text="MemoryError"),
        at_compute(layout, "oom"),
    )


@scenario
def stop(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "stop",
        "SIGSTOP: seen at once, ended after its grace period (0 here), replaced",
        Expect("healed"),
        at_compute(layout, "stop"),
    )


@scenario
def deadlock(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "deadlock",
        "the training loop waits for a lock for ever; the process is alive",
        Expect("healed", methods=("statistics",)),
        at_compute(layout, "deadlock"),
    )


@scenario
def gil(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "gil",
        "native code holds the interpreter's lock for ever: no Python of that process runs",
        Expect("healed", methods=("statistics",)),
        at_compute(layout, "gil"),
    )


@scenario
def reset(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "reset",
        "connections reset with both ends alive: groups are rebuilt, nobody restarts",
        # Every group of that rank breaks, so its replica may have to compute again.
        Expect("healed", severities=("SEV3",), replaced=0, methods=("connection",)),
        at_point(layout, "reset", "reduce", number=1),
    )


# -------------------------------------------------------------------- a node, an agent, the
# coordinator


@scenario
def node_lost(layout: Layout, _seed: int) -> Scenario:
    return _node("node-lost", "an agent and all its workers die", "kill_agent", layout)


@scenario
def agent_alone(layout: Layout, _seed: int) -> Scenario:
    says = "an agent dies alone: its workers end at once, no orphan trains on"
    return _node("agent-alone", says, "kill_agent_alone", layout)


def _node(name: str, says: str, kill: str, layout: Layout) -> Scenario:
    node = layout.num_replicas - 1
    expect = Expect(
        "resized",
        severities=("SEV1",),
        replaced=None,
        is_grown=True,
        incidents_max=layout.replica_size + 1,
        told_more=True,
    )
    if layout.copies_shards and layout.ep > 1:  # its layout cannot change
        return Scenario(
            name,
            f"{says}; its shards of the optimizer's state are taken from their copies, on other nodes until it is back",
            replace(
                from_copies(expect, layout),
                outcome="resized",
                severities=("SEV1", "INFO"),
                incidents_max=layout.replica_size + 2,
            ),
            acts=(Act(kill, FAULT_ITERATION, node), Act("start_agent", FAULT_ITERATION, node, delay_s=2.0)),
        )
    if layout.sharded and not layout.copies_shards:
        return Scenario(
            name,
            f"{says}; its shards of the optimizer's state are lost: back to the last checkpoint when it comes back",
            _restored(layout, replaced=None, severities=("SEV1",)),
            acts=(Act(kill, FAULT_ITERATION, node), Act("start_agent", FAULT_ITERATION, node, delay_s=2.0)),
            checkpoint_every=CHECKPOINT_EVERY,
        )
    return Scenario(
        name,
        f"{says}; later the node comes back and dp grows",
        replace(from_copies(expect, layout), outcome="resized") if layout.copies_shards else expect,
        acts=(Act(kill, FAULT_ITERATION, node), Act("start_agent", FAULT_ITERATION + 8, node)),
        extra_s=EXTRA_S,
    )


def from_copies(expect: Expect, layout: Layout) -> Expect:
    """As expect, with a node's shards out of their copies, which may take everybody back some iterations."""
    every = layout.buddy_every
    again = layout.num_replicas * (every + 2) if every else 0  # and what was begun of the interrupted iteration
    return replace(
        expect,
        outcome="healed",
        state_sources=("buddy" if layout.buddy else "replica",),
        groups_kept=False,
        iterations_lost_max=every + 1 if every else 0,
        recomputed_replicas=expect.recomputed_replicas + again,
    )


def _restored(layout: Layout, *, replaced: int | None, severities: tuple[str, ...]) -> Expect:
    lost = FAULT_ITERATION % CHECKPOINT_EVERY
    return Expect(
        "healed",
        severities=severities,
        incidents_max=2 * layout.world_size,
        iterations_lost_min=lost,
        iterations_lost_max=lost + 2,  # an act on the cluster follows what is seen of the iteration
        recomputed_replicas=float(layout.num_replicas * (lost + 3)),  # and what was begun of the interrupted one
        replaced=replaced,
        state_sources=("checkpoint",),
        groups_kept=False,
    )


@scenario
def node_standby(layout: Layout, _seed: int) -> Scenario:
    last = layout.num_replicas - 1
    source = "buddy" if layout.buddy else "replica"
    return Scenario(
        "node-standby",
        "an agent and all its workers die: a node that stands by takes their roles, and the width stays",
        Expect(
            "healed", severities=("SEV1",), incidents_max=layout.replica_size + 1, replaced=layout.replica_size,
            state_sources=(source,), told_more=True,
        ),
        acts=(
            Act("kill_agent", FAULT_ITERATION, replica=last),
            Act("start_agent", FAULT_ITERATION + 8, replica=last),
        ),
        spares=1,
        standbys=1,
    )  # fmt: skip


@scenario
def drain(layout: Layout, _seed: int) -> Scenario:
    moved = tuple(range(layout.num_replicas - max(1, layout.num_replicas // 2), layout.num_replicas))
    return Scenario(
        "drain",
        f"nodes are drained ({len(moved)} at once): their roles move to free ones between two iterations",
        Expect(
            "healed", severities=("INFO",), incidents_max=len(moved), methods=("notice",), recomputed_replicas=0,
            replaced=len(moved) * layout.replica_size, state_sources=("node_arena",), gradient=False,
            groups_kept=False,
        ),
        acts=(
            *(Act("drain", FAULT_ITERATION, replica=replica) for replica in moved),
            *(Act("undrain", MOVE_ITERATIONS - 5, replica=replica) for replica in moved),
        ),
        iterations=MOVE_ITERATIONS,
        spares=len(moved),
    )  # fmt: skip


@scenario
def coordinator(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "coordinator",
        f"the coordinator dies and comes back after {OUTAGE_S:.0f} s: training does not notice",
        Expect(
            "unaffected",
            severities=("INFO",),
            incidents_min=0,
            incidents_max=1,
            recomputed_replicas=0,
            replaced=0,
        ),
        acts=(
            Act("kill_coordinator", FAULT_ITERATION),
            Act("start_coordinator", FAULT_ITERATION, delay_s=OUTAGE_S),
        ),
        extra_s=EXTRA_S,
    )


# -------------------------------------------------------------------- the two ends of healing


@scenario
def fatal(layout: Layout, _seed: int) -> Scenario:
    return Scenario(
        "fatal",
        "the script fails at the same sample in a second incarnation: the task stops, and says why",
        Expect(
            "stopped",
            severities=("SEV2", "FATAL"),
            incidents_min=1,
            incidents_max=3,
            replaced=None,
            recomputed_replicas=2.0,
            text="poisoned sample",
        ),
        poison=(victim(layout), FAULT_ITERATION, middle(layout, victim(layout))),
    )


@scenario
def checkpoint(layout: Layout, _seed: int) -> Scenario:
    """Every holder of one position dies with half of its parameters written: no clean copy is
    left.
    """
    holders = list(layout.peers(victim(layout)))
    says = "every holder of a state dies in its step: back to the last checkpoint"
    expect = _restored(layout, replaced=len(holders), severities=("SEV2", "SEV1"))
    if layout.sharded:
        says = "every holder of a position's shards dies in its step: each heir finishes its predecessor's"
        expect = Expect(
            "healed", incidents_max=len(holders), recomputed_replicas=0, replaced=len(holders),
            state_sources=("own_arena",), groups_kept=False,
        )  # fmt: skip
    return Scenario(
        "checkpoint",
        says,
        expect,
        tuple(Fault(rank, "kill", FAULT_ITERATION, "step") for rank in holders),
        checkpoint_every=CHECKPOINT_EVERY,
    )


@scenario
def random_kills(layout: Layout, seed: int) -> Scenario:
    stream = random.Random(seed)
    points = ("compute", "pipeline", "reduce", "commit", "step", "idle") + ("gather",) * layout.sharded
    gap = (RANDOM_ITERATIONS - 20) // RANDOM_KILLS
    kills = tuple(
        Fault(
            stream.randrange(layout.world_size),
            "kill",
            8 + number * gap + stream.randrange(gap),
            stream.choice(points),
        )
        for number in range(RANDOM_KILLS)
    )
    return Scenario(
        "random-kills",
        f"{RANDOM_KILLS} seeded kills at random ranks and points in {RANDOM_ITERATIONS} iterations",
        Expect(
            "healed",
            incidents_min=RANDOM_KILLS,
            incidents_max=RANDOM_KILLS,
            recomputed_replicas=float(RANDOM_KILLS),
            replaced=None,
            groups_kept=False,  # an idle worker's death may need no group
        ),
        kills,
        iterations=RANDOM_ITERATIONS,
        spread=True,
    )
