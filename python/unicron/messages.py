"""Everything that crosses a process boundary, as typed MessagePack structs with a version and size limits.

No pickle anywhere. A message is ``encode(msg)``: one byte of version, then the MessagePack of a tagged union.
``decode`` refuses by name: wrong version, too large, truncated, unknown type, wrong field.

Neighbouring versions understand each other, so that a cluster is upgraded while it trains: a message of the version
before or after is read, fields that this version does not know are passed over, and whoever adds a field gives it a
default that means what the version before did. The version grows with every release whose messages differ; a type that
an older one does not know is refused there by name, so nothing may depend on its arrival until both speak it.

Three boundaries:
  worker <-> agent   Unix socket (0600), frames of u32 length + message; agent -> worker frames carry a binary
                     prefix that the native monitor reads (csrc/monitor/worker_monitor.h)
  agent <-> template Unix socket, same framing
  agent <-> coordinator, command line <-> coordinator   ZeroMQ with CURVE
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from unicron.types import Budgets, Cpu, EpochPlan, Layout, Network, Rank, Stage, Transfer

PROTOCOL_VERSION = 2
MESSAGE_BYTES_MAX = 4 << 20
# What msgspec raises for bytes that are no message: also text that is no UTF-8, and nesting without end.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
TEXT_CHARS_MAX = 16_384  # exception texts, reasons: truncated at the door, by the sender


def announced_name(plan: EpochPlan) -> str:
    """Tells plans apart that two coordinators announced under one number."""
    layout = plan.layout
    names = ",".join(f"{member.rank} {member.worker}" for member in plan.members)
    return f"{layout.tp},{layout.pp},{layout.dp} {zlib.crc32(names.encode()):08x}"


def cut(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """A text of bounded size: the head says what it is, the tail why it ended."""
    if len(text) <= chars_max:
        return text
    mark = f"\n... {len(text) - chars_max} characters and more left out ...\n"
    head = (chars_max - len(mark)) // 4
    return text[:head] + mark + text[len(text) - (chars_max - len(mark) - head) :]


class _Message(msgspec.Struct, frozen=True, tag_field="message", tag=True):
    pass


# ---------------------------------------------------------------- worker -> agent


class WorkerHello(_Message, frozen=True):
    task: str
    worker: str
    incarnation: int
    pid: int


class WorkerReady(_Message, frozen=True):
    """The model is built and managed (a member), or built for a guessed role and waiting (an understudy)."""

    worker: str
    rank: Rank  # role held, or the role guessed
    waiting: bool


class CollectiveFailed(_Message, frozen=True):
    """A collective raised and no new epoch has explained it yet. A symptom, not a verdict."""

    worker: str
    rank: Rank
    epoch: int
    iteration: int
    stage: Stage
    inside: bool  # a group inside the replica (True) or one that spans replicas
    text: str
    late: bool = False  # parameters were under way when a plan came: whoever computes with it is to be freed, too


class ExceptionRaised(_Message, frozen=True):
    """Sent before the process unwinds."""

    worker: str
    rank: Rank
    epoch: int
    iteration: int
    micro_batch: int
    stage: Stage
    type: str
    text: str
    where: str  # file:line of the innermost frame of the script
    raised_ns: int  # CLOCK_MONOTONIC
    thread: str = ""  # raised in this thread beside the loop's: the process lives on


class StateLost(_Message, frozen=True):
    """No live worker holds a clean copy of some shard of the agreed version."""

    worker: str
    rank: Rank
    epoch: int
    iteration: int  # the newest of which anybody has a part; -1: nobody has anything
    positions: tuple[int, ...]  # positions inside the replica (tp + tp_size * pp) without a holder


class Healed(_Message, frozen=True):
    """The interrupted iteration is committed; one rank's account of the recovery."""

    worker: str
    rank: Rank
    epoch: int
    iteration: int
    interrupted: int  # the iteration the failure interrupted
    iteration_ms: float  # wall time of the interrupted iteration on this rank
    median_ms: float  # median of the iterations before it
    committed_ns: int
    micro_batches_recomputed: tuple[tuple[int, int], ...]  # (iteration, micro-batch) whose forward began again here
    recompute_ms: float
    groups_kept: int
    groups_rebuilt: int
    state_source: str
    iterations_lost: int
    phases_ms: dict[str, float]  # seconds by phase of recovery: await_plan, regroup_inside, compute, regroup_cross...
    transfers: tuple[Transfer, ...] = ()  # of state, that this rank measured


class Saved(_Message, frozen=True):
    worker: str
    rank: Rank
    iteration: int
    path: str
    epoch: int = 0  # in which it was saved
    final: bool = False  # everybody holds at this iteration (SaveAndHold): nobody has trained on in this epoch


class LayoutReady(_Message, frozen=True):
    """ChangeLayout is done as far as this worker is concerned, or cannot be done (error): what it was, and its cost.

    Before that a member says, with iteration -1 and no error, that it holds for it: should the coordinator that
    announced it be gone, the next one knows that somebody waits. digest is then announced_name(plan).
    """

    worker: str
    rank: Rank  # in the new layout; -1: it leaves
    epoch: int  # of the plan that was announced
    iteration: int
    error: str = ""
    digest: str = ""  # of all global tensors, the same before and after
    num_tensors: int = 0
    state_bytes: int = 0  # of the global tensors, each counted once
    bytes_own: int = 0  # of all participants together: what stayed in its process,
    bytes_node: int = 0  # what went to another process of the node,
    bytes_cross: int = 0  # and what went to another node
    seconds: dict[str, float] = {}  # by part: build, meet, digest, move


class MoveReady(_Message, frozen=True):
    """MoveRoles, as far as this worker has come, or why it cannot (error).

    phase: prepared: the groups of the announced plan stand; held: it waits at the boundary and hears nothing; moved:
    a joiner has its leaver's state.
    """

    worker: str
    rank: Rank
    epoch: int  # of the plan that was announced
    phase: str
    iteration: int = -1
    joiners: tuple[str, ...] = ()  # of that plan: a coordinator that came back may announce another under its number
    error: str = ""
    num_connections: int = 0  # that it made for the announced plan
    state_bytes: int = 0  # that it took over
    seconds: dict[str, float] = {}  # by part


class Finished(_Message, frozen=True):
    """The script has left its block. With a tail (since 0.6) what follows is its own work still, and how the process
    ends says how that ended; without, the process is about to exit with 0."""

    worker: str
    rank: Rank
    tail: bool = False


class ArenaRequest(_Message, frozen=True):
    """RPC on a connection of its own. Answered by ArenaGrant with one descriptor (SCM_RIGHTS), and those of the GPU
    memory that a former owner left with the arena."""

    task: str
    worker: str
    rank: Rank
    nbytes: int
    digest: str  # of the arena's index: names, offsets, bytes, dtypes
    adopt: bool  # the role's last arena on this node is wanted; else a fresh one
    sizes: tuple[int, ...] = ()  # bytes of this worker's GPU slabs, whose descriptors come with a fresh one's request
    epoch: int = 0  # above 0: for a role of the layout that this epoch will bring; kept beside the present arenas


class GpuRequest(_Message, frozen=True):
    """RPC on a connection of its own, before anything is built for a role. Answered by GpuGrant."""

    task: str
    worker: str
    rank: Rank
    num_gpus: int  # that the worker sees


# ---------------------------------------------------------------- agent -> worker


class WorkerWelcome(_Message, frozen=True):
    """Answer to WorkerHello; followed by descriptors: pulse memfd."""

    node: str
    pulse_slot: int
    pulse_bytes: int
    store_secret: str  # CURVE secret key (Z85) this worker uses towards rendezvous stores
    store_public: str
    layout: Layout
    rank: Rank  # role, or for an understudy the role to guess
    waiting: bool  # True: understudy or joiner: build on stand-in groups, then wait for a plan naming this worker
    checkpoint_dir: str
    checkpoint_every: int
    warm_up: bool = False  # a whole iteration without peers first, then the script again from its top


class ArenaGrant(_Message, frozen=True):
    nbytes: int
    adopted: bool
    refused: str = ""  # why the last arena was not given (other digest, owner alive after the bound, none)
    sizes: tuple[int, ...] = ()  # of an adopted arena's GPU slabs; their descriptors follow the arena's own


class GpuGrant(_Message, frozen=True):
    index: int  # of this role's GPU among those that the node's workers see; -1: refused
    refused: str = ""


# ---------------------------------------------------------------- agent <-> template


class Fork(_Message, frozen=True):
    worker: str
    argv: tuple[str, ...]  # script and its arguments
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str


class Forked(_Message, frozen=True):
    worker: str
    pid: int


class ChildStatus(_Message, frozen=True):
    worker: str
    pid: int
    kind: str  # exited | signaled | stopped | continued
    status: int  # exit code or signal


# ---------------------------------------------------------------- agent -> coordinator


class WorkerStatus(_Message, frozen=True):
    task: str
    worker: str
    incarnation: int
    pid: int
    rank: Rank
    waiting: bool
    ready: bool
    epoch: int
    stage: Stage
    iteration: int
    progress: int = 0  # of the pulse page: grows with every step of the worker's loop
    loss: float | None = None  # of the last committed iteration
    gpu: bool = False  # it was given one of the node's
    progress_planned: int | None = None  # its progress when it was given the plan of `epoch`; None: an agent of 0.5


class AgentHello(_Message, frozen=True):
    node: str
    incarnation: int  # of the agent; a restarted agent has a higher one
    slots: int
    understudies: int
    store: str  # endpoint at which this agent would host rendezvous stores
    store_key: str
    workers: tuple[WorkerStatus, ...] = ()  # what lives here already (a coordinator that comes back finds it)
    plans: tuple[EpochPlan, ...] = ()  # newest plan known, per task
    clock: str = ""  # whose monotonic clock this agent reads; equal on one machine
    beat_port: int = 0  # UDP, on the host of its store; 0: it does not beat
    checks: bool = False  # it looks at its hardware before its node is used, and when it is told to
    control_network: Network | None = None  # of its store and its line to the coordinator
    state_network: Network | None = None  # of its workers' process groups


class PaceSample(_Message, frozen=True):
    """One committed iteration of one worker, as its pulse page tells."""

    iteration: int
    compute_ms: float  # of one micro-batch, without waiting in collectives
    waits_ms: tuple[float, ...]  # by types.WaitKind


class WorkerPace(_Message, frozen=True):
    worker: str
    rank: Rank
    samples: tuple[PaceSample, ...]


class AgentHeartbeat(_Message, frozen=True):
    node: str
    incarnation: int
    sequence: int
    workers: tuple[WorkerStatus, ...] = ()
    paces: tuple[WorkerPace, ...] = ()  # since the last heartbeat


class AgentChecked(_Message, frozen=True):
    """Every check of the node's hardware ended. Said again after each hello: it may not have arrived."""

    node: str
    incarnation: int
    unfit: str  # what is bad; "": nothing is
    checks: tuple[tuple[str, str, str], ...]  # (check, ok | bad | unknown, reason)


class HardwareSeen(_Message, frozen=True):
    """The driver or the kernel said that hardware failed, while workers run."""

    node: str
    severity: str
    text: str


class WorkerUp(_Message, frozen=True):
    node: str
    status: WorkerStatus


class WorkerLost(_Message, frozen=True):
    """A worker is dead, with positive evidence.

    The first evidence (its mutex) does not know how it died: cause is "" then, and the same message is sent again
    with the cause once the exit status is known.
    """

    node: str
    task: str
    worker: str
    incarnation: int
    rank: Rank  # -1: it held no role
    method: str  # Method
    cause: str  # "signal 9", "exit code 3", an exception's type
    text: str
    stage: Stage
    iteration: int
    micro_batch: int
    fault_ns: int  # when an injected fault happened, else 0 (CLOCK_MONOTONIC of that node)
    seen_ns: int
    log: str  # path of its stderr
    where: str = ""


class WorkerStopped(_Message, frozen=True):
    node: str
    task: str
    worker: str
    rank: Rank
    fault_ns: int
    seen_ns: int
    traced: bool = False  # a debugger or a frozen cgroup explains it
    held: str = ""  # ... in words


class WorkerContinued(_Message, frozen=True):
    """A stopped worker runs again, or a stalled one advances."""

    node: str
    task: str
    worker: str
    rank: Rank


class WorkerStalled(_Message, frozen=True):
    """The loop did not advance for stalled_ms. First a suspicion (1.5 x the usual of this stage), then sure (3 x)."""

    node: str
    task: str
    worker: str
    rank: Rank
    stage: Stage
    iteration: int
    micro_batch: int
    waiting_in_collective: bool
    stalled_ms: float
    budget_ms: float
    fault_ns: int
    seen_ns: int
    is_sure: bool = True  # no other evidence is asked for, besides a second signal
    usual_ms: float = 0.0  # 0: a bound that was declared, not learned
    cpu: Cpu = Cpu.UNKNOWN
    epoch: int | None = None  # the newest plan that its agent knew; None: an older agent does not say


class AskWaits(_Message, frozen=True):
    """Coordinator to agent: which of this task's workers wait for others now? Asked while a node is silent. An agent of
    an older version refuses it: then what its workers tell by themselves, later, is all there is."""

    task: str


class WorkersWait(_Message, frozen=True):
    """The answer: those that wait in a collective, for 1.5 x what is usual there and AgentConfig.waits_ms_min."""

    node: str
    task: str
    workers: tuple[str, ...]


class WorkerUnkillable(_Message, frozen=True):
    """Killed again and again, and still there: the kernel cannot end it (uninterruptible sleep)."""

    node: str
    task: str
    worker: str
    rank: Rank
    text: str


class WorkerExited(_Message, frozen=True):
    """Ended by itself with exit code 0, or as told."""

    node: str
    task: str
    worker: str
    rank: Rank
    code: int


class FromWorker(_Message, frozen=True):
    """A worker's own message, passed on unchanged with the node's name."""

    node: str
    task: str
    body: CollectiveFailed | ExceptionRaised | StateLost | Healed | Saved | LayoutReady | MoveReady | Finished
    seen_ns: int


# ---------------------------------------------------------------- coordinator -> agent


class TaskSpec(_Message, frozen=True):
    """What a node needs to start workers of a task."""

    task: str
    command: tuple[str, ...]  # script and arguments
    cwd: str
    env: dict[str, str]
    layout: Layout
    log_dir: str
    checkpoint_dir: str
    checkpoint_every: int  # 0: never
    stopped_grace_ms: int
    stop_grace_ms: int  # from SIGTERM to SIGKILL when the task is stopped
    stall_factor: float
    budgets: Budgets
    managed: bool  # False: a torchrun script that never joins: supervised and restarted only
    restart_count: int = 0


class AgentWelcome(_Message, frozen=True):
    term: int
    # Say hello once more: the node was declared lost, or missed something, while its connection lived on.
    again: bool = False


class BeatOrder(_Message, frozen=True):
    """How this node beats (csrc/monitor/beat.h), and whom it listens to. Replaces the former order."""

    node: int  # its number in beats
    key: bytes
    port: int  # UDP, on the coordinator's host
    period_ms: int
    witnesses: tuple[tuple[str, int], ...]  # (host, UDP port) of agents that listen to this one
    heard: tuple[tuple[int, int, bytes], ...]  # (number, incarnation, key) of those this one listens to


class CheckNode(_Message, frozen=True):
    """Look at your hardware again, and say what came of it."""

    reason: str


class StartWorkers(_Message, frozen=True):
    """Start one worker per entry: (worker id, incarnation, rank or guessed rank, waiting)."""

    spec: TaskSpec
    epoch: int
    workers: tuple[tuple[str, int, Rank, bool], ...]
    node_rank: int = 0
    nnodes: int = 1
    master_port: int = 0
    reason: str = ""
    warm_up: tuple[str, ...] = ()  # of them, those on slots of their own: they may do a whole iteration beforehand
    master_address: str = ""  # host of the first node, for scripts that rendezvous by themselves


class PublishEpoch(_Message, frozen=True):
    plan: EpochPlan


class EndWorker(_Message, frozen=True):
    """Kill with evidence: the reason names it."""

    task: str
    worker: str
    reason: str


class StopTask(_Message, frozen=True):
    task: str
    reason: str


class SaveAndHold(_Message, frozen=True):
    """The task gives up its slots: after an iteration that all members agree on they save and wait. They are ended when
    the checkpoint is complete, or go on in a newer epoch."""

    task: str
    reason: str


class ChangeLayout(_Message, frozen=True):
    """After an iteration that all members agree on they take the state over into plan.layout, together with who joins.
    The plan is published when all of them have it; any other newer epoch calls it off."""

    task: str
    former: EpochPlan  # the present one
    plan: EpochPlan
    reason: str


class MoveRoles(_Message, frozen=True):
    """Roles of plan.heirs go to other workers. First (switch false) its groups are made beside those in use; then,
    after an iteration that all members agree on, leavers send their state to the joiners. The plan is published when
    every joiner has it; any other newer epoch calls it off."""

    task: str
    former: EpochPlan  # the present one
    plan: EpochPlan
    reason: str
    switch: bool = False


class FinishUnderstudies(_Message, frozen=True):
    """The task is done: waiting workers leave with exit code 0."""

    task: str
    reason: str


class ArmFault(_Message, frozen=True):
    """Arm a fault in a worker's pulse page; it does it to itself exactly there (unicron inject)."""

    task: str
    rank: Rank
    fault: str  # kill | segv | abort | exit | exception | oom | stop | deadlock | gil | reset | leave
    point: str  # a name in faults/kinds.py, or pipeline | now
    iteration: int  # -1: the next time it passes
    micro_batch: int = -1


# ---------------------------------------------------------------- command line <-> coordinator


class Request(_Message, frozen=True):
    verb: str  # submit | ps | incidents | inject | cancel | nodes | describe | shutdown ...
    arguments: dict[str, Any] = {}


class Reply(_Message, frozen=True):
    ok: bool
    error: str = ""  # one line that says what to do
    result: Any = None


AnyMessage = (
    PaceSample | WorkerPace | WorkerUnkillable |
    WorkerHello | WorkerReady | CollectiveFailed | ExceptionRaised | StateLost | Healed | Saved | LayoutReady | Finished
    | MoveReady | MoveRoles | AskWaits | WorkersWait
    | ArenaRequest | GpuRequest | WorkerWelcome | ArenaGrant | GpuGrant | Fork | Forked | ChildStatus | WorkerStatus
    | AgentHello
    | AgentHeartbeat | AgentChecked | HardwareSeen | BeatOrder | CheckNode | WorkerUp | WorkerLost | WorkerStopped
    | WorkerContinued | WorkerStalled | WorkerExited | FromWorker | TaskSpec | AgentWelcome | StartWorkers
    | PublishEpoch | EndWorker | StopTask
    | FinishUnderstudies | SaveAndHold | ChangeLayout | ArmFault | Request | Reply
)  # fmt: skip


class MessageRefused(ValueError):
    """A message that cannot be taken: the name says which way it is wrong."""


class UnknownVersion(MessageRefused):
    pass


class TooLarge(MessageRefused):
    pass


class Malformed(MessageRefused):
    """Truncated, of unknown type, or with a wrong field."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Any) -> bytes:
    data = bytes((PROTOCOL_VERSION,)) + _encoder.encode(message)
    if len(data) > MESSAGE_BYTES_MAX:
        raise TooLarge(f"{type(message).__name__} is {len(data)} bytes, limit {MESSAGE_BYTES_MAX}")
    return data


def decode(data: bytes) -> Any:
    if len(data) > MESSAGE_BYTES_MAX:
        raise TooLarge(f"message of {len(data)} bytes, limit {MESSAGE_BYTES_MAX}")
    if not data:
        raise Malformed("empty message")
    if abs(data[0] - PROTOCOL_VERSION) > 1:
        raise UnknownVersion(
            f"message version {data[0]}, this unicron speaks {PROTOCOL_VERSION} and understands its neighbours:"
            " upgrade one version at a time"
        )
    try:
        return _decoder.decode(memoryview(data)[1:])
    except UNREADABLE as error:
        raise Malformed(str(error)) from None
